"""Which episode and which step of it every environment of the fast door is at: what the audit compares."""

from __future__ import annotations

import numpy as np


class EpisodeClock:
    """Counts the episodes and steps of E environments.

    Args:
        num_envs: E.
        runner_index: keeps the episodes of different runners apart.
    """

    def __init__(self, num_envs: int, runner_index: int) -> None:
        self._num_envs = num_envs
        self._episode = (runner_index << 40) + np.arange(num_envs, dtype=np.int64)
        self._step = np.zeros(num_envs, np.int64)

    def reset(self) -> None:
        """All environments begin a new episode."""
        self._episode = self._episode + self._num_envs
        self._step = np.zeros(self._num_envs, np.int64)

    def take(self, over: np.ndarray, num_agents: int) -> np.ndarray:
        """Goes on by T steps.

        Args:
            over: bool [T, E], episodes that ended with this step.
            num_agents: N.

        Returns:
            int64 [T, N, E, 2], a view: number of the episode, and step in it.
        """
        steps, envs = over.shape
        time = np.arange(steps)[:, None]
        begins = np.zeros((steps, envs), bool)
        begins[1:] = over[:-1]
        last_begin = np.maximum.accumulate(np.where(begins, time, -1), axis=0)
        step = np.where(last_begin < 0, self._step + time, time - last_begin)
        episode = self._episode + envs * np.cumsum(begins, axis=0)
        self._episode = episode[-1] + envs * over[-1]
        self._step = np.where(over[-1], 0, step[-1] + 1)
        origin = np.stack([episode, step], axis=-1)[:, None]
        return np.broadcast_to(origin, (steps, num_agents, envs, 2))
