"""PPO's policy term where an action has several parts (heads), each with a probability ratio of its own.

Letters: H heads (the most that any agent has), N agents, B rows, n agents of one module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thrust_rllib.functional._checks import check_same_shape
from thrust_rllib.functional.ppo import approximate_kl, clip_indicator, clipped_surrogate

HEAD_STATISTICS = ("entropy", "approx_kl", "clip_fraction")
"""First axis of `head_statistics`."""


def stack_heads(parts: Sequence[Tensor]) -> Tensor:
    """Numbers of all agents' heads in one tensor, 0 where there is no head.

    Args:
        parts: [n, B, heads] of each module; n and heads may differ.

    Returns:
        [H, N, B], agents module after module.
    """
    H = max(part.shape[-1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, H - part.shape[-1])) for part in parts]
    return torch.cat(padded).permute(2, 0, 1).contiguous()


def has_head(num_heads: Sequence[int], num_agents: Sequence[int], device: torch.device | str = "cpu") -> Tensor | None:
    """Which agents have which heads: bool [H, N, 1], or None where all have all.

    Args:
        num_heads: of each module.
        num_agents: of each module.
        device: of the result.
    """
    if len(set(num_heads)) == 1:
        return None
    counts = torch.tensor(num_heads).repeat_interleave(torch.tensor(num_agents))
    return (torch.arange(max(num_heads))[:, None] < counts).unsqueeze(-1).to(device)


def per_head_surrogate(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, clip_param: float | Tensor, heads: Tensor | None = None
) -> Tensor:
    """PPO's clipped surrogate with a ratio of each head's own and one advantage, summed over heads; to be maximised.

    sum_h min(A r_h, A clip(r_h, 1 - eps, 1 + eps)) with r_h = exp(logp_h - logp_old_h)

    With one head it is `clipped_surrogate`. With several it is something else: that clips the product of all r_h once,
    so that heads which move in opposite directions hide each other, and one head's ratio scales the others' gradients.

    Args:
        logp: [H, N, B] log-probability of each head's part of the action under the current policy.
        logp_old: [H, N, B] the same at sampling time.
        advantages: [N, B] A.
        clip_param: eps > 0, a number or a tensor that broadcasts to [N, B].
        heads: bool [H, N, 1], which agents have which heads (`has_head`); None: all have all. What stands elsewhere
            never matters.

    Returns:
        [N, B] the objective of every element.

    Raises:
        ValueError: the shapes do not belong together.

    Source: the seed's centralized trainer; Schulman et al. 2017, equation 7, for each head.
    """
    logp, logp_old = _heads_only(logp, logp_old, heads)
    if advantages.shape != logp.shape[1:]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, logp has shape {tuple(logp.shape)}: needed [N, B] and "
            "[heads, N, B] of the same rows."
        )
    terms = clipped_surrogate(logp, logp_old, advantages.expand_as(logp), clip_param)
    return (terms if heads is None else terms.where(heads, 0)).sum(0)


@torch.no_grad()
def head_statistics(
    logp: Tensor, logp_old: Tensor, entropy: Tensor, clip_param: float | Tensor, heads: Tensor | None = None
) -> Tensor:
    """Entropy, k1 estimate of the divergence and clip indicator of every head: `HEAD_STATISTICS`.

    H_h,  logp_old_h - logp_h,  1[|r_h - 1| > eps]

    Args:
        logp: [H, N, B], as of `per_head_surrogate`.
        logp_old: [H, N, B].
        entropy: [H, N, B] of each head.
        clip_param: eps, a number or a tensor that broadcasts to [N, B].
        heads: bool [H, N, 1] or None.

    Returns:
        [3, H, N, B] without gradient, 0 where there is no head. Means over rows are a module's statistics.

    Raises:
        ValueError: the shapes do not belong together.
    """
    check_same_shape("logp", logp, "entropy", entropy)
    logp, logp_old = _heads_only(logp, logp_old, heads)
    entropy = entropy if heads is None else entropy.where(heads, 0)
    return torch.stack([entropy, approximate_kl(logp, logp_old), clip_indicator(logp, logp_old, clip_param)])


def _heads_only(logp: Tensor, logp_old: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both with 0 where there is no head: what goes in is masked, since 0 times an infinite derivative is NaN."""
    check_same_shape("logp", logp, "logp_old", logp_old)
    if logp.dim() != 3:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, needed [heads, N, B]: stack the heads (stack_heads).")
    if heads is None:
        return logp, logp_old
    if heads.dtype != torch.bool or heads.shape != (*logp.shape[:2], 1):
        raise ValueError(
            f"heads has shape {tuple(heads.shape)} and dtype {heads.dtype}, logp has shape {tuple(logp.shape)}: "
            f"needed bool {[*logp.shape[:2], 1]} (has_head)."
        )
    return logp.where(heads, 0), logp_old.where(heads, 0)
