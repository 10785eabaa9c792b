"""Base of small vectorised environments whose episodes all have the same length.

A subclass says what is seen and what is paid; time, ends, automatic reset, random streams and saving are
here.
Shapes: E environments, N agents.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from thrust_rllib.envs.joint_env import AgentID, JointStepResult, VectorJointEnv, check_seeds
from thrust_rllib.envs.spaces import batch_copy, identical_spaces
from thrust_rllib.envs.streams import UniformStreams


class FixedLengthEnv(VectorJointEnv):
    """E environments with episodes of `episode_length` steps.

    A subclass implements `_observe` and `_pay`, and may override `_begin`, `_extras` and `state`. Arrays that change
    are named in `saved_arrays`, each with an axis E (first, or second after N).

    Args:
        num_envs: E.
        agents: ids, or a number of agents (then "agent_0", ...).
        observation_spaces: one for all agents, or one per agent in order.
        action_spaces: likewise.
        episode_length: steps per episode.
        ends: "terminated", "truncated", or one of the two per agent.
        stream_width: uniforms per row of the random streams.
    """

    saved_arrays: tuple[str, ...] = ("step_count", "episode_count")
    metadata = {"name": "fixed_length", "render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self,
        num_envs: int,
        agents: int | Sequence[AgentID],
        observation_spaces: gym.Space | Sequence[gym.Space],
        action_spaces: gym.Space | Sequence[gym.Space],
        *,
        episode_length: int,
        ends: str | Sequence[str] = "truncated",
        stream_width: int = 1,
    ) -> None:
        for name, number in dict(num_envs=num_envs, episode_length=episode_length).items():
            if number < 1:
                raise ValueError(f"{name} is {number}; needed: at least 1")
        self.num_envs = num_envs
        self.possible_agents = [f"agent_{i}" for i in range(agents)] if isinstance(agents, int) else list(agents)
        if not self.possible_agents:
            raise ValueError("there are no agents; give at least one")
        self.num_agents = len(self.possible_agents)
        self.observation_spaces = self._for_agents(observation_spaces)
        self.action_spaces = self._for_agents(action_spaces)
        self.stacked = identical_spaces(self)
        self.episode_length = episode_length
        kinds = [ends] * self.num_agents if isinstance(ends, str) else list(ends)
        if len(kinds) != self.num_agents or not set(kinds) <= {"terminated", "truncated"}:
            raise ValueError(
                f'ends is {ends!r}; needed: "terminated" or "truncated", or a list with one of them for '
                f"each of {self.num_agents} agents"
            )
        self._terminates = np.array([kind == "terminated" for kind in kinds])[:, None]
        self.streams = UniformStreams(num_envs, stream_width)
        self.step_count = np.zeros(num_envs, dtype=np.int64)
        self.episode_count = np.full(num_envs, -1, dtype=np.int64)

    def _for_agents(self, given: gym.Space | Sequence[gym.Space]) -> dict[AgentID, gym.Space]:
        each = [given] * self.num_agents if isinstance(given, gym.Space) else list(given)
        return dict(zip(self.possible_agents, each, strict=True))

    def _begin(self, envs: np.ndarray) -> None:
        """Starts an episode in the environments `envs`; `step_count` is 0 already."""

    @abstractmethod
    def _observe(self, envs: np.ndarray) -> Any:
        """What is seen in the environments `envs`: [N, len(envs), ...], or {agent: [len(envs), ...]}."""

    @abstractmethod
    def _pay(self, actions: Any) -> np.ndarray:
        """Applies the actions and gives rewards [N, E]; `step_count` is still the old one."""

    def _extras(self) -> dict[str, np.ndarray]:
        """The extras of the step that was just paid."""
        return {}

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> Any:
        """See `VectorJointEnv.reset_joint`."""
        checked = check_seeds(seeds, self.num_envs)
        self.streams.seed(checked)
        self.episode_count[[seed is not None for seed in checked]] = -1
        everyone = np.arange(self.num_envs)
        self._start(everyone)
        return self._observe(everyone)

    def _start(self, envs: np.ndarray) -> None:
        self.step_count[envs] = 0
        self.episode_count[envs] += 1
        self._begin(envs)

    def step_joint(self, actions: Any) -> JointStepResult:
        """See `VectorJointEnv.step_joint`."""
        if self.episode_count.min() < 0:
            raise RuntimeError("step_joint was called before reset_joint; reset the environments first")
        rewards = np.broadcast_to(self._pay(actions), (self.num_agents, self.num_envs)).astype(np.float32)
        self.step_count += 1
        everyone = np.arange(self.num_envs)
        observations, final_observations = self._observe(everyone), None
        over = self.step_count >= self.episode_length
        extras, final_state = self._extras(), None
        if over.any():
            final_state = self.state() if self.records_state else None
            final_observations, observations = observations, self._copy(observations)
            envs = np.flatnonzero(over)
            self._start(envs)
            self._put_rows(observations, envs, self._observe(envs))
        return JointStepResult(
            rewards=rewards,
            observations=observations,
            terminated=over & self._terminates,
            truncated=over & ~self._terminates,
            extras=extras,
            final_observations=final_observations,
            final_state=final_state,
        )

    def _copy(self, observations: Any) -> Any:
        if self.stacked:
            return observations.copy()
        return {
            agent: batch_copy(self.observation_spaces[agent], observations[agent]) for agent in self.possible_agents
        }

    def _put_rows(self, target: Any, envs: np.ndarray, rows: Any) -> None:
        if isinstance(target, Mapping):
            for key in target:
                self._put_rows(target[key], envs, rows[key])
        elif isinstance(target, tuple):
            for part, values in zip(target, rows, strict=True):
                self._put_rows(part, envs, values)
        elif self.stacked:
            target[:, envs] = rows
        else:
            target[envs] = rows

    def own_one_hot(self, num_envs: int) -> np.ndarray:
        """Each agent's own one-hot, float32 [N, num_envs, N]."""
        eye = np.eye(self.num_agents, dtype=np.float32)[:, None]
        return np.repeat(eye, num_envs, axis=1)

    def render(self, index: int = 0) -> np.ndarray:
        """How much of the episode is over, as a bar; uint8 [8, 8 T, 3]."""
        picture = np.full((8, 8 * self.episode_length, 3), 230, dtype=np.uint8)
        picture[:, : 8 * self.step_count[index]] = (60, 110, 180)
        return picture

    def render_final(self, index: int = 0) -> np.ndarray:
        """The full bar."""
        return np.full((8, 8 * self.episode_length, 3), (60, 110, 180), dtype=np.uint8)

    def get_state(self) -> dict[str, Any]:
        """Time, streams and the arrays named in `saved_arrays`."""
        return {
            "streams": self.streams.get_state(),
            **{name: getattr(self, name).copy() for name in self.saved_arrays},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self.streams.set_state(state["streams"])
        for name in self.saved_arrays:
            setattr(self, name, state[name].copy())
