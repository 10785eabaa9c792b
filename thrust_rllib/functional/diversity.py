"""How far the agents' action distributions lie apart, on the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thrust_rllib.functional._checks import check_same_shape
from thrust_rllib.functional._features import check_agents

_EXACT = "donot_use_mm_for_euclid_dist"  # the fast way takes differences of squares: nothing is left of small distances


def total_variation(
    logits: Sequence[Tensor], masks: Sequence[Tensor] | None = None, head_sizes: Sequence[int] | None = None
) -> Tensor:
    """Total variation of the agents' categorical action distributions, mean over rows, heads and pairs of agents.

    TV(p, q) = sum_k |p_k - q_k| / 2, the largest difference of what any event is worth to both

    For several heads it is the mean of the heads' distances: in [0, 1] whatever their number, and a lower bound of
    the distance of the joint distributions.

    Args:
        logits: N tensors [R, A], agent by agent, of the same rows; an excluded category has a large negative logit or
            minus infinity.
        masks: N tensors [R] bool, the rows where each agent is present: a pair is taken over the rows that both have,
            a pair without any gives 0. None means all rows.
        head_sizes: categories of each head, which lie side by side in A (MultiDiscrete); None means one head of A.

    Returns:
        0-d tensor in [0, 1] (up to rounding), differentiable in the logits but where two probabilities are equal,
        which move nothing there. Memory: R (N A + N^2) numbers.

    Raises:
        ValueError: fewer than 2 agents, other shapes than above, or heads that do not add up to A.
    """
    p, present = _probabilities("total_variation", logits, masks, head_sizes)
    return _pairs(torch.cdist(p, p, p=1), present) / (2 * _num_heads(head_sizes))


def time_averaged_total_variation(
    logits: Sequence[Tensor], masks: Sequence[Tensor] | None = None, head_sizes: Sequence[int] | None = None
) -> Tensor:
    """`total_variation` of what each agent does on average: its mean distribution over its own rows.

    Never more than `total_variation` where all agents have all rows: agents that do the same things at different
    times are far apart row by row, and equal on average. What is left are lasting roles.

    Args:
        logits: as `total_variation`.
        masks: as `total_variation`, but each agent's own rows count; a pair with an agent without any gives 0.
        head_sizes: as `total_variation`.

    Returns:
        0-d tensor in [0, 1].

    Raises:
        ValueError: as `total_variation`.
    """
    p, present = _probabilities("time_averaged_total_variation", logits, masks, head_sizes)
    if present is None:
        average, anywhere = p.mean(0, keepdim=True) if len(p) else p.sum(0, keepdim=True), None
    else:
        weight = present.to(p.dtype).unsqueeze(-1)
        average = (p * weight).sum(0, keepdim=True) / weight.sum(0, keepdim=True).clamp(min=1)
        anywhere = present.any(0, keepdim=True)
    return _pairs(torch.cdist(average, average, p=1), anywhere) / (2 * _num_heads(head_sizes))


def system_neural_diversity(
    means: Sequence[Tensor], stds: Sequence[Tensor], masks: Sequence[Tensor] | None = None
) -> Tensor:
    """2-Wasserstein distance of the agents' diagonal normal action distributions, mean over rows and pairs of agents.

    W(i, j) = sqrt(||mu_i - mu_j||^2 + ||sigma_i - sigma_j||^2)

    Args:
        means: N tensors [R, k], agent by agent, of the same rows.
        stds: N tensors [R, k], standard deviations.
        masks: N tensors [R] bool, the rows where each agent is present: a pair is taken over the rows that both have,
            a pair without any gives 0. None means all rows.

    Returns:
        0-d tensor >= 0 in units of the actions, differentiable; equal distributions have gradient 0. Memory:
        R (N k + N^2) numbers.

    Raises:
        ValueError: fewer than 2 agents, or other shapes than above.

    Source: Bettini, Shankar and Prorok 2023, "System neural diversity: measuring behavioral heterogeneity in
    multi-agent learning"; the distance after Olkin and Pukelsheim 1982.
    """
    check_agents("system_neural_diversity", "means", means, masks)
    check_agents("system_neural_diversity", "stds", stds, masks)
    _check_alike("means", means)
    mean, std = torch.stack(list(means), dim=1), torch.stack(list(stds), dim=1)
    check_same_shape("means", mean, "stds", std)
    points, present = torch.cat([mean, std], dim=-1), _rows_of(masks)
    if present is not None:
        points = points.where(present.unsqueeze(-1), 0)
    return _pairs(torch.cdist(points, points, compute_mode=_EXACT), present)


def _probabilities(
    function: str, logits: Sequence[Tensor], masks: Sequence[Tensor] | None, head_sizes: Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Probabilities [R, N, A] and who is present, bool [R, N]; probabilities of some number where absent."""
    check_agents(function, "logits", logits, masks)
    _check_alike("logits", logits)
    x, present = torch.stack(list(logits), dim=1), _rows_of(masks)
    sizes = [x.shape[-1]] if head_sizes is None else list(head_sizes)
    if sum(sizes) != x.shape[-1]:
        raise ValueError(
            f"logits[0] has shape {tuple(logits[0].shape)}: needed [R, {sum(sizes)}] for heads of {sizes} categories."
        )
    if present is not None:
        x = x.where(present.unsqueeze(-1), 0)
    if len(set(sizes)) == 1:
        return x.unflatten(-1, (len(sizes), sizes[0])).softmax(-1).flatten(-2), present
    return torch.cat([head.softmax(-1) for head in x.split(sizes, dim=-1)], dim=-1), present


def _check_alike(what: str, rows: Sequence[Tensor]) -> None:
    for i, x in enumerate(rows):
        if x.shape != rows[0].shape:
            raise ValueError(
                f"{what}[{i}] has shape {tuple(x.shape)}, {what}[0] has shape {tuple(rows[0].shape)}: only agents with "
                "the same actions can be compared."
            )


def _rows_of(masks: Sequence[Tensor] | None) -> Tensor | None:
    return None if masks is None else torch.stack(list(masks), dim=1)


def _num_heads(head_sizes: Sequence[int] | None) -> int:
    return 1 if head_sizes is None else len(head_sizes)


def _pairs(distances: Tensor, present: Tensor | None) -> Tensor:
    """Distances [R, N, N] to their mean over the rows of each pair, then over pairs of different agents."""
    pairs = distances.shape[1] * (distances.shape[1] - 1)
    if present is None:
        return distances.sum() / (pairs * max(len(distances), 1))
    both = present.unsqueeze(1) & present.unsqueeze(2)
    return (distances.where(both, 0).sum(0) / both.sum(0).clamp(min=1)).sum() / pairs
