"""Shape guards shared by the functions of this package: they name both shapes and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor


def check_same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raises ValueError unless both tensors have one shape."""
    if x.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} has shape {tuple(other.shape)}: "
            f"give {other_name} the shape of {name} (expand or squeeze it before the call)."
        )


def check_elementwise(name: str, x: Tensor, **others: Tensor) -> None:
    """Raises ValueError unless the tensors pair up element by element.

    They may broadcast, but only with equal numbers of dimensions (0-d tensors aside): [B] against [B, 1]
    would silently become [B, B].
    """
    for other_name, other in others.items():
        if other.dim() and x.dim() and other.dim() != x.dim():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {other_name} has shape {tuple(other.shape)}: "
                f"give both the same number of dimensions (squeeze(-1) or unsqueeze(-1) one of them)."
            )
        if not _broadcastable(x.shape, other.shape):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {other_name} has shape {tuple(other.shape)}: "
                "these do not broadcast; take both from the same rows."
            )


def check_fits_into(name: str, x: Tensor, other_name: str, shape: torch.Size) -> None:
    """Raises ValueError unless `x` broadcasts to `shape` without enlarging it."""
    if x.dim() > len(shape) or not _broadcastable(x.shape, shape, into=True):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} has shape {tuple(shape)}: "
            f"{name} must be a number or broadcast to {other_name}; add or drop dimensions of size 1."
        )


def _broadcastable(shape: torch.Size, other: torch.Size, into: bool = False) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(n == m or n == 1 or (m == 1 and not into) for n, m in pairs)
