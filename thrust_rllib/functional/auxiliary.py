"""How well a scalar is predicted: errors to train on, and an accuracy to look at."""

from __future__ import annotations

import torch
from torch import Tensor

from thrust_rllib.functional._checks import check_same_shape

SMALLEST_TARGET = 1e-3
"""Smaller ones do not count in `relative_accuracy`."""


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """(p - y)^2, element by element, without a factor of 1/2.

    Args:
        predictions: [...] p.
        targets: [...] y.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("predictions", predictions, "targets", targets)
    return (predictions - targets).square()


def huber_error(predictions: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    """(p - y)^2 / 2 up to delta, behind it delta (|p - y| - delta / 2): the gradient is never larger than delta.

    Args:
        predictions: [...] p.
        targets: [...] y.
        delta: where the parabola becomes a line; > 0.

    Raises:
        ValueError: the shapes differ, or delta is not positive.

    Source: Huber 1964, "Robust estimation of a location parameter".
    """
    check_same_shape("predictions", predictions, "targets", targets)
    if not delta > 0:
        raise ValueError(f"delta is {delta!r}; needed: a number > 0.")
    distance = (predictions - targets).abs()
    # min(d, delta) (d - min(d, delta) / 2) is both branches in one, with one gradient at d = delta.
    inside = distance.clamp(max=delta)
    return inside * (distance - inside / 2)


def relative_accuracy(predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """One minus the median relative error over the last dimension, cut to [0, 1].

    1 - median |p - y| / |y| over the rows with |y| > 0.001

    The median of an even number of errors is the mean of the two in the middle. Targets of 0 have no relative error:
    they are left out.

    Args:
        predictions: [..., R] p.
        targets: [..., R] y.
        mask: bool, True where a row counts; broadcasts to [..., R]. None means all.

    Returns:
        [...], without gradient; 0 where nothing counts. What stands at masked rows never matters, NaN included.

    Raises:
        ValueError: the shapes differ, or the mask is not bool or does not broadcast to them.

    Source: the seed's metric, which counts connected steps, λ₂ > 0.001.
    """
    check_same_shape("predictions", predictions, "targets", targets)
    if mask is not None and (mask.dtype != torch.bool or not _broadcasts(mask.shape, predictions.shape)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, predictions have shape "
            f"{tuple(predictions.shape)}: needed bool that broadcasts to it, e.g. `mask > 0`."
        )
    if not predictions.shape[-1]:
        return predictions.new_zeros(predictions.shape[:-1])
    with torch.no_grad():
        counts = targets.abs() > SMALLEST_TARGET
        if mask is not None:
            counts = counts & mask
        errors = ((predictions - targets) / targets).abs().masked_fill(~counts, torch.inf)
        count = counts.sum(-1)
        ordered = errors.sort(-1).values
        middle = torch.stack([(count - 1) // 2, count // 2], dim=-1).clamp(min=0)
        accuracy = (1 - ordered.gather(-1, middle).mean(-1)).clamp(0, 1)
        return accuracy.where(count > 0, 0)


def _broadcasts(shape: torch.Size, needed: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(needed), strict=False)
    return len(shape) <= len(needed) and all(n in (1, m) for n, m in pairs)
