"""How much of what one agent's features say another agent's features say too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thrust_rllib.functional._features import EPS, centre, check_agents, check_rows, stack_padded


def cross_correlation(a: Tensor, b: Tensor, mask: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Pearson correlation of every column of `a` with every column of `b`.

    corr = S(a)^T S(b) / n with S(x) = (x - mean(x)) / max(std(x), eps), moments over the n rows that count

    Args:
        a: [B, D_a] features of one agent.
        b: [B, D_b] features of another on the same joint rows.
        mask: [B] bool, the rows that count; None means all.
        eps: floor of the population std: a constant column correlates with nothing and has finite gradients.

    Returns:
        [D_a, D_b], entries in [-1, 1]; 0 where fewer than 2 rows count.

    Raises:
        ValueError: `a` and `b` are not matrices of the same rows, or the mask does not match them.
    """
    check_rows("features", [a, b], None if mask is None else [mask, mask])
    rows = None if mask is None else mask.unsqueeze(-1)
    (a, std_a), (b, std_b) = centre(a, rows), centre(b, rows)
    number = max(a.shape[0], 1) if mask is None else mask.sum().clamp(min=1)
    return a.T @ b / (number * std_a.clamp(min=eps).T * std_b.clamp(min=eps))


def redundancy_penalty(
    features: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    normalization: Literal["dimensions", "pairs"] = "dimensions",
) -> Tensor:
    """Squared cross-correlation of the agents' features, summed over pairs of agents.

    sum_{i<j} ||corr(Z_i, Z_j)||_F^2 / (D_i D_j), and with "pairs" divided by N (N - 1) / 2 as well

    Every pair gives a number in [0, 1]; "pairs" keeps the whole in [0, 1] whatever N is. For independent
    features the expectation per pair is 1 / (B - 1), not 0. The order of the agents does not matter.

    Args:
        features: N tensors [B, D_i], agent by agent, of the same joint rows.
        masks: N tensors [B] bool, the rows where each agent is present: a pair is taken over the rows that
            both have, a pair with fewer than 2 of them gives 0. None means all rows: faster, and in memory
            B N D numbers instead of B D N (N - 1).
        normalization: "dimensions" (the default) or "pairs".

    Returns:
        0-d tensor >= 0, differentiable in the features.

    Raises:
        ValueError: fewer than 2 agents, other shapes than above, or an unknown normalization.

    Source: Zbontar et al. 2021, "Barlow twins", off-diagonal term, here between agents.
    """
    if normalization not in ("dimensions", "pairs"):
        raise ValueError(f"normalization is {normalization!r}; use 'dimensions' or 'pairs'.")
    check_agents("redundancy_penalty", "features", features, masks)
    N, B = len(features), features[0].shape[0]
    widths = [z.shape[1] for z in features]
    # Columns of zeros correlate with nothing: padding to one width changes no sum.
    Z, D = stack_padded(features), max(widths)
    weight = _reciprocals(tuple(widths), Z.dtype, Z.device)
    if masks is None:
        Z, std = centre(Z)
        S = (Z / std.clamp(min=EPS)).transpose(0, 1).reshape(B, N * D)
        corr = (S.T @ S / max(B, 1)).view(N, D, N, D)
        penalty = (corr.square().sum((1, 3)) * weight * weight.unsqueeze(-1)).triu(1).sum()
    else:
        i, j = torch.triu_indices(N, N, 1, device=Z.device)
        present = torch.stack(list(masks))
        both = (present[i] & present[j]).unsqueeze(-1)
        (Z_i, std_i), (Z_j, std_j) = (centre(Z.index_select(0, k), both) for k in (i, j))
        # The stds divide the [D, D] products rather than the [B, D] factors: far fewer numbers.
        scale = both.sum(1, keepdim=True).clamp(min=1) * std_i.clamp(min=EPS).mT * std_j.clamp(min=EPS)
        penalty = ((Z_i.mT @ Z_j / scale).square().sum((1, 2)) * weight[i] * weight[j]).sum()
    return penalty / (N * (N - 1) / 2) if normalization == "pairs" else penalty


@functools.cache
def _reciprocals(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / number as a tensor, copied to the device once, however often it is asked for."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training
        return torch.tensor(numbers, dtype=dtype).reciprocal().to(device)
