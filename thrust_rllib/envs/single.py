"""One environment of a vectorised kind as a `JointEnv` with dicts by agent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import (
    AgentID,
    JointEnv,
    JointStepResult,
    VectorJointEnv,
    episode_over,
    per_agent_flags,
)
from thrust_rllib.envs.spaces import batch_row, check_spaces, map_space


class SingleJointEnv(JointEnv):
    """The scalar view of a `VectorJointEnv` with one environment.

    The vectorised environment resets by itself when its episode is over. This view returns the observation
    from before that reset, keeps the one from after it, and hands it out in the next `reset_joint(None)`; so
    the random stream is used exactly as in the vectorised form. `reset_joint(seed)` restarts the stream and
    drops what was kept.

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

    @property
    def unwrapped(self) -> VectorJointEnv:
        """The vectorised environment."""
        return self.env

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        waiting, self._next_episode = self._next_episode, None
        self._started = True
        if seed is None and waiting is not None:
            return waiting
        return self._by_agent(self.env.reset_joint([seed]))

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`.

        Raises:
            RuntimeError: the episode is over or none was started.
        """
        if not self._started or self._next_episode is not None:
            state = "the episode is over" if self._started else "no episode was started"
            raise RuntimeError(f"step_joint was called but {state}; call reset_joint first")
        missing = [agent for agent in self.possible_agents if agent not in actions]
        if missing:
            raise ValueError(f"actions have no entry for {missing}; every agent acts in every step")
        if self.env.stacked:
            batch: Any = np.stack([np.asarray(actions[agent]) for agent in self.possible_agents])[:, None]
        else:
            batch = {
                agent: map_space(self.action_spaces[agent], lambda _, value: np.asarray(value)[None], actions[agent])
                for agent in self.possible_agents
            }
        result = self.env.step_joint(batch)
        shape = (len(self.possible_agents), 1)
        terminated = per_agent_flags(result.terminated, *shape)
        truncated = per_agent_flags(result.truncated, *shape) & ~terminated
        observations = self._by_agent(result.observations)
        if episode_over(terminated, truncated, result.present)[0]:
            self._next_episode = observations
            observations = self._by_agent(result.final_observations)
        return JointStepResult(
            rewards={agent: float(result.rewards[i, 0]) for i, agent in enumerate(self.possible_agents)},
            observations=observations,
            terminated=self._flags(terminated),
            truncated=self._flags(truncated),
            extras={name: self._extra(np.asarray(values)) for name, values in result.extras.items()},
            present=None if result.present is None else self._flags(result.present),
        )

    def _flags(self, flags: np.ndarray) -> dict[AgentID, bool]:
        return {agent: bool(flags[i, 0]) for i, agent in enumerate(self.possible_agents)}

    def _extra(self, values: np.ndarray) -> Any:
        """[1, ...] belongs to the environment, [N, 1, ...] to the agents."""
        if len(values) == len(self.possible_agents) and values.ndim > 1 and values.shape[1] == 1:
            return {agent: values[i, 0] for i, agent in enumerate(self.possible_agents)}
        return values[0]

    def _by_agent(self, observations: Any) -> dict[AgentID, Any]:
        if self.env.stacked:
            return {agent: observations[i, 0] for i, agent in enumerate(self.possible_agents)}
        return {
            agent: batch_row(self.observation_spaces[agent], observations[agent], 0) for agent in self.possible_agents
        }

    def state(self) -> np.ndarray:
        """The global state, [S]; after the end of an episode that of the next one."""
        return self.env.state()[0]

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
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self.env.set_state(state["env"])
        self._started, self._next_episode = state["started"], copy.deepcopy(state["next_episode"])
