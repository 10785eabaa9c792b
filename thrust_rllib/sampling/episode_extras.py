"""What the environment's extras said in each episode: in its last step, and in the mean over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thrust_rllib.envs.extras import ExtrasRecorder, extra_axes, numbers


class EpisodeExtras:
    """Adds up the extras of E running environments and remembers those of episodes that ended.

    Whose an extra is says its shape (`thrust_rllib.envs.extras`). What is told of an agent that did not act in a step,
    or of its pairs with others, counts as 0, and so does an extra that is left out of a step in which nobody acted.

    Args:
        num_agents: N.
        num_envs: E.
    """

    def __init__(self, num_agents: int, num_envs: int) -> None:
        self._num_agents, self._num_envs = num_agents, num_envs
        self._latest = ExtrasRecorder()
        self._sums: dict[str, np.ndarray] = {}  # over the steps of the running episodes, float64
        self._envs: list[np.ndarray] = []  # of finished episodes, call by call
        self._finished: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []  # {name: (last step, mean)}, [k, ...] each

    def add(self, extras: Mapping[str, Any], present: np.ndarray | None) -> None:
        """Takes in one step.

        Args:
            extras: {name: [E, ...], [N, E, ...] or [N, N, E]}.
            present: bool [N, E], who acted; None: everybody.

        Raises:
            TypeError: an extra is no array of numbers.
            ValueError: other names or shapes than in an earlier step, or a shape without the axis E.
        """
        where = "an episode that is played"
        if present is None or np.any(present):
            self._latest.check_names(extras.keys(), where)
        for name in self._latest.arrays.keys() - extras.keys():
            self._latest.arrays[name][...] = 0
        for name, given in extras.items():
            value = self._of_present(numbers(given, name, where), present, f"{where}: extras {name!r}")
            latest = self._latest.place(name, (), value, where)
            latest[...] = value
            if name not in self._sums:
                self._sums[name] = np.zeros(value.shape)
            self._sums[name] += value

    def end(self, over: np.ndarray, keep: np.ndarray, lengths: np.ndarray) -> None:
        """Takes in which episodes ended with the step that `add` was given last.

        Args:
            over: bool [E], environments that begin anew.
            keep: bool [E], those among them whose episode is remembered.
            lengths: [E] steps of the episodes.
        """
        envs = np.flatnonzero(keep)
        self._envs.append(envs)
        ended = {}
        for name, total in self._sums.items():
            latest, sums = (self._env_first(array) for array in (self._latest.arrays[name], total))
            steps = lengths[envs].reshape(-1, *[1] * (sums.ndim - 1))
            ended[name] = latest[envs], sums[envs] / steps
            sums[over] = 0.0  # of a view, so in the running sums themselves
        self._finished.append(ended)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The K finished episodes, environment after environment, each in the order in which it played them.

        Returns:
            {name: [K, ...], [K, N, ...] or [K, N, N]} of the last steps, in the extra's own type, and of the means
            over the steps, in float64.
        """
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *self._envs]), kind="stable")
        final, mean = {}, {}
        for name, total in self._sums.items():
            shape = self._env_first(total).shape[1:]
            final[name] = np.zeros((len(order), *shape), self._latest.arrays[name].dtype)
            mean[name] = np.zeros((len(order), *shape))
            begin = 0
            for envs, ended in zip(self._envs, self._finished, strict=True):
                rows = slice(begin, begin := begin + len(envs))
                if name in ended:  # else nobody had acted up to then
                    final[name][rows], mean[name][rows] = ended[name]
            final[name], mean[name] = final[name][order], mean[name][order]
        return final, mean

    def _env_first(self, extra: np.ndarray) -> np.ndarray:
        """A view with the environments' axis in front: [E, ...], [E, N, ...] or [E, N, N]."""
        return np.moveaxis(extra, extra_axes(extra.shape, self._num_agents, self._num_envs), 0)

    def _of_present(self, value: np.ndarray, present: np.ndarray | None, where: str) -> np.ndarray:
        """0 for the agents that did not act, whatever stands there: NaN times 0 would be NaN."""
        axes = extra_axes(value.shape, self._num_agents, self._num_envs)
        if value.shape[axes : axes + 1] != (self._num_envs,):
            raise ValueError(
                f"{where} have shape {value.shape}; needed, with {self._num_agents} agents in {self._num_envs} "
                "environments: [E, ...] of the team, [N, E, ...] of agents, or [N, N, E] of pairs"
            )
        if axes == 0 or present is None or np.all(present):
            return value
        acted = present[:, None] if axes == 2 else present.reshape(*present.shape, *[1] * (value.ndim - 2))
        return np.where(acted, value, value.dtype.type(0))
