"""One stream of uniform numbers per environment index, drawn in blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np


class UniformStreams:
    """Rows of `width` uniforms in [0, 1) for each of E environments, each from a generator of its own.

    Blocks only save calls: a generator gives the same numbers in whatever portions they are drawn, so the
    stream of environment e depends on its seed alone, not on E, on `block` or on the other environments.

    Args:
        num_envs: number of environments E.
        width: numbers per row.
        block: rows drawn at a time.
    """

    def __init__(self, num_envs: int, width: int, block: int = 64) -> None:
        self.num_envs = num_envs
        self.block = block
        self._generators = [np.random.default_rng() for _ in range(num_envs)]
        self._rows = np.empty((num_envs, block, width))
        self._next = np.full(num_envs, block)  # nothing drawn yet
        self._all = np.arange(num_envs)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restarts the streams that get a number; those that get None go on."""
        for index, seed in enumerate(seeds):
            if seed is not None:
                self._generators[index] = np.random.default_rng(seed)
                self._next[index] = self.block

    def take(self, count: int, envs: np.ndarray | None = None) -> np.ndarray:
        """The next `count` rows of the environments `envs` (None: all), [len(envs), count, width]."""
        envs = self._all if envs is None else envs
        start = self._next[envs]
        short = start + count > self.block
        if short.any():
            for index in envs[short]:
                self._refill(index)
            start = self._next[envs]
        self._next[envs] = start + count
        return self._rows[envs[:, None], start[:, None] + np.arange(count)]

    def _refill(self, index: int) -> None:
        rows, start = self._rows[index], self._next[index]
        left = self.block - start
        rows[:left] = rows[start:].copy()
        self._generators[index].random(out=rows[left:])
        self._next[index] = 0

    def get_state(self) -> dict[str, Any]:
        """Generators and the rows drawn ahead."""
        return {
            "generators": [copy.deepcopy(generator.bit_generator.state) for generator in self._generators],
            "rows": self._rows.copy(),
            "next": self._next.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        self._rows[...] = state["rows"]
        self._next[...] = state["next"]
