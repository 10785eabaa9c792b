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
        self._first = runner_index << 40
        self._episode = self._first + np.arange(num_envs, dtype=np.int64)
        self._step = np.zeros(num_envs, np.int64)

    def reset(self) -> None:
        """All environments begin a new episode."""
        self._episode, self._step = self._episode + self._num_envs, np.zeros_like(self._step)

    def advance(self, over: np.ndarray) -> None:
        """All environments have played a step; those that are over, bool [E], begin a new episode."""
        self._episode, self._step = self._episode + self._num_envs * over, np.where(over, 0, self._step + 1)

    def now(self) -> np.ndarray:
        """Int64 [E, 2]: number of the episode, and step in it."""
        return np.stack([self._episode, self._step], axis=-1)

    def get_state(self) -> np.ndarray:
        """As `now`, with episodes counted from the runner's first."""
        return self.now() - [self._first, 0]

    def set_state(self, state: np.ndarray) -> None:
        """Goes on from where `get_state` was called, perhaps in another runner."""
        self._episode, self._step = state[:, 0] + self._first, state[:, 1].copy()


def origins(start: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Episode and step of every row of a rollout, from the ends alone.

    Args:
        start: [E, 2], `EpisodeClock.now` of the first row.
        over: bool [T, E], episodes that ended with this row.

    Returns:
        int64 [T, E, 2].
    """
    steps, envs = over.shape
    time = np.arange(steps)[:, None]
    begins = np.zeros((steps, envs), bool)
    begins[1:] = over[:-1]
    last_begin = np.maximum.accumulate(np.where(begins, time, -1), axis=0)
    step = np.where(last_begin < 0, start[:, 1] + time, time - last_begin)
    return np.stack([start[:, 0] + envs * np.cumsum(begins, axis=0), step], axis=-1)
