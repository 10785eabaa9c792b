r"""How well agents are connected: distances, weighted links and λ₂ of their graph.

Two agents at Chebyshev distance d are linked with weight w = σ(2 (comm_r − d)): 0.5 at the edge of the radio's reach.
With the Laplacian L = diag(Σ_j w_ij) − W, λ₂ is its second smallest eigenvalue: 0 where the graph falls apart, N w
where all are linked with weight w (Fiedler, 1973). Letters: N agents; leading axes are free.
"""

from __future__ import annotations

import numpy as np

SHARPNESS = 2.0


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Chebyshev distance max(rows, columns) of cells […, 2] that broadcast, int […]."""
    return np.maximum(np.abs(one[..., 0] - other[..., 0]), np.abs(one[..., 1] - other[..., 1]))


def chebyshev(positions: np.ndarray) -> np.ndarray:
    """Distances between all agents, int […, N, N] of int […, N, 2]."""
    return distance(positions[..., :, None, :], positions[..., None, :, :])


def edge_weights(distances: np.ndarray, comm_r: float, sharpness: float = SHARPNESS) -> np.ndarray:
    """σ(sharpness · (comm_r − d)) with a zero diagonal.

    Args:
        distances: […, N, N].
        comm_r: distance at which the weight is 0.5.
        sharpness: how fast it falls there.

    Returns:
        float64 […, N, N] in [0, 1].
    """
    weights = np.exp(-np.logaddexp(0.0, sharpness * (np.asarray(distances, dtype=np.float64) - comm_r)))
    own = np.arange(weights.shape[-1])
    weights[..., own, own] = 0.0
    return weights


def lambda2(weights: np.ndarray) -> np.ndarray:
    """The second smallest eigenvalue of the Laplacian.

    Args:
        weights: symmetric with a zero diagonal, […, N, N].

    Returns:
        float64 […]; 0 for one agent. Up to rounding (about 1e-15 · N) at least 0.
    """
    count = weights.shape[-1]
    if count < 2:
        return np.zeros(weights.shape[:-2])
    laplacian = -np.asarray(weights, dtype=np.float64)
    own = np.arange(count)
    laplacian[..., own, own] -= laplacian.sum(axis=-1)
    return np.asarray(np.linalg.eigvalsh(laplacian)[..., 1])


def lambda2_of(positions: np.ndarray, comm_r: float) -> np.ndarray:
    """λ₂ of agents at int […, N, 2], float64 […]."""
    return lambda2(edge_weights(chebyshev(positions), comm_r))


def reachable(linked: np.ndarray) -> np.ndarray:
    """Who reaches whom over any number of links, by squaring.

    Args:
        linked: symmetric bool […, N, N]; its diagonal is not looked at.

    Returns:
        bool […, N, N], true on the diagonal.
    """
    count = linked.shape[-1]
    reached = linked | np.eye(count, dtype=bool)
    steps = 1  # ways of up to so many links are known
    while steps < count - 1:
        known = reached.astype(np.float32)
        reached, steps = (known @ known) > 0, 2 * steps
    return reached
