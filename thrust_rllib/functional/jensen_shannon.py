"""How differently the agents act: a bounded, symmetric divergence of their action distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from thrust_rllib.functional._features import check_agents

LOWEST_LOG_PROB = -1e30  # finite: a category that both exclude gives 0 * (LOWEST - LOWEST) = 0, not 0 * NaN


def jensen_shannon(
    logits: Sequence[Tensor], masks: Sequence[Tensor] | None = None, head_sizes: Sequence[int] | None = None
) -> Tensor:
    """Jensen-Shannon divergence of the agents' categorical action distributions, in nats, mean over pairs of agents.

    JS(p, q) = KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2
             = ln 2 - sum_k (p_k softplus(ln q_k - ln p_k) + q_k softplus(ln p_k - ln q_k)) / 2

    Mean over rows, heads and pairs of agents. For several heads the divergence of the joint actions does not split
    into a sum; the mean over heads stays in [0, ln 2] whatever their number and is a lower bound of it.

    Args:
        logits: N tensors [B, A], agent by agent, of the same joint rows; an excluded category has a large negative
            logit or minus infinity.
        masks: N tensors [B] bool, the rows where each agent is present: a pair is taken over the rows that both
            have, a pair without any gives 0. None means all rows.
        head_sizes: categories of each head, which lie side by side in A (MultiDiscrete); None means one head of A.

    Returns:
        0-d tensor in [0, ln 2] (up to rounding), differentiable in the logits: 0 where all act alike, ln 2 where no
        two agents have an action in common. Memory: B A N^2 numbers.

    Raises:
        ValueError: fewer than 2 agents, other shapes than above, or heads that do not add up to A.

    Source: Lin 1991, "Divergence measures based on the Shannon entropy", section IV.
    """
    check_agents("jensen_shannon", "logits", logits, masks)
    sizes = [logits[0].shape[1]] if head_sizes is None else list(head_sizes)
    for i, x in enumerate(logits):
        if x.shape[1] != sum(sizes):
            raise ValueError(
                f"logits[{i}] has shape {tuple(x.shape)}: needed [B, {sum(sizes)}] for heads of {sizes} categories; "
                "only agents with the same actions can be compared."
            )
    N, x = len(logits), torch.stack(list(logits))
    present = None if masks is None else torch.stack(list(masks))
    if present is not None:
        x = x.where(present.unsqueeze(-1), 0)
    log_p = _log_softmax(x, sizes).clamp(min=LOWEST_LOG_PROB)
    # Over all ordered pairs (i, j), so that no row is copied: p_i belongs to i alone, and i = j adds ln 2 - ln 2.
    softplus = F.softplus(log_p.unsqueeze(0) - log_p.unsqueeze(1))
    pairs = N * (N - 1) * len(sizes)
    if present is None:
        gap = N * math.log(2) - softplus.sum(1)
        return (log_p.exp() * gap).sum() / (pairs * max(x.shape[1], 1))
    both = present.unsqueeze(0) & present.unsqueeze(1)
    weight = (both.to(x.dtype) / both.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    gap = weight.sum(1) * math.log(2) - (softplus * weight).sum(1)
    return (log_p.exp() * gap).sum() / pairs


def _log_softmax(x: Tensor, sizes: list[int]) -> Tensor:
    """Log-probabilities [..., A] of logits [..., A], head by head."""
    if len(set(sizes)) == 1:
        return x.unflatten(-1, (len(sizes), sizes[0])).log_softmax(-1).flatten(-2)
    return torch.cat([head.log_softmax(-1) for head in x.split(sizes, dim=-1)], dim=-1)
