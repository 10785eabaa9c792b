"""One environment of a vectorised kind as a `JointEnv` with dicts by agent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thrust_rllib.envs.extras import extra_axes
from thrust_rllib.envs.joint_env import (
    AgentID,
    JointEnv,
    JointStepResult,
    VectorJointEnv,
    episode_over,
    per_agent_flags,
)
from thrust_rllib.envs.spaces import batch_row, check_spaces, element_nearest_zero, map_space
from thrust_rllib.envs.wrapped_state import global_state_of


class SingleJointEnv(JointEnv):
    """The scalar view of a `VectorJointEnv` with one environment.

    The vectorised environment resets by itself when its episode is over. This view returns the observation
    from before that reset, keeps the one from after it, and hands it out in the next `reset_joint(None)`; so
    the random stream is used exactly as in the vectorised form. `reset_joint(seed)` restarts the stream and
    drops what was kept.

    Agents that have ended are shown no more. Who joins late is known beforehand only where the vectorised environment
    says so (`VectorJointEnv.acts_next`).

    Args:
        env: a `VectorJointEnv` with `num_envs == 1`, or a class or function that makes one when called with
            `num_envs=1` and `env_config`.
        **env_config: see `env`.
    """

    def __init__(self, env: VectorJointEnv | Callable[..., VectorJointEnv], **env_config: Any) -> None:
        if not isinstance(env, VectorJointEnv):
            env = env(num_envs=1, **env_config)
        elif env_config:
            raise TypeError(
                f"SingleJointEnv got an environment and settings for one, {sorted(env_config)}; give one of them"
            )
        if not isinstance(env, VectorJointEnv):
            raise TypeError(f"SingleJointEnv got a {type(env).__name__}; needed: a VectorJointEnv")
        if env.num_envs != 1:
            raise ValueError(f"SingleJointEnv got {env.num_envs} environments; needed: num_envs=1")
        check_spaces(env)
        self.env = env
        self.possible_agents = list(env.possible_agents)
        self.observation_spaces = env.observation_spaces
        self.action_spaces = env.action_spaces
        self.state_space = env.state_space
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self._started = False
        self._next_episode: dict[AgentID, Any] | None = None
        self._final_state: Any = None
        self._acting: list[AgentID] = []
        self._ended: list[AgentID] = []

    @property
    def unwrapped(self) -> VectorJointEnv:
        """The vectorised environment."""
        return self.env

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        waiting, self._next_episode = self._next_episode, None
        self._started = True
        self._ended = []
        if seed is None and waiting is not None:
            self._acting = list(waiting)
            return waiting
        observations = self._by_agent(self.env.reset_joint([seed]))
        self._acting = self._acts_next()
        return {agent: observations[agent] for agent in self._acting}

    def _acts_next(self) -> list[AgentID]:
        acts = self.env.acts_next()
        if acts is None and not self._ended:
            return self.possible_agents
        return [
            agent
            for i, agent in enumerate(self.possible_agents)
            if agent not in self._ended and (acts is None or acts[i, 0])
        ]

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`.

        Raises:
            RuntimeError: the episode is over or none was started.
            ValueError: an agent's action is missing, or an agent that was shown an observation did not act.
        """
        if not self._started or self._next_episode is not None:
            state = "the episode is over" if self._started else "no episode was started"
            raise RuntimeError(f"step_joint was called but {state}; call reset_joint first")
        missing = [agent for agent in self._acting if agent not in actions]
        if missing:
            raise ValueError(f"actions have no entry for {missing}; needed: one for each of {self._acting}")
        result = self.env.step_joint(self._batch_of(actions))
        if result.present is not None:
            self._check_present(result.present)
        agents = self.possible_agents
        terminated = per_agent_flags(result.terminated, len(agents), 1)
        truncated = per_agent_flags(result.truncated, len(agents), 1) & ~terminated
        acted, gone = self._acting, self._ended
        observations = self._by_agent(result.observations)
        over = bool(episode_over(terminated, truncated, result.present, result.over)[0])
        if over:
            self._ended = []
            self._acting = self._acts_next()
            self._next_episode = {agent: observations[agent] for agent in self._acting}
            self._final_state = result.final_state
            last = self._by_agent(result.final_observations)
            observations = {agent: last[agent] for agent in agents if agent not in gone}
        else:
            ends = terminated | truncated
            self._ended = [a for i, a in enumerate(agents) if a in gone or ends[i, 0]] if ends.any() else gone
            self._acting = self._acts_next()
            if len(self._acting) < len(agents):
                shown = {*self._acting, *self._ended}.difference(gone)
                observations = {agent: seen for agent, seen in observations.items() if agent in shown}
        rewards = zip(agents, result.rewards[:, 0].tolist(), strict=True)
        return JointStepResult(
            rewards={agent: paid for agent, paid in rewards if agent in acted or (paid and agent not in gone)},
            observations=observations,
            terminated=self._flags(terminated, gone),
            truncated=self._flags(truncated, gone),
            extras={name: self._extra(np.asarray(values)) for name, values in result.extras.items()},
            over=over,
        )

    def _batch_of(self, actions: Mapping[AgentID, Any]) -> Any:
        """The actions in the form that the vectorised environment takes; those of absent agents mean nothing."""
        given = {a: actions[a] if a in self._acting else self._no_action(a) for a in self.possible_agents}
        if self.env.stacked:
            return np.stack([np.asarray(given[agent]) for agent in self.possible_agents])[:, None]
        return {
            agent: map_space(self.action_spaces[agent], lambda _, value: np.asarray(value)[None], action)
            for agent, action in given.items()
        }

    def _no_action(self, agent: AgentID) -> Any:
        return map_space(self.action_spaces[agent], element_nearest_zero)

    def _check_present(self, present: np.ndarray) -> None:
        for i, agent in enumerate(self.possible_agents):
            if present[i, 0] != (agent in self._acting):
                did = "acted without an observation" if present[i, 0] else "was shown an observation but did not act"
                raise ValueError(
                    f"{type(self.env).__name__}: agent {agent!r} {did} (JointStepResult.present). A single environment "
                    "must know before a step who acts in it: override VectorJointEnv.acts_next"
                )

    def _flags(self, flags: np.ndarray, gone: list[AgentID]) -> dict[AgentID, bool] | bool:
        """By agent; False where nobody's is set."""
        if not flags.any():
            return False
        return {agent: bool(flags[i, 0]) for i, agent in enumerate(self.possible_agents) if agent not in gone}

    def _extra(self, values: np.ndarray) -> Any:
        """See `extra_axes`."""
        agents = self.possible_agents
        axes = extra_axes(values.shape, len(agents), 1)
        if axes == 2:
            return {a: dict(zip(agents, row[:, 0], strict=True)) for a, row in zip(agents, values, strict=True)}
        return dict(zip(agents, values[:, 0], strict=True)) if axes else values[0]

    def _by_agent(self, observations: Any) -> dict[AgentID, Any]:
        if self.env.stacked:
            return {agent: observations[i, 0] for i, agent in enumerate(self.possible_agents)}
        return {
            agent: batch_row(self.observation_spaces[agent], observations[agent], 0) for agent in self.possible_agents
        }

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        super().record_states()
        self.env.record_states()

    def state(self) -> Any:
        """The global state; behind the last step of an episode that of its end.

        Raises:
            RuntimeError: the vectorised environment has not told the state of the end, see `VectorJointEnv`.
        """
        states = global_state_of(self.env) if self._next_episode is None else self._final_state
        if states is None:
            raise RuntimeError(
                f"the episode of {type(self.env).__name__} is over, and what its state was is not known: call "
                "record_states() first, and let step_joint return JointStepResult(final_state=...)"
            )
        return states[0] if self.state_space is None else batch_row(self.state_space, states, 0)

    def render(self) -> Any:
        """An image of the environment; after the last step of an episode, of its end."""
        return self.env.render(0) if self._next_episode is None else self.env.render_final(0)

    def close(self) -> None:
        """Closes the vectorised environment."""
        self.env.close()

    def get_state(self) -> dict[str, Any]:
        """The state of the vectorised environment and the first observation that waits."""
        return {
            "env": self.env.get_state(),
            "started": self._started,
            "next_episode": copy.deepcopy(self._next_episode),
            "final_state": copy.deepcopy(self._final_state),
            "acting": [*self._acting],
            "ended": [*self._ended],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self.env.set_state(state["env"])
        self._started, self._next_episode = state["started"], copy.deepcopy(state["next_episode"])
        self._final_state = copy.deepcopy(state.get("final_state"))  # not in states of earlier versions
        self._acting, self._ended = [*state["acting"]], [*state["ended"]]
