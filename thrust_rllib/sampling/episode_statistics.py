"""Returns and lengths of episodes in the fast door, reported under RLlib's metric names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray.rllib.utils.metrics import (
    EPISODE_AGENT_RETURN_MEAN,
    EPISODE_AGENT_STEPS,
    EPISODE_DURATION_SEC_MEAN,
    EPISODE_LEN_MAX,
    EPISODE_LEN_MEAN,
    EPISODE_LEN_MIN,
    EPISODE_MODULE_RETURN_MEAN,
    EPISODE_RETURN_MAX,
    EPISODE_RETURN_MEAN,
    EPISODE_RETURN_MIN,
)

from thrust_rllib.joint_batch import AgentID, ModuleID


class EpisodeStatistics:
    """Adds up the running episodes of E environments and remembers the finished ones.

    RLlib's runner logs each finished episode into sliding windows; an iteration in which none ended then has no
    return to report, and an evaluation of 1,000 episodes reports the mean of the last 100. Here the window is kept
    in the runner and its mean reported each time: the last known mean where nothing new ended, the mean over *all*
    episodes after `start_evaluation`.

    Args:
        agents: all agents in the environment's order.
        module_of: {agent: module}.
        num_envs: E.
        window: number of finished episodes that the reported means are taken over.
    """

    def __init__(self, agents: list[AgentID], module_of: dict[AgentID, ModuleID], num_envs: int, window: int) -> None:
        self._agents = [str(agent) for agent in agents]
        modules = sorted({module_of[agent] for agent in agents})
        self._modules = {m: [i for i, agent in enumerate(agents) if module_of[agent] == m] for m in modules}
        # A finished episode: (per-agent returns [N], per-agent steps [N], length, seconds).
        self._finished: deque[tuple[np.ndarray, np.ndarray, int, float]] = deque(maxlen=window)
        self._training_window: deque[tuple[np.ndarray, np.ndarray, int, float]] | None = None
        self._returns = np.zeros((len(agents), num_envs))
        self._steps = np.zeros((len(agents), num_envs), np.int64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._started = np.zeros(num_envs)
        self._num_finished = 0
        self._agent_steps = np.zeros(len(agents), np.int64)

    def start_evaluation(self) -> None:
        """Puts the window aside and from now on keeps all finished episodes."""
        if self._training_window is None:
            self._training_window = self._finished
        self._finished = deque()

    def end_evaluation(self) -> None:
        """Goes back to the window as it was: RLlib may evaluate on a runner that also trains."""
        if self._training_window is not None:
            self._finished, self._training_window = self._training_window, None

    def reset(self, now: float) -> None:
        """All environments were reset; running episodes are dropped."""
        self._returns[:], self._steps[:], self._lengths[:], self._started[:] = 0.0, 0, 0, now

    def add(
        self, rewards: np.ndarray, present: np.ndarray, over: np.ndarray, keep: np.ndarray, times: np.ndarray
    ) -> None:
        """Takes in T steps.

        Args:
            rewards: [T, N, E].
            present: bool [T, N, E].
            over: bool [T, E], episodes that ended with this step.
            keep: bool [E], environments whose steps and finished episodes count.
            times: [T], a clock in seconds after each step.
        """
        steps, envs = over.shape
        # Each environment's steps in pieces: from its first step, or the one after an end, to an end or its last step.
        begins = np.ones((steps, envs), bool)
        begins[1:] = over[:-1]
        places = np.flatnonzero(begins.T)  # e·T + t, environment after environment
        e, start = places // steps, places % steps
        last = np.append(places[1:], steps * envs) - 1 - e * steps
        paid, acted = _sums(rewards, places, np.float64), _sums(present, places, np.int64)
        first = start == 0  # goes on with what an earlier call left
        returns = paid + np.where(first, self._returns[:, e], 0.0)
        agent_steps = acted + np.where(first, self._steps[:, e], 0)
        lengths = last + 1 - start + np.where(first, self._lengths[e], 0)
        started = np.where(first, self._started[e], times[start - 1])

        ended = over[last, e]
        finished = np.flatnonzero(ended & keep[e])
        self._num_finished += len(finished)
        for i in finished[np.lexsort((e[finished], last[finished]))]:  # in the order of time
            seconds = float(times[last[i]] - started[i])
            self._finished.append((returns[:, i].copy(), agent_steps[:, i].copy(), int(lengths[i]), seconds))

        final = last == steps - 1  # the last piece of each environment, in their order
        over_now = ended[final]
        self._returns = np.where(over_now, 0.0, returns[:, final])
        self._steps = np.where(over_now, 0, agent_steps[:, final])
        self._lengths = np.where(over_now, 0, lengths[final])
        self._started = np.where(over_now, times[-1], started[final])
        self._agent_steps += np.where(keep[e], acted, 0).sum(axis=1)

    def add_finished(self, returns: np.ndarray, steps: np.ndarray, length: int, seconds: float) -> None:
        """Takes in an episode that was added up elsewhere: per-agent returns [N] and steps [N]."""
        self._finished.append((returns, steps, length, seconds))

    def pop_counts(self) -> tuple[int, np.ndarray]:
        """Episodes finished and steps of each agent [N] since the last call."""
        counts = self._num_finished, self._agent_steps.copy()
        self._num_finished = 0
        self._agent_steps[:] = 0
        return counts

    def get_finished(self) -> dict[str, np.ndarray]:
        """The window of finished episodes (that of training, if an evaluation goes on), k of them.

        Returns:
            Arrays: returns and steps [k, N], lengths and seconds [k].
        """
        finished = self._finished if self._training_window is None else self._training_window
        agents = len(self._agents)
        return {
            "returns": np.array([f[0] for f in finished], np.float64).reshape(-1, agents),
            "steps": np.array([f[1] for f in finished], np.int64).reshape(-1, agents),
            "lengths": np.array([f[2] for f in finished], np.int64),
            "seconds": np.array([f[3] for f in finished], np.float64),
        }

    def forget_finished(self) -> None:
        """Begins with an empty window."""
        self.end_evaluation()
        self._finished.clear()

    def set_finished(self, finished: Mapping[str, np.ndarray]) -> None:
        """Goes on with the window that `get_finished` gave, of the same agents."""
        self.forget_finished()
        columns = (finished[name] for name in ("returns", "steps", "lengths", "seconds"))
        self._finished.extend((r.copy(), s.copy(), int(n), float(t)) for r, s, n, t in zip(*columns, strict=True))

    def get_running(self, now: float) -> dict[str, np.ndarray]:
        """What the running episodes have come to: returns and steps [N, E], lengths and seconds [E].

        Args:
            now: the clock that `add` was given.
        """
        return {
            "returns": self._returns,
            "steps": self._steps,
            "lengths": self._lengths,
            "seconds": now - self._started,
        }

    def set_running(self, running: Mapping[str, np.ndarray], now: float) -> None:
        """Goes on with what `get_running` gave, on this process's clock."""
        self._returns, self._steps, self._lengths = (running[name] for name in ("returns", "steps", "lengths"))
        self._started = now - running["seconds"]

    def log(self, metrics: Any) -> None:
        """Writes the current means, minima and maxima into RLlib's `MetricsLogger`, if any episode ended so far."""
        if not self._finished:
            return
        returns = np.stack([f[0] for f in self._finished])
        steps = np.stack([f[1] for f in self._finished])
        lengths = np.array([f[2] for f in self._finished])
        seconds = np.array([f[3] for f in self._finished])
        totals = returns.sum(axis=1)
        agent_means, step_means = returns.mean(axis=0), steps.mean(axis=0)
        metrics.log_dict(
            {
                EPISODE_LEN_MEAN: lengths.mean(),
                EPISODE_RETURN_MEAN: totals.mean(),
                EPISODE_DURATION_SEC_MEAN: seconds.mean(),
                EPISODE_AGENT_RETURN_MEAN: dict(zip(self._agents, agent_means, strict=True)),
                EPISODE_AGENT_STEPS: dict(zip(self._agents, step_means, strict=True)),
                EPISODE_MODULE_RETURN_MEAN: {m: agent_means[i].sum() for m, i in self._modules.items()},
            },
            window=1,
        )
        metrics.log_dict({EPISODE_LEN_MIN: lengths.min(), EPISODE_RETURN_MIN: totals.min()}, reduce="min", window=1)
        metrics.log_dict({EPISODE_LEN_MAX: lengths.max(), EPISODE_RETURN_MAX: totals.max()}, reduce="max", window=1)


def _sums(x: np.ndarray, places: np.ndarray, dtype: Any) -> np.ndarray:
    """[T, N, E] to [N, pieces]: sums over pieces of the environments' steps."""
    by_env = x.transpose(1, 2, 0).reshape(x.shape[1], -1)
    return np.add.reduceat(by_env, places, axis=1, dtype=dtype)
