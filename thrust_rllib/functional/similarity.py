"""How similar the spaces are that the agents' features span, whatever their axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thrust_rllib.functional._features import EPS, centre, check_agents, stack_padded


def linear_cka(features: Sequence[Tensor], masks: Sequence[Tensor] | None = None) -> Tensor:
    """Linear centred kernel alignment of the agents' features, mean over pairs of agents.

    CKA_ij = ||Z_i^T Z_j||_F^2 / (||Z_i^T Z_i||_F ||Z_j^T Z_j||_F), columns of Z centred; mean over i < j

    1 where one agent's features are a rotation, reflection or multiple of the other's, 0 where no column of one
    correlates with a column of the other; columns of large variance count more, unlike in `redundancy_penalty`. With
    few rows it is large for independent features as well: about D / (D + B) for two agents with D columns of equal
    variance. The order of the agents does not matter, nor do rotation, shift and scale of one agent's features.

    Args:
        features: N tensors [B, D_i], agent by agent, of the same joint rows; widths may differ.
        masks: N tensors [B] bool, the rows where each agent is present: a pair is taken over the rows that
            both have, a pair with fewer than 2 of them gives 0. None means all rows: faster, as nothing is
            centred pair by pair.

    Returns:
        0-d tensor in [0, 1], differentiable in the features. Constant features are similar to nothing: 0, with
        finite gradients.

    Raises:
        ValueError: fewer than 2 agents, or other shapes than above.

    Source: Kornblith et al. 2019, "Similarity of neural network representations revisited", section 3.
    """
    check_agents("linear_cka", "features", features, masks)
    # Columns of zeros change no product: padding to one width changes no norm.
    Z = stack_padded(features)
    N, B, D = Z.shape
    if masks is None:
        Z, _ = centre(Z)
        if B * (N + D) < N * D**2:  # fewer multiplications: ||Z_i^T Z_j||^2 is the product of Z_i Z_i^T and Z_j Z_j^T
            kernels = (Z @ Z.mT / max(B, 1)).flatten(1)
            squares = kernels @ kernels.T
        else:
            columns = Z.transpose(0, 1).reshape(B, N * D)
            squares = (columns.T @ columns / max(B, 1)).view(N, D, N, D).square().sum((1, 3))
        norms = _norm(squares.diagonal())
        return (squares / (norms * norms.unsqueeze(-1))).triu(1).sum() / (N * (N - 1) / 2)
    i, j = torch.triu_indices(N, N, 1, device=Z.device)
    present = torch.stack(list(masks))
    both = (present[i] & present[j]).unsqueeze(-1)
    (Z_i, _), (Z_j, _) = (centre(Z.index_select(0, k), both) for k in (i, j))
    number = both.sum(1, keepdim=True).clamp(min=1)
    cross, own_i, own_j = ((a.mT @ b / number).square().sum((1, 2)) for a, b in ((Z_i, Z_j), (Z_i, Z_i), (Z_j, Z_j)))
    return (cross / (_norm(own_i) * _norm(own_j))).mean()


def _norm(squares: Tensor) -> Tensor:
    """Square root with a floor: the norm of a covariance whose std is `EPS`."""
    return squares.clamp(min=EPS**4).sqrt()
