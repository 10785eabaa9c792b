"""Gradient clipping in place, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def global_norm(grads: Iterable[Tensor | None]) -> Tensor:
    """Euclidean norm of all gradients taken as one vector.

    sqrt(sum_g ||g||^2), a missing gradient counts as 0

    Args:
        grads: gradients of any shapes; None where a parameter has none.

    Returns:
        0-d tensor; 0 if there are no gradients.
    """
    present = _present(grads)
    if not present:
        return torch.zeros(())
    norms = torch._foreach_norm(present, 2.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@torch.no_grad()
def clip_by_global_norm_(grads: Iterable[Tensor | None], max_norm: float) -> Tensor:
    """Scales all gradients, in place, so that their global norm is at most `max_norm`.

    g <- g max_norm / (norm + 1e-6) if norm is finite, norm > max_norm and max_norm > 0
    g, the same to the bit, otherwise

    RLlib's `grad_clip_by="global_norm"`, which however makes them all NaN or 0 if the norm is not finite.

    Args:
        grads: gradients of any shapes; None where a parameter has none.
        max_norm: the cap; 0 or less switches clipping off.

    Returns:
        0-d tensor, the global norm before clipping.
    """
    present = _present(grads)
    norm = global_norm(present)
    if present and max_norm > 0:
        factor = _factor(norm, max_norm)
        for device in {g.device for g in present}:
            torch._foreach_mul_([g for g in present if g.device == device], factor.to(device))
    return norm


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


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    # 1 leaves every bit as it is.
    return torch.where((norm > max_norm) & norm.isfinite(), max_norm / (norm + 1e-6), 1.0)
