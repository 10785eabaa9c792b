"""Where agents go: all at once, not through walls; relays only where none of their links breaks.

Shapes: E environments, N agents.
"""

from __future__ import annotations

import numpy as np

from thrust_rllib.envs.coverage.connectivity import chebyshev, distance
from thrust_rllib.envs.coverage.geometry import MOVES

EXPLORER, RELAY = 0, 1


def destinations(positions: np.ndarray, moves: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Where moves lead; the border or a wall means stay.

    Args:
        positions: int [E, N, 2].
        moves: numbers of `MOVES`, int [E, N], or [E, N, M] for M moves of each agent.
        walls: bool [E, G, G].

    Returns:
        int [*moves.shape, 2].
    """
    extra = moves.ndim - 2
    here = positions.reshape(*positions.shape[:2], *(1,) * extra, 2)
    there = np.clip(here + MOVES[moves], 0, walls.shape[-1] - 1)
    env = np.arange(len(walls)).reshape(-1, *(1,) * (extra + 1))
    return np.where(walls[env, there[..., 0], there[..., 1]][..., None], here, there)


def hold_links(positions: np.ndarray, moved: np.ndarray, relays: np.ndarray, comm_r: int) -> np.ndarray:
    """Keeps relays where they are, if their move alone would break one of their links.

    A link breaks where the distance is at most comm_r now and larger after the relay's move, everybody else staying.

    Args:
        positions: int [E, N, 2].
        moved: where the agents want to go, int [E, N, 2].
        relays: bool [E, N].
        comm_r: reach of a link.

    Returns:
        int [E, N, 2], where they go.
    """
    linked = chebyshev(positions) <= comm_r
    alone = distance(moved[:, :, None], positions[:, None])
    breaks = linked & (alone > comm_r) & ~np.eye(positions.shape[1], dtype=bool)
    return np.where((relays & breaks.any(axis=-1))[..., None], positions, moved)
