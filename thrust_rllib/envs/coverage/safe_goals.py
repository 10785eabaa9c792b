"""Which moves of one agent keep the team connected.

Shapes: E environments, N agents.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from thrust_rllib.envs.coverage.connectivity import chebyshev, distance, edge_weights, lambda2, reachable
from thrust_rllib.envs.coverage.geometry import MOVES
from thrust_rllib.envs.coverage.movement import destinations

_FAR = 64  # cells beyond comm_r: weights of e⁻¹²⁸ and less
_ROUNDING = 1e-12  # of an eigenvalue, relative: what lies on the floor to that is not below it


def safe_moves(positions: np.ndarray, moved: np.ndarray, comm_r: int, floor: float) -> np.ndarray:
    """Whether λ₂ is at least `floor` when one agent alone makes a move.

    Exact, though eigenvalues are computed only for what two distances (`certain_distances`) leave open.

    Args:
        positions: int [E, N, 2].
        moved: where each move leads, int [E, N, M, 2].
        comm_r: of the links.
        floor: least λ₂.

    Returns:
        bool [E, N, M].
    """
    near, far = certain_distances(positions.shape[1], comm_r, floor)
    apart = distance(moved[:, :, :, None], positions[:, None, None])  # [E, N, M, N], of the one that moves
    distances = chebyshev(positions)
    safe = _hang_together(distances <= near, apart <= near)
    open_ = np.flatnonzero(~safe.all(axis=(1, 2)))
    row, agent, move = np.nonzero(_hang_together(distances[open_] <= far, apart[open_] <= far) & ~safe[open_])
    if len(row):
        env = open_[row]
        theirs, row = distances[env], np.arange(len(env))
        theirs[row, agent] = theirs[row, :, agent] = apart[env, agent, move]
        safe[env, agent, move] = lambda2(edge_weights(theirs, comm_r)) >= floor * (1 - _ROUNDING)
    return safe


@lru_cache
def certain_distances(num_agents: int, comm_r: int, floor: float) -> tuple[int, int]:
    """Distances that decide without eigenvalues.

    With w(d) the weight of a link: where the agents hang together over links of at most d cells, λ₂ ≥ w(d) · 2 (1 −
    cos(π / N)), which is the least λ₂ of a connected graph, a chain's, times the least weight. Where they fall apart
    into two sets although links of d cells are allowed, λ₂ ≤ N · w(d + 1), from the vector that is constant on each.

    Args:
        num_agents: N, at least 2.
        comm_r: of the links.
        floor: least λ₂.

    Returns:
        The largest d (−1: none) over which hanging together is safe, and one over which falling apart is not.
    """
    between = np.arange(comm_r + _FAR)
    pair = np.zeros((len(between), 2, 2))
    pair[:, 0, 1] = pair[:, 1, 0] = between
    weights = edge_weights(pair, comm_r)[:, 0, 1]  # falling with d
    safe = weights * 2 * (1 - np.cos(np.pi / num_agents)) > floor * (1 + _ROUNDING)
    unsafe = num_agents * weights < floor * (1 - _ROUNDING)
    return int(safe.sum()) - 1, int((~unsafe).sum()) - 1


def _hang_together(linked: np.ndarray, links: np.ndarray) -> np.ndarray:
    """Bool [E, N, M]: whether everybody reaches everybody, with the links [E, N, M, N] of the one agent that moves."""
    others = ~np.eye(linked.shape[1], dtype=bool)
    # [E, N, N, N]: what the others reach without the agent of the second axis.
    without = reachable(linked[:, None] & others[:, :, None] & others[:, None, :])
    met = ((links & others[:, None]).astype(np.float32) @ without.astype(np.float32)) > 0
    return np.asarray((met | ~others[:, None]).all(axis=-1))


def action_masks(
    positions: np.ndarray, walls: np.ndarray, first_moves: np.ndarray | None, comm_r: int, floor: float
) -> np.ndarray:
    """Which moves, or goals by their first move, are allowed; number 0 always is.

    Args:
        positions: int [E, N, 2].
        walls: bool [E, G, G].
        first_moves: of each goal, [E, N, K]; None: of moves.
        comm_r: of the links.
        floor: least λ₂.

    Returns:
        bool [E, N, K], or [E, N, 5].
    """
    every = np.broadcast_to(np.arange(len(MOVES)), (*positions.shape[:2], len(MOVES)))
    allowed = safe_moves(positions, destinations(positions, every, walls), comm_r, floor)
    if first_moves is not None:
        allowed = np.take_along_axis(allowed, first_moves.astype(np.int64), axis=-1)
    allowed[..., 0] = True
    return allowed
