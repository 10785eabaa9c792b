"""Gymnasium environments as joint environments of one agent, "agent_0"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv, check_seeds
from thrust_rllib.envs.spaces import identical_spaces
from thrust_rllib.envs.wrapped_state import state_of

AGENT: AgentID = "agent_0"


class GymnasiumJointEnv(JointEnv):
    """One Gymnasium environment; a step that terminates and hits the time limit counts as terminated.

    Args:
        env: the environment, its id, or what makes one when called with `env_config`.
        extras_from_infos: names of numbers in the info that become extras.
        **env_config: for `gymnasium.make` or the call.
    """

    def __init__(
        self,
        env: gym.Env | str | Callable[..., gym.Env],
        *,
        extras_from_infos: Sequence[str] = (),
        **env_config: Any,
    ) -> None:
        self.env = env = made_env(env, env_config, type(self).__name__)
        self.possible_agents = [AGENT]
        self.observation_spaces = {AGENT: env.observation_space}
        self.action_spaces = {AGENT: env.action_space}
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self._extras = tuple(extras_from_infos)

    @property
    def unwrapped(self) -> gym.Env:
        """The Gymnasium environment."""
        return self.env.unwrapped

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        return {AGENT: self.env.reset(seed=seed)[0]}

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`."""
        observation, reward, terminated, truncated, info = self.env.step(actions[AGENT])
        return JointStepResult(
            rewards={AGENT: reward},
            observations={AGENT: observation},
            terminated=bool(terminated),
            truncated=bool(truncated),
            extras={name: {AGENT: info[name]} for name in self._extras} if self._extras else None,
        )

    def get_state(self) -> Any:
        """The environment's own state, where it has one."""
        return state_of(self.env)

    def set_state(self, state: Any) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state)

    def render(self) -> Any:
        """What the environment's render mode says."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


class GymnasiumVectorJointEnv(VectorJointEnv):
    """E environments of a Gymnasium id through `gymnasium.make_vec`, one agent; spaces that are arrays.

    Args:
        env_id: the id.
        num_envs: E.
        vectorization_mode: "sync" (one process) or "async" (one process per environment).
        **env_config: for `gymnasium.make`.
    """

    stacked = True

    def __init__(self, env_id: str, num_envs: int = 1, *, vectorization_mode: str = "sync", **env_config: Any) -> None:
        self.num_envs = num_envs
        self.env = gym.make_vec(
            env_id,
            num_envs,
            vectorization_mode=vectorization_mode,
            vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
            **env_config,
        )
        self.possible_agents = [AGENT]
        self.observation_spaces = {AGENT: self.env.single_observation_space}
        self.action_spaces = {AGENT: self.env.single_action_space}
        self.metadata = self.env.metadata
        self.render_mode = self.env.render_mode
        if not identical_spaces(self):
            raise TypeError(
                f"{env_id} has spaces that are no arrays, {self.env.single_observation_space} and "
                f"{self.env.single_action_space}; use GymnasiumJointEnv"
            )

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> np.ndarray:
        """See `VectorJointEnv.reset_joint`."""
        seed: Any = check_seeds(seeds, self.num_envs)  # a list of seeds, which the type of VectorEnv leaves out
        observations, _ = self.env.reset(seed=seed)
        return np.asarray(observations)[None]

    def step_joint(self, actions: np.ndarray) -> JointStepResult:
        """See `VectorJointEnv.step_joint`."""
        observations, rewards, terminated, truncated, infos = self.env.step(np.array(actions[0]))
        observations = np.asarray(observations)[None]
        final_observations = None
        over = terminated | truncated
        if over.any():
            final_observations = observations.copy()
            for row in np.flatnonzero(over):
                final_observations[0, row] = infos["final_obs"][row]
        return JointStepResult(
            rewards=np.asarray(rewards, dtype=np.float32)[None],
            observations=observations,
            terminated=terminated[None],
            truncated=(truncated & ~terminated)[None],
            final_observations=final_observations,
        )

    def render(self, index: int = 0) -> Any:
        """An image of environment `index`."""
        images: Any = self.env.render()
        return None if images is None else images[index]

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()


def made_env(env: gym.Env | str | Callable[..., gym.Env], env_config: Mapping[str, Any], wrapper: str) -> gym.Env:
    """A Gymnasium environment: itself, from its id, or from what makes one.

    Args:
        env: see above.
        env_config: for `gymnasium.make` or the call.
        wrapper: who asks, for messages.

    Raises:
        TypeError: no Gymnasium environment, or an environment and settings for one.
    """
    if isinstance(env, str):
        env = gym.make(env, **env_config)
    elif not isinstance(env, gym.Env):
        env = env(**env_config)
    elif env_config:
        raise TypeError(f"{wrapper} got an environment and settings for one, {sorted(env_config)}")
    if not isinstance(env, gym.Env):
        raise TypeError(f"{wrapper} got a {type(env).__name__}; needed: a gymnasium.Env")
    return env
