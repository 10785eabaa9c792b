"""What a step pays, and what it tells beside.

Shapes: E environments, N agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from thrust_rllib.envs.coverage.connectivity import chebyshev, edge_weights, lambda2, reachable
from thrust_rllib.envs.coverage.survey import FirstCover
from thrust_rllib.envs.difference import DIFFERENCE_REWARD

CONNECTED, FIRMLY_CONNECTED = 1e-3, 0.5
"""λ₂ above which a team counts as connected, and as firmly connected."""


@dataclass(frozen=True)
class Pay:
    """Weights of the reward and limits of the signals.

    Args:
        coverage_reward: of each newly covered cell.
        reach_reward: of reaching all others.
        crowding_penalty: of each other agent on the own cell.
        tau: λ₂ that shall be kept.
        degree_target: sum of link weights that each agent shall keep.
        comm_r: reach of a link.
    """

    coverage_reward: float
    reach_reward: float
    crowding_penalty: float
    tau: float
    degree_target: float
    comm_r: int


def rewards_and_extras(
    pay: Pay, positions: np.ndarray, first: FirstCover, seen: np.ndarray, covered: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rewards of a step, and its extras (the table of `CoverageWorld`).

    Args:
        pay: weights.
        positions: after the moves, int [E, N, 2].
        first: what the step covered for the first time.
        seen: cells that each agent has had in its footprint, bool [E, N, G, G].
        covered: their union, bool [E, G, G].
        free: number of free cells, [E].

    Returns:
        Rewards float64 [N, E]; extras float32, [E] of the team and [N, E] of the agents.
    """
    distances = chebyshev(positions)
    weights = edge_weights(distances, pay.comm_r)
    shared = _reach(distances, pay.comm_r) * pay.reach_reward
    shared -= pay.crowding_penalty * (np.count_nonzero(distances == 0, axis=-1) - 1)
    connectivity = lambda2(weights)
    cells = np.count_nonzero(seen.reshape(*seen.shape[:2], -1), axis=-1)
    team = np.count_nonzero(covered.reshape(len(covered), -1), axis=-1)
    extras: Mapping[str, np.ndarray] = {
        "global_lambda2": connectivity,
        "lambda2": connectivity,
        "lambda2_deficit": pay.tau - connectivity,
        "connected": connectivity > CONNECTED,
        "firmly_connected": connectivity > FIRMLY_CONNECTED,
        "local_edge_margin": np.maximum(pay.degree_target - weights.sum(axis=-1), 0.0).T,
        DIFFERENCE_REWARD: (pay.coverage_reward * first.alone + shared).T,
        "coverage": team / free,
        "redundancy": cells.sum(axis=-1) / team,
        "top_share": cells.max(axis=-1) / team,
        "cells": cells.T,
    }
    rewards = (pay.coverage_reward * first.new + shared).T
    return rewards, {name: np.array(values, dtype=np.float32, order="C") for name, values in extras.items()}


def _reach(distances: np.ndarray, comm_r: int) -> np.ndarray:
    """The fraction of the others that each agent reaches over links, [E, N]; 0 where there are no others."""
    reached = np.count_nonzero(reachable(distances <= comm_r), axis=-1) - 1
    return reached / max(distances.shape[-1] - 1, 1)
