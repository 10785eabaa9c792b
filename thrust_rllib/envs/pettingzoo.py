"""PettingZoo parallel environments as joint environments, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.single import SingleJointEnv
from thrust_rllib.envs.spaces import ACTION_MASK, has_action_mask, mask_length


class PettingZooJointEnv(JointEnv):
    """A PettingZoo `ParallelEnv` as a `JointEnv`.

    Agents are those of `possible_agents`, in that order. Every agent must act in every step: one that leaves
    early or comes late is an error of `SyncVectorJointEnv`. In the last step some may terminate and others be
    truncated.

    Action masks: a Dict observation with the key "action_mask" stays as it is; masks in
    infos[agent]["action_mask"] are found by one reset at construction and put into an observation
    {"observation", "action_mask"}. Actions are Discrete or MultiDiscrete (its heads side by side in the mask).

    Args:
        env: the environment, or what makes one when called with `env_config`.
        extras_from_infos: names that each agent's info carries; they become extras.
        **env_config: see `env`.

    Raises:
        TypeError: no `ParallelEnv`.
    """

    def __init__(
        self,
        env: ParallelEnv | Callable[..., ParallelEnv],
        *,
        extras_from_infos: Sequence[str] = (),
        **env_config: Any,
    ) -> None:
        if not isinstance(env, ParallelEnv):
            if not callable(env):
                raise TypeError(
                    f"PettingZooJointEnv got a {type(env).__name__}; needed: a ParallelEnv or what makes one"
                )
            env = env(**env_config)
        elif env_config:
            raise TypeError(f"PettingZooJointEnv got an environment and settings for one, {sorted(env_config)}")
        if not isinstance(env, ParallelEnv):
            raise TypeError(
                f"PettingZooJointEnv got a {type(env).__name__}; needed: a ParallelEnv. Turn-based "
                "environments (AECEnv) do not step all agents together; if yours may, wrap it with "
                "pettingzoo.utils.aec_to_parallel"
            )
        self.env = env
        self.possible_agents = list(env.possible_agents)
        self.observation_spaces = {agent: env.observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: env.action_space(agent) for agent in self.possible_agents}
        self.state_space = getattr(env, "state_space", None)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self._extras = tuple(extras_from_infos)
        self._masked_by_infos = self._find_masks()

    @property
    def unwrapped(self) -> ParallelEnv:
        """The PettingZoo environment."""
        return self.env

    def _find_masks(self) -> dict[AgentID, int]:
        """Agents whose infos hold a mask, with its length; their observation space becomes a Dict."""
        maskable = {
            agent: length
            for agent in self.possible_agents
            if (length := mask_length(self.action_spaces[agent])) is not None
            and not has_action_mask(self.observation_spaces[agent])
        }
        if not maskable:
            return {}
        _, infos = self.env.reset()
        masked = {agent: length for agent, length in maskable.items() if ACTION_MASK in (infos.get(agent) or {})}
        for agent, length in masked.items():
            self.observation_spaces[agent] = spaces.Dict(
                {"observation": self.observation_spaces[agent], ACTION_MASK: spaces.Box(0, 1, (length,), np.int8)}
            )
        return masked

    def _observations(self, given: Mapping[AgentID, Any], infos: Mapping[AgentID, Any]) -> dict[AgentID, Any]:
        observations = {agent: given[agent] for agent in self.possible_agents if agent in given}
        for agent, length in self._masked_by_infos.items():
            if agent in observations:
                mask = (infos.get(agent) or {}).get(ACTION_MASK)
                if mask is None:  # nothing to choose after the end
                    mask = np.ones(length)
                observations[agent] = {
                    "observation": observations[agent],
                    ACTION_MASK: np.asarray(mask, dtype=np.int8),
                }
        return observations

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        observations, infos = self.env.reset(seed=seed)
        return self._observations(observations, infos)

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`."""
        observations, rewards, terminations, truncations, infos = self.env.step(dict(actions))
        terminated: Any = False
        truncated: Any = False
        all_known = len(terminations) == len(truncations) == len(self.possible_agents)
        if not all_known or any(terminations.values()) or any(truncations.values()):
            agents = self.possible_agents
            terminated = {agent: bool(terminations[agent]) for agent in agents if agent in terminations}
            truncated = {agent: bool(truncations[agent]) for agent in agents if agent in truncations}
        return JointStepResult(
            rewards={agent: rewards[agent] for agent in self.possible_agents if agent in rewards},
            observations=self._observations(observations, infos),
            terminated=terminated,
            truncated=truncated,
            extras=pick_extras(self._extras, self.possible_agents, infos) if self._extras else None,
        )

    def state(self) -> np.ndarray:
        """The environment's global state."""
        return self.env.state()

    def render(self) -> Any:
        """What the environment's render mode says."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


def pick_extras(names: Sequence[str], agents: Sequence[AgentID], infos: Mapping[AgentID, Any]) -> dict[str, Any]:
    """{name: {agent: value}} from the agents' infos.

    Raises:
        ValueError: an agent's info lacks a name.
    """
    for agent in agents:
        for name in names:
            if name not in (infos.get(agent) or {}):
                raise ValueError(
                    f"the info of agent {agent!r} has no {name!r}, which extras_from_infos asks for; it has "
                    f"{sorted(infos.get(agent) or {})}"
                )
    return {name: {agent: infos[agent][name] for agent in agents} for name in names}


class JointEnvParallel(ParallelEnv):
    """A `JointEnv` as a PettingZoo `ParallelEnv`; extras go into the infos.

    Args:
        env: a `JointEnv`, a `VectorJointEnv` with one environment, or anything `make_joint_env` takes.
        **env_config: settings, where `env` is a class, a function or a name.
    """

    def __init__(self, env: Any, **env_config: Any) -> None:
        if isinstance(env, VectorJointEnv):
            env = SingleJointEnv(env)
        if isinstance(env, JointEnv):
            if env_config:
                raise TypeError(f"JointEnvParallel got an environment and settings for one, {sorted(env_config)}")
        else:
            from thrust_rllib.envs.registry import make_joint_env

            env = make_joint_env(env, env_config)
        self.env: JointEnv = env
        self.possible_agents = list(env.possible_agents)
        self.agents: list[AgentID] = []
        self.observation_spaces = dict(env.observation_spaces)
        self.action_spaces = dict(env.action_spaces)
        self.metadata = {"name": type(env).__name__, "render_modes": [], **env.metadata}
        self.render_mode = env.render_mode
        if env.state_space is not None:
            self.state_space = env.state_space

    def observation_space(self, agent: AgentID) -> gym.Space:
        """The observation space of `agent`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: AgentID) -> gym.Space:
        """The action space of `agent`."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Starts an episode; `options` are ignored."""
        self.agents = list(self.possible_agents)
        return dict(self.env.reset_joint(seed)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[AgentID, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """Plays one step; without living agents it returns five empty dicts."""
        if not self.agents:
            return {}, {}, {}, {}, {}
        alive = self.agents
        result = self.env.step_joint(actions)
        terminated = {agent: _flag(result.terminated, agent) for agent in alive}
        truncated = {agent: _flag(result.truncated, agent) for agent in alive}
        infos: dict[AgentID, dict[str, Any]] = {agent: {} for agent in alive}
        for name, value in result.extras.items():
            for agent in alive:
                infos[agent][name] = value[agent] if isinstance(value, Mapping) else value
        self.agents = [agent for agent in alive if not (terminated[agent] or truncated[agent])]
        return (
            {agent: result.observations[agent] for agent in alive if agent in result.observations},
            {agent: result.rewards[agent] for agent in alive},
            terminated,
            truncated,
            infos,
        )

    def state(self) -> np.ndarray:
        """The environment's global state."""
        return self.env.state()

    def render(self) -> Any:
        """What the environment draws."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


def _flag(flags: Any, agent: AgentID) -> bool:
    return bool(flags[agent] if isinstance(flags, Mapping) else flags)
