"""Gradient clipping in place, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def global_norm(grads: Iterable[Tensor | None]) -> Tensor:
    """Euclidean norm of all gradients taken as one vector.

    sqrt(sum_g ||g||^2), a missing gradient counts as 0

    Args:
        grads: gradients of any shapes, on one device; None where a parameter has none.

    Returns:
        0-d tensor; 0 if there are no gradients.
    """
    grads = list(grads)
    return global_norms(grads, _one_group(grads), 1)[0]


@torch.no_grad()
def global_norms(grads: Sequence[Tensor | None], group: Tensor, num_groups: int) -> Tensor:
    """`global_norm` of m groups of gradients at once.

    Args:
        grads: as of `global_norm`.
        group: [len(grads)] int64, the group of each, from 0 to m − 1.
        num_groups: m.

    Returns:
        [m]; 0 for a group without gradients.
    """
    present = _present(grads)
    if not present:
        return torch.zeros(num_groups, device=group.device)
    norms = iter(torch._foreach_norm(present, 2.0))
    nothing = present[0].new_zeros(())
    squares = torch.stack([nothing if grad is None else next(norms) for grad in grads]).square()
    return squares.new_zeros(num_groups).index_add(0, group, squares).sqrt()


@torch.no_grad()
def clip_by_global_norm_(grads: Iterable[Tensor | None], max_norm: float) -> Tensor:
    """Scales all gradients, in place, so that their global norm is at most `max_norm`.

    g <- g max_norm / (norm + 1e-6) if norm is finite, norm > max_norm and max_norm > 0
    g, the same to the bit, otherwise

    RLlib's `grad_clip_by="global_norm"`, which however makes them all NaN or 0 if the norm is not finite.

    Args:
        grads: gradients of any shapes, on one device; None where a parameter has none.
        max_norm: the cap; 0 or less switches clipping off.

    Returns:
        0-d tensor, the global norm before clipping.
    """
    grads = list(grads)
    group = _one_group(grads)
    return clip_by_global_norms_(grads, group, torch.full((1,), max_norm, dtype=torch.float64, device=group.device))[0]


@torch.no_grad()
def clip_by_global_norms_(grads: Sequence[Tensor | None], group: Tensor, max_norms: Tensor) -> Tensor:
    """`clip_by_global_norm_` of m groups of gradients at once, each with its own norm and cap.

    Args:
        grads: as of `clip_by_global_norm_`.
        group: [len(grads)] int64, the group of each, from 0 to m − 1.
        max_norms: [m]; 0 or less, or inf, switches the clipping of a group off.

    Returns:
        [m], the groups' global norms before clipping.
    """
    norms = global_norms(grads, group, len(max_norms))
    if present := _present(grads):
        factors = _factor(norms, max_norms.where(max_norms > 0, torch.inf))[group].unbind()
        torch._foreach_mul_(present, [f for f, grad in zip(factors, grads, strict=True) if grad is not None])
    return norms


@torch.no_grad()
def clip_by_norm_(grads: Iterable[Tensor | None], max_norm: float) -> None:
    """Scales every gradient on its own, in place, so that its norm is at most `max_norm`.

    The rule of `clip_by_global_norm_` for each tensor; RLlib's `grad_clip_by="norm"`.

    Args:
        grads: gradients of any shapes; None where a parameter has none.
        max_norm: the cap; 0 or less switches clipping off.
    """
    present = _present(grads)
    if present and max_norm > 0:
        torch._foreach_mul_(present, tuple(_factor(norm, max_norm) for norm in torch._foreach_norm(present, 2.0)))


@torch.no_grad()
def clip_by_value_(grads: Iterable[Tensor | None], max_value: float) -> None:
    """Limits every number of every gradient, in place, to [-max_value, max_value].

    g <- clip(g, -max_value, max_value); RLlib's `grad_clip_by="value"`. NaN stays NaN.

    Args:
        grads: gradients of any shapes; None where a parameter has none.
        max_value: the cap; 0 or less switches clipping off.
    """
    present = _present(grads)
    if present and max_value > 0:
        torch._foreach_clamp_min_(present, -max_value)
        torch._foreach_clamp_max_(present, max_value)


def _present(grads: Iterable[Tensor | None]) -> list[Tensor]:
    return [g for g in grads if g is not None]


def _one_group(grads: Sequence[Tensor | None]) -> Tensor:
    device = next((g.device for g in grads if g is not None), None)
    return torch.zeros(len(grads), dtype=torch.long, device=device)


def _factor(norm: Tensor, max_norm: Tensor | float) -> Tensor:
    # 1 leaves every bit as it is.
    return torch.where((norm > max_norm) & norm.isfinite(), max_norm / (norm + 1e-6), 1.0)
