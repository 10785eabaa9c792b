"""What functions of several agents' features share: shape guards, one padded tensor, centred columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # below it the std of a float32 activation of size 1 is rounding noise


def check_agents(function: str, what: str, rows: Sequence[Tensor], masks: Sequence[Tensor] | None) -> None:
    """Raises ValueError unless there are 2 agents or more whose tensors and masks belong to the same rows.

    Args:
        function: its name, for the message.
        what: the name of the tensors, for the message.
        rows: see `check_rows`.
        masks: see `check_rows`.
    """
    if len(rows) < 2:
        raise ValueError(f"{function} needs the {what} of 2 agents or more, got {len(rows)}.")
    check_rows(what, rows, masks)


def check_rows(what: str, rows: Sequence[Tensor], masks: Sequence[Tensor] | None) -> None:
    """Raises ValueError unless the tensors are [B, D] and the masks [B] bool, one per tensor."""
    first = rows[0].shape
    for i, z in enumerate(rows):
        if z.dim() != 2 or z.shape[0] != first[0] or z.shape[1] == 0:
            raise ValueError(
                f"{what}[{i}] has shape {tuple(z.shape)}, {what}[0] has shape {tuple(first)}: needed "
                "[B, D] with D >= 1 and the same B for all agents: flatten leading dimensions, take the same "
                "joint rows."
            )
    if masks is None:
        return
    if len(masks) != len(rows):
        raise ValueError(f"{len(masks)} masks for {len(rows)} agents: give one [B] mask per agent, or None.")
    for i, mask in enumerate(masks):
        if mask.shape != first[:1] or mask.dtype != torch.bool:
            raise ValueError(
                f"masks[{i}] has shape {tuple(mask.shape)} and dtype {mask.dtype}, {what}[0] has shape "
                f"{tuple(first)}: needed [B] bool; flatten it and compare it, e.g. `mask > 0`."
            )


def stack_padded(features: Sequence[Tensor]) -> Tensor:
    """[B, D_i] of N agents to [N, B, max D_i], with columns of zeros on the right."""
    D = max(z.shape[1] for z in features)
    return torch.stack([F.pad(z, (0, D - z.shape[1])) if z.shape[1] < D else z for z in features])


def centre(z: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(z - mean with 0 where masked [..., B, D], std [..., 1, D]) of the columns of z [..., B, D]."""
    if z.shape[-2] == 0:
        return z, z.sum(-2, keepdim=True)
    # Shifted by its first row a constant column is exactly 0 (see `masked._centre`, which takes the minimum).
    if rows is None:
        z = z - z[..., :1, :].detach()
        z = z - z.mean(-2, keepdim=True)
        return z, torch.linalg.vector_norm(z, dim=-2, keepdim=True) / z.shape[-2] ** 0.5
    first = rows.to(torch.uint8).argmax(-2, keepdim=True).expand(*z.shape[:-2], 1, z.shape[-1])
    number = rows.sum(-2, keepdim=True).clamp(min=1).to(z.dtype)
    z = (z - z.detach().gather(-2, first)).where(rows, 0)
    z = (z - z.sum(-2, keepdim=True) / number).where(rows, 0)
    return z, torch.linalg.vector_norm(z, dim=-2, keepdim=True) / number.sqrt()
