"""PettingZoo parallel environments as joint environments, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
from pettingzoo import ParallelEnv

from thrust_rllib.envs.action_masks import InfoMasks
from thrust_rllib.envs.extras import pick_extras
from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.presence import EpisodeAgents
from thrust_rllib.envs.returned import returned_dicts
from thrust_rllib.envs.single import SingleJointEnv
from thrust_rllib.envs.wrapped_state import global_state_of, record_states_of, state_of, state_space_of

_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


class PettingZooJointEnv(JointEnv):
    """A PettingZoo `ParallelEnv` as a `JointEnv`.

    Agents are those of `possible_agents`, in that order, with the spaces of all of them. They may come late and end
    early; the episode is over when the environment's `agents` are empty. The infos of the last step are in `infos`.

    Action masks: a Dict observation with the key "action_mask" stays as it is; masks in
    infos[agent]["action_mask"] become part of the observation, see `InfoMasks`.

    Args:
        env: the environment, or what makes one when called with `env_config`.
        extras_from_infos: names that each agent's info carries; they become extras.
        **env_config: see `env`.

    Raises:
        TypeError: no `ParallelEnv`.
        ValueError: it has no possible_agents, or no space for one of them.
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
                "environments (AECEnv) become a JointEnv by AECJointEnv"
            )
        self.env = env
        agents = getattr(env, "possible_agents", None)
        if not agents:
            raise ValueError(
                f"{type(env.unwrapped).__name__} has no possible_agents; set it to the list of all agents that may "
                "appear"
            )
        self.possible_agents = list(agents)
        self.observation_spaces = self._spaces("observation")
        self.action_spaces = self._spaces("action")
        self.infos: dict[AgentID, Any] = {}
        self.state_space = state_space_of(env)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self._extras = tuple(extras_from_infos)
        self._masks = InfoMasks(self.observation_spaces, self.action_spaces, self._first_infos)

    def _first_infos(self) -> Mapping[AgentID, Any]:
        return returned_dicts(self.env.unwrapped, "reset", self.env.reset(), _RESET)[1]

    def _spaces(self, kind: str) -> dict[AgentID, gym.Space]:
        found = {}
        for agent in self.possible_agents:
            try:
                found[agent] = getattr(self.env, f"{kind}_space")(agent)
            except KeyError as error:
                raise ValueError(
                    f"{type(self.env.unwrapped).__name__} has no {kind} space for agent {agent!r}; {kind}_space(agent) "
                    "must know every agent of possible_agents, also those that come late"
                ) from error
        return found

    @property
    def unwrapped(self) -> ParallelEnv:
        """The PettingZoo environment."""
        return self.env

    def _observations(self, given: Mapping[AgentID, Any]) -> dict[AgentID, Any]:
        return {
            agent: self._masks.put(agent, given[agent], self.infos.get(agent))
            for agent in self.possible_agents
            if agent in given
        }

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        observations, infos = returned_dicts(self.env.unwrapped, "reset", self.env.reset(seed=seed), _RESET)
        self.infos = dict(infos)
        return self._observations(observations)

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`."""
        returned = returned_dicts(self.env.unwrapped, "step", self.env.step(dict(actions)), _STEP)
        observations, rewards, terminations, truncations, infos = returned
        self.infos = dict(infos)
        terminated: Any = False
        truncated: Any = False
        all_told = actions.keys() <= terminations.keys() and actions.keys() <= truncations.keys()
        if not all_told or any(terminations.values()) or any(truncations.values()):
            terminated = {agent: bool(flag) for agent, flag in terminations.items()}
            truncated = {agent: bool(flag) for agent, flag in truncations.items()}
        return JointStepResult(
            rewards=dict(rewards),
            observations=self._observations(observations),
            terminated=terminated,
            truncated=truncated,
            extras=pick_extras(self._extras, actions, self.infos) if self._extras else None,
            over=not self.env.agents,
        )

    def get_state(self) -> Any:
        """The environment's own state, where it has one."""
        return state_of(self.env)

    def set_state(self, state: Any) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state)

    def state(self) -> Any:
        """The environment's own `state()`, where it has one."""
        return global_state_of(self.env)

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        super().record_states()
        record_states_of(self.env)

    def render(self) -> Any:
        """What the environment's render mode says.

        Raises:
            ValueError: it was made without one.
        """
        if self.render_mode is None:
            raise ValueError(
                f"{type(self.env.unwrapped).__name__} was made without a render mode; make it with "
                'render_mode="rgb_array"'
            )
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


class JointEnvParallel(ParallelEnv):
    """A `JointEnv` as a PettingZoo `ParallelEnv`; extras go into the infos.

    `agents` are those that act in the next step. One that comes in a step is paid 0 there and has flags that are False.

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
        self._episode = EpisodeAgents(self.possible_agents)
        self._steps = 0
        self.observation_spaces = dict(env.observation_spaces)
        self.action_spaces = dict(env.action_spaces)
        self.metadata = {"name": type(env).__name__, "render_modes": [], **env.metadata}
        self.render_mode = env.render_mode
        if env.state_space is not None:
            self.state_space = env.state_space
            env.record_states()

    def observation_space(self, agent: AgentID) -> gym.Space:
        """The observation space of `agent`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: AgentID) -> gym.Space:
        """The action space of `agent`."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Starts an episode; `options` are ignored."""
        observations, self._steps = self.env.reset_joint(seed), 0
        self._episode.begin(observations, self._where)
        self.agents = list(self._episode.acting)
        return dict(observations), {agent: {} for agent in self.agents}

    def step(self, actions: dict[AgentID, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """Plays one step; without living agents it returns five empty dicts.

        Raises:
            ValueError: an agent waits, or nobody acts though the episode goes on: PettingZoo steps all living agents.
        """
        if not self.agents:
            return {}, {}, {}, {}, {}
        self._steps += 1
        result = self.env.step_joint(self._episode.choose(actions, self._where))
        step = self._episode.advance(result, self._where)
        self.agents = [] if step.over else list(self._episode.acting)
        if not step.over and (not self.agents or self.agents != self._episode.living):
            waits = [agent for agent in self._episode.living if agent not in self.agents]
            what = f"agents {waits} wait" if waits else "nobody acts, but the episode goes on"
            raise ValueError(
                f"{self._where()}: {what}; in a PettingZoo ParallelEnv all living agents act in every step, and an "
                "episode without one is over"
            )
        told = [agent for agent in self.possible_agents if agent in step.acted or agent in self.agents]
        infos: dict[AgentID, dict[str, Any]] = {agent: {} for agent in told}
        for name, value in result.extras.items():
            for agent in step.acted:
                infos[agent][name] = value[agent] if isinstance(value, Mapping) else value
        return (
            {agent: result.observations[agent] for agent in told if agent in result.observations},
            {agent: result.rewards.get(agent, 0.0) for agent in told},
            {agent: step.terminated.get(agent, False) for agent in told},
            {agent: step.truncated.get(agent, False) for agent in told},
            infos,
        )

    def _where(self) -> str:
        moment = f"step {self._steps} of its episode" if self._steps else "reset_joint"
        return f"{type(self.env.unwrapped).__name__}, {moment}"

    def get_state(self) -> dict[str, Any]:
        """The joint environment's state, and who acts."""
        return {
            "env": self.env.get_state(),
            "agents": [*self.agents],
            "steps": self._steps,
            "episode": self._episode.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self.env.set_state(state["env"])
        self.agents, self._steps = [*state["agents"]], state["steps"]
        self._episode.set_state(state["episode"])

    def state(self) -> Any:
        """The environment's global state."""
        return global_state_of(self.env)

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        self.env.record_states()

    def render(self) -> Any:
        """What the environment draws."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
