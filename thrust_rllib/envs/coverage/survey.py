"""What is covered, by whom, and what agents believe to be covered.

Shapes: E environments, N agents, G cells a side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thrust_rllib.envs.coverage.geometry import within


@dataclass(frozen=True, eq=False)
class FirstCover:
    """Cells that a step covered for the first time.

    Args:
        new: cells of each agent's footprint that nobody had covered before the step, int [E, N].
        alone: those of them that no other agent's footprint holds, int [E, N]: what the team would lack without it.
    """

    new: np.ndarray
    alone: np.ndarray


def footprints(positions: np.ndarray, walls: np.ndarray, cover_r: int) -> np.ndarray:
    """Free cells within Chebyshev distance `cover_r` of each agent, bool [E, N, G, G].

    Args:
        positions: int [E, N, 2].
        walls: bool [E, G, G].
        cover_r: 0: the own cell.
    """
    return within(positions, cover_r, walls.shape[-1]) & ~walls[:, None]


def first_cover(seen_now: np.ndarray, covered: np.ndarray) -> FirstCover:
    """Counts of the cells that are covered for the first time.

    Args:
        seen_now: the footprints, bool [E, N, G, G].
        covered: by the team before the step, bool [E, G, G].
    """
    flat = seen_now.reshape(*seen_now.shape[:2], -1)
    new = flat & ~covered.reshape(len(covered), 1, -1)
    by_one = flat.sum(axis=1, dtype=np.uint16) == 1
    return FirstCover(np.count_nonzero(new, axis=-1), np.count_nonzero(new & by_one[:, None], axis=-1))


def share_beliefs(beliefs: np.ndarray, seen_now: np.ndarray, heard: np.ndarray) -> np.ndarray:
    """Beliefs after a step: the own ones, the own footprint, and what those who are heard knew one step before.

    Args:
        beliefs: cells that each agent believes to be covered, before the step, bool [E, N, G, G].
        seen_now: the footprints, bool [E, N, G, G].
        heard: who hears whom after the moves, bool [E, N, N], true on the diagonal.

    Returns:
        bool [E, N, G, G].
    """
    known = beliefs.reshape(*beliefs.shape[:2], -1).astype(np.float32)
    told = (heard.astype(np.float32) @ known) > 0
    return np.asarray(told.reshape(beliefs.shape) | seen_now)
