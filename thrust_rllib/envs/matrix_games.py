"""Cooperative matrix games of two agents, each paid the common payoff; vectorised.

The payoffs are those of the literature on relative overgeneralisation (Claus and Boutilier, 1998) and of QMIX
(Rashid et al., 2018) for the two-step game. Repeated games show the same observation in each step and are
truncated, so that the value of the best joint action is r / (1 - gamma) whatever the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.fixed_length import FixedLengthEnv

CLIMBING = ((11, -30, 0), (-30, 7, 0), (0, 6, 5))
TWO_STEP = (((7, 7), (7, 7)), ((0, 1), (1, 8)))


class MatrixGame(FixedLengthEnv):
    """A repeated game. Each agent sees its own one-hot and acts in Discrete(K).

    Args:
        num_envs: number of games E.
        payoff: K x K, rows are actions of agent 0, columns of agent 1.
        episode_length: rounds per episode.
    """

    metadata = {"name": "matrix_game", "render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int = 1, payoff: Any = CLIMBING, episode_length: int = 25) -> None:
        self.payoff = np.array(payoff, dtype=np.float64)
        if self.payoff.ndim != 2 or self.payoff.shape[0] != self.payoff.shape[1]:
            raise ValueError(f"payoff has shape {self.payoff.shape}; needed: a square matrix, actions x actions")
        super().__init__(
            num_envs,
            2,
            spaces.Box(0, 1, (2,)),
            spaces.Discrete(len(self.payoff)),
            episode_length=episode_length,
        )

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        return self.own_one_hot(len(envs))

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        return self.payoff[actions[0], actions[1]]


class Climbing(MatrixGame):
    """Best 11 per step (275 per episode of 25); independent learners stop at 7 or 5."""

    metadata = {"name": "climbing", "render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int = 1, episode_length: int = 25) -> None:
        super().__init__(num_envs, CLIMBING, episode_length)


class Penalty(MatrixGame):
    """Best 10 per step (250 per episode of 25); independent learners stop at 2 (50).

    Args:
        num_envs: number of games E.
        k: payoff of a miscoordination, usually -100.
        episode_length: rounds per episode.
    """

    metadata = {"name": "penalty", "render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int = 1, k: float = -100, episode_length: int = 25) -> None:
        super().__init__(num_envs, ((k, 0, 10), (0, 2, 0), (10, 0, k)), episode_length)


class TwoStepGame(FixedLengthEnv):
    """In step 1 (paid 0) agent 0's action picks the matrix of step 2; best 8, the safe branch pays 7.

    Observation: one-hot of (start, safe matrix, risky matrix), then the agent's own one-hot. Ends are
        terminations;
    the last observation is that of the matrix that was played.
    """

    metadata = {"name": "two_step_game", "render_modes": ["rgb_array"]}
    saved_arrays = (*FixedLengthEnv.saved_arrays, "_place")

    def __init__(self, num_envs: int = 1) -> None:
        self._place = np.zeros(num_envs, dtype=np.int64)
        self._payoffs = np.array(TWO_STEP, dtype=np.float64)
        super().__init__(num_envs, 2, spaces.Box(0, 1, (5,)), spaces.Discrete(2), episode_length=2, ends="terminated")

    def _begin(self, envs: np.ndarray) -> None:
        self._place[envs] = 0

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        place = np.eye(3, dtype=np.float32)[self._place[envs]]
        return np.concatenate([np.broadcast_to(place, (2, *place.shape)), self.own_one_hot(len(envs))], axis=-1)

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        first, second = np.asarray(actions[0]), np.asarray(actions[1])
        chosen = self._place - 1
        rewards = np.where(self._place > 0, self._payoffs[chosen.clip(0), first, second], 0.0)
        self._place = np.where(self._place > 0, self._place, first + 1)
        return rewards
