"""Gymnasium environments of several agents, with one entry of a tuple for each, as joint environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import PassiveEnvChecker

from thrust_rllib.envs.extras import pick_extras
from thrust_rllib.envs.gymnasium import made_env
from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult
from thrust_rllib.envs.late_rewards import LateRewards
from thrust_rllib.envs.spaces import element_nearest_zero, map_space
from thrust_rllib.envs.wrapped_state import global_state_of, state_of, state_space_of


def is_tuple_style(env: gym.Env) -> bool:
    """Whether both spaces are Tuples of the same length: an entry for each agent."""
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, spaces.Tuple) or not isinstance(action, spaces.Tuple):
        return False
    return len(observation.spaces) == len(action.spaces) > 0


class TupleJointEnv(JointEnv):
    """A Gymnasium environment of n agents (lbforaging, rware) as a `JointEnv`.

    Its spaces are Tuples with an entry for each agent; `step` takes n actions and returns n observations, n rewards,
    and for each kind of end one flag or n. Agents are "agent_0" to "agent_{n-1}".

    An agent whose own flag is set has ended, while the others go on; the environment still gets an action for it,
    zeros, and what it pays it from then on is left out, with one warning. The episode is over when all have ended. The
    infos of the last step, by agent, are in `infos`.

    The global state is what a method `state()` of the environment returns, where its class has one.

    Gymnasium's `PassiveEnvChecker`, which knows one agent only, is taken out of the environment's wrappers.

    Args:
        env: the environment, its id, or what makes one when called with `env_config`.
        extras_from_infos: names in the info, or in each agent's where `step` returns n infos; they become extras.
        **env_config: for `gymnasium.make` or the call.

    Raises:
        TypeError: no Gymnasium environment, or not with such spaces.
    """

    def __init__(
        self, env: gym.Env | str | Callable[..., gym.Env], *, extras_from_infos: Sequence[str] = (), **env_config: Any
    ) -> None:
        env = made_env(env, env_config, type(self).__name__)
        self.env: gym.Env = _without_checker(env)
        self.name = type(env.unwrapped).__name__
        if not is_tuple_style(env):
            raise TypeError(
                f"{self.name} has the spaces {env.observation_space} and {env.action_space}; needed: Tuples of the "
                "same length, with an entry for each agent"
            )
        observation_space: Any = env.observation_space
        action_space: Any = env.action_space
        self.possible_agents = [f"agent_{index}" for index in range(len(action_space))]
        self.observation_spaces = dict(zip(self.possible_agents, observation_space, strict=True))
        self.action_spaces = dict(zip(self.possible_agents, action_space, strict=True))
        self.state_space = state_space_of(env.unwrapped)
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        # Older environments draw in the mode that they are asked for, whatever they were made with.
        self._render_takes_mode = "mode" in inspect.signature(env.unwrapped.render).parameters
        self._extras = tuple(extras_from_infos)
        self._late = LateRewards(self.name)
        self._idle = {agent: map_space(space, element_nearest_zero) for agent, space in self.action_spaces.items()}
        self.infos: dict[AgentID, Any] = {}
        self._ended: set[AgentID] = set()

    @property
    def unwrapped(self) -> gym.Env:
        """The Gymnasium environment."""
        return self.env.unwrapped

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`.

        Raises:
            TypeError: the environment does not return (observations, info).
        """
        self._late.tell()
        self._ended.clear()
        returned: Any = self.env.reset(seed=seed)
        if not (isinstance(returned, tuple) and len(returned) == 2 and _are_infos(returned[1])):
            raise TypeError(
                f"{self.name}: reset returned no pair (observations, info); an environment of the old gym package must "
                "be brought to Gymnasium's interface"
            )
        self.infos = self._infos(returned[1])
        return self._by_agent(returned[0], "observations")

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`.

        Raises:
            RuntimeError: the episode is over.
            TypeError: the environment returns something else than said above, such as the old gym's four values.
            ValueError: an agent that acts has no action.
        """
        acting = [agent for agent in self.possible_agents if agent not in self._ended]
        if not acting:
            raise RuntimeError(f"{self.name}: step_joint was called but the episode is over; call reset_joint first")
        missing = [agent for agent in acting if agent not in actions]
        if missing:
            raise ValueError(f"{self.name}: no action for {missing}; every agent that has not ended acts")
        given = {**self._idle, **{agent: actions[agent] for agent in acting}}
        returned: Any = self.env.step(tuple(given[agent] for agent in self.possible_agents))
        if len(returned) != 5:
            raise TypeError(
                f"{self.name}: step returned {len(returned)} values; needed: (observations, rewards, terminated, "
                "truncated, info). An environment of the old gym package, whose step returns four, must be brought to "
                "Gymnasium's interface"
            )
        observations = self._by_agent(returned[0], "observations")
        rewards = self._by_agent(returned[1], "rewards")
        terminated = self._flags(returned[2], "terminated")
        truncated = self._flags(returned[3], "truncated")
        self.infos = self._infos(returned[4])
        for agent in self._ended:
            self._late.add(agent, rewards[agent])
        self._ended.update(agent for agent in acting if terminated[agent] or truncated[agent])
        over = len(self._ended) == len(self.possible_agents)
        if over:
            self._late.tell()
        return JointStepResult(
            rewards={agent: rewards[agent] for agent in acting},
            observations={agent: observations[agent] for agent in acting},
            terminated={agent: terminated[agent] for agent in acting},
            truncated={agent: truncated[agent] for agent in acting},
            extras=self._pick_extras(returned[4], acting) if self._extras else None,
            over=over,
        )

    def _by_agent(self, values: Any, what: str) -> dict[AgentID, Any]:
        count = len(self.possible_agents)
        if not isinstance(values, (Sequence, np.ndarray)) or len(values) != count:
            raise TypeError(
                f"{self.name}: its Tuple spaces have an entry for each of {count} agents, but {what} are {values!r}; "
                "return as many. If one agent chooses all entries, its action space must be no Tuple"
            )
        return dict(zip(self.possible_agents, values, strict=True))

    def _flags(self, flags: Any, what: str) -> dict[AgentID, bool]:
        if np.ndim(flags) == 0:
            return dict.fromkeys(self.possible_agents, bool(flags))
        return {agent: bool(flag) for agent, flag in self._by_agent(flags, what).items()}

    def _infos(self, infos: Any) -> dict[AgentID, Any]:
        if isinstance(infos, Mapping):
            return dict.fromkeys(self.possible_agents, infos)
        return self._by_agent(infos, "infos")

    def _pick_extras(self, infos: Any, acting: Sequence[AgentID]) -> dict[str, Any]:
        picked = pick_extras(self._extras, acting, self.infos)
        if isinstance(infos, Mapping):
            return {name: infos[name] for name in self._extras}
        return picked

    def state(self) -> Any:
        """The environment's own `state()`, where it has one."""
        return global_state_of(self.env.unwrapped)

    def get_state(self) -> dict[str, Any]:
        """The environment's own state, where it has one, and who has ended."""
        return {"env": state_of(self.env), "ended": sorted(self._ended)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state["env"])
        self._ended = set(state["ended"])

    def render(self) -> Any:
        """An image uint8 [height, width, 3], or what the environment's render mode says."""
        if self._render_takes_mode:
            draw: Any = self.env.unwrapped.render
            return draw(mode=self.render_mode or "rgb_array")
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


def _without_checker(env: gym.Env) -> gym.Env:
    if isinstance(env, PassiveEnvChecker):
        return env.env
    outer = env
    while isinstance(outer, gym.Wrapper):
        if isinstance(outer.env, PassiveEnvChecker):
            outer.env = outer.env.env
        outer = outer.env
    return env


def _are_infos(infos: Any) -> bool:
    each = infos if isinstance(infos, (list, tuple)) else [infos]
    return all(isinstance(info, Mapping) for info in each)
