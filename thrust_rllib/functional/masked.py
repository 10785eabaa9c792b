"""Means, moments and standardisation over the elements that count."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Dim = int | tuple[int, ...] | None


def masked_mean(x: Tensor, mask: Tensor | None = None, dim: Dim = None) -> Tensor:
    """Mean of the elements that count.

    sum(mask x) / sum(mask), 0 where nothing counts

    What stands at masked elements of `x` never matters, NaN and infinity included, and their gradient is
    exactly 0. If `x` was computed from masked NaNs, mask the inputs too: further back 0 times an infinite
    derivative is NaN.

    Args:
        x: [...] numbers.
        mask: bool, True where an element counts; as many dimensions as `x`, may broadcast. None means all.
        dim: the dimensions to reduce; None means all.

    Returns:
        The remaining dimensions.

    Raises:
        ValueError: the mask is not bool or does not broadcast to `x`.
    """
    _check_mask(x, mask)
    total, count = _sums(x, mask, dim)
    return _reduced(total / count.clamp(min=1), dim)


def masked_moments(x: Tensor, mask: Tensor | None = None, dim: Dim = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population standard deviation and number of the elements that count.

    mean = sum(mask x) / n, std = sqrt(sum(mask (x - mean)^2) / n), n = sum(mask)

    Equal elements give a std of exactly 0, however large they are, with gradient 0.

    Args:
        x: [...] numbers.
        mask: bool, True where an element counts; as many dimensions as `x`, may broadcast. None means all.
        dim: the dimensions to reduce; None means all.

    Returns:
        (mean, std, count), each of the remaining dimensions; all 0 where nothing counts.

    Raises:
        ValueError: the mask is not bool or does not broadcast to `x`.
    """
    _check_mask(x, mask)
    _, std, mean, count = _centre(x, mask, dim)
    return _reduced(mean, dim), _reduced(std, dim), _reduced(count, dim)


def standardize(
    x: Tensor,
    mask: Tensor | None = None,
    dim: Dim = None,
    floor: Literal["max", "add"] = "max",
    eps: float = 1e-8,
) -> Tensor:
    """Subtracts the mean and divides by the population standard deviation.

    floor "max": (x - mean) / max(std, eps)
    floor "add": (x - mean) / (std + eps)

    The scopes of `standardize_advantages` are this function over different dimensions:

    | scope | rows that share a mean and std | floor |
    |---|---|---|
    | "rollout" | one agent's rows of the whole rollout, before the epochs | "max" |
    | "minibatch" | one agent's rows of the minibatch | "add" |
    | "team" | all agents' rows of the minibatch | "add" |

    Args:
        x: [...] numbers, usually advantages.
        mask: bool, True where an element counts; as many dimensions as `x`, may broadcast. None means all.
        dim: the dimensions that share a mean and std; None means all.
        floor: how a small std is kept from zero.
        eps: the floor.

    Returns:
        The shape of `x`; 0 where masked; exactly 0 for equal elements or a single one; empty stays empty.

    Raises:
        ValueError: the mask is not bool or does not broadcast to `x`, or `floor` is neither name.
    """
    if floor not in ("max", "add"):
        raise ValueError(f"floor is {floor!r}; use 'max' (divide by max(std, eps)) or 'add' (by std + eps).")
    _check_mask(x, mask)
    deviation, std, _, _ = _centre(x, mask, dim)
    return deviation / (std.clamp(min=eps) if floor == "max" else std + eps)


def _centre(x: Tensor, mask: Tensor | None, dim: Dim) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x - mean with 0 where masked, std, mean, count); the last three keep the reduced dimensions as 1."""
    # Shifted by one of its own elements a constant is exactly 0, so no rounding error is taken for variance.
    # The moments do not depend on the shift: it needs no gradient.
    x = _floating(x)
    with torch.no_grad():
        shift = _minimum(x, mask, dim)
    total, count = _sums(x - shift, mask, dim)
    number = count.clamp(min=1)
    offset = total / number
    deviation = x - shift - offset
    if mask is not None:
        deviation = deviation.where(mask, 0)
    # The norm has gradient 0 at 0, where sqrt of a variance would have an infinite one.
    std = torch.linalg.vector_norm(deviation, dim=_dims(x, dim), keepdim=True) / number.sqrt()
    return deviation, std, offset + shift, count


def _check_mask(x: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, needed torch.bool: compare it first, e.g. `mask > 0`.")
    if mask.dim() != x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, x has shape {tuple(x.shape)}: give the mask the dimensions "
            "of x, 1 where it is the same for all (mask.unsqueeze(-1) for a mask of rows)."
        )


def _sums(x: Tensor, mask: Tensor | None, dim: Dim) -> tuple[Tensor, Tensor]:
    x = _floating(x)
    if mask is None:
        total = _sum(x, dim)
        return total, torch.full_like(total, x.numel() / max(total.numel(), 1))
    return _sum(x.where(mask, 0), dim), _sum(mask.expand_as(x).to(x.dtype), dim)


def _minimum(x: Tensor, mask: Tensor | None, dim: Dim) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    if mask is not None:
        x = x.masked_fill(~mask, torch.inf)
    smallest = x.amin(_dims(x, dim), keepdim=True)
    return smallest.masked_fill(smallest == torch.inf, 0)


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _dims(x: Tensor, dim: Dim) -> tuple[int, ...]:
    return tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)


def _sum(x: Tensor, dim: Dim) -> Tensor:
    return x.sum(_dims(x, dim), keepdim=True) if x.dim() else x


def _reduced(x: Tensor, dim: Dim) -> Tensor:
    for d in sorted((d % x.dim() for d in _dims(x, dim)), reverse=True):
        x = x.squeeze(d)
    return x
