"""What RLlib's `MultiAgentEnvRunner` steps in the general door: E multi-agent environments, checked and in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.rllib.utils.annotations import override

from thrust_rllib.envs.adapt import call
from thrust_rllib.envs.batching import ObservationCopy
from thrust_rllib.envs.global_state import flat_state
from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.registry import EnvSpec, make_joint_env
from thrust_rllib.envs.returned import is_flag, returned_dicts
from thrust_rllib.envs.rllib import ALL, COMMON, STATE, JointEnvMultiAgentEnv, agent_order
from thrust_rllib.envs.wrapped_state import global_state_of, record_states_of, state_of, state_space_of

_STEP = ("observations", "rewards", "terminateds", "truncateds", "infos")


def make_multi_agent_env(spec: EnvSpec, env_config: Mapping[str, Any]) -> MultiAgentEnv:
    """One environment of any kind for RLlib: its own kind as it is, others through `JointEnvMultiAgentEnv`."""
    if spec.kind == "rllib":
        return call(spec.target, spec.name, env_config, num_envs=1, as_rllib=True)
    return JointEnvMultiAgentEnv(make_joint_env(spec, env_config))


class MultiAgentVector(VectorMultiAgentEnv):
    """E environments stepped one after another; one that is over is reset by the next call, as RLlib's loop expects.

    In place of RLlib's own class: agents stand in the same order in every process, `"__all__"` may be left out, and an
    answer of a wrong form is an error that names environment, index and step.

    Args:
        factory: makes one environment; called E times.
        num_envs: E.
        name: what the user called the environment, for messages.
        records_state: put the global state into the infos, see `STATE`.

    Raises:
        TypeError: `factory` makes something else than a `MultiAgentEnv`.
    """

    def __init__(
        self, factory: Callable[[], MultiAgentEnv], num_envs: int, name: str, records_state: bool = False
    ) -> None:
        super().__init__()
        self.name = name
        self.num_envs = num_envs
        self.envs = [factory() for _ in range(num_envs)]
        for env in self.envs:
            if not isinstance(getattr(env, "unwrapped", env), MultiAgentEnv):
                raise TypeError(f"environment {name!r} is a {type(env).__name__}; needed: an RLlib MultiAgentEnv")
        first = self.envs[0].unwrapped
        self.possible_agents: list[AgentID] = agent_order(first)
        self.observation_spaces = {agent: first.get_observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: first.get_action_space(agent) for agent in self.possible_agents}
        self.single_observation_space = _dict_space(self.observation_spaces)
        self.single_action_space = _dict_space(self.action_spaces)
        self.observation_space, self.action_space = self.single_observation_space, self.single_action_space
        self.metadata = {**(first.metadata or {}), "autoreset_mode": "next_step"}
        self.render_mode = first.render_mode
        self.state_space = state_space_of(first)
        self.records_state, self._state_size = records_state, -1
        for env in self.envs if records_state else ():
            record_states_of(env.unwrapped)
        self._copies = {agent: ObservationCopy(agent, space) for agent, space in self.observation_spaces.items()}
        self._over = [False] * num_envs
        self._steps = [0] * num_envs
        self._living: list[set[AgentID]] = [set() for _ in range(num_envs)]
        self._ended: list[set[AgentID]] = [set() for _ in range(num_envs)]

    @override(VectorMultiAgentEnv)
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Resets all environments; `seed` is a list of one seed per environment, or None."""
        seeds: Sequence[int | None] = [None] * self.num_envs if seed is None else seed
        results = [self._reset_one(i, s, options) for i, s in enumerate(seeds)]
        return [observations for observations, _ in results], [infos for _, infos in results]

    def _reset_one(self, index: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._over[index], self._steps[index] = False, 0
        try:
            result = self.envs[index].reset(seed=seed, options=options)
        except Exception as error:
            raise RuntimeError(f"{self._where(index)}: {type(error).__name__}: {error}") from error
        result = self._dicts(index, "reset", result, ("observations", "infos"))
        if not result[0]:
            raise ValueError(f"{self._where(index)}: reset showed no agent anything; at least one must act first")
        self._living[index], self._ended[index] = set(result[0]), set()
        return self._own(index, result[0]), self._with_state(index, result[1])

    @override(VectorMultiAgentEnv)
    def step(self, actions: Sequence[Mapping[AgentID, Any]]) -> tuple[list[Any], ...]:
        results = [self._step_one(index, mine) for index, mine in enumerate(actions)]
        return tuple(list(part) for part in zip(*results, strict=True))

    def _step_one(self, index: int, actions: Mapping[AgentID, Any]) -> tuple[Any, Any, Any, Any, Any]:
        if self._over[index]:
            observations, infos = self._reset_one(index, None, None)
            return observations, {}, {ALL: False}, {ALL: False}, infos
        self._steps[index] += 1
        try:
            result = self.envs[index].step(actions)
        except Exception as error:
            raise RuntimeError(f"{self._where(index)}: {type(error).__name__}: {error}") from error
        result = self._dicts(index, "step", result, _STEP)
        observations, rewards, terminateds, truncateds, infos = result
        observations = self._own(index, observations)
        if any(terminateds.values()) or any(truncateds.values()) or ALL not in terminateds:
            terminateds, truncateds = self._flags(index, observations, terminateds, truncateds)
        if not self._over[index] or any(truncateds.values()):  # else nothing follows
            infos = self._with_state(index, infos)
        return observations, rewards, terminateds, truncateds, infos

    def _with_state(self, index: int, infos: dict[AgentID, Any]) -> dict[AgentID, Any]:
        if not self.records_state:
            return infos
        return {**infos, COMMON: {**(infos.get(COMMON) or {}), STATE: self.global_state(index)}}

    def global_state(self, index: int) -> np.ndarray:
        """The global state of one environment now, flat: float32 [S].

        Raises:
            RuntimeError: the environment fails.
            TypeError: no numbers.
            ValueError: not of the declared shape, of another size than before, or not finite.
        """
        try:
            given = global_state_of(self.envs[index].unwrapped)
        except Exception as error:
            raise RuntimeError(f"{self._where(index)}: state() failed: {type(error).__name__}: {error}") from error
        state = flat_state(self.state_space, given, self._where(index))
        if self._state_size < 0:
            self._state_size = len(state)
        if len(state) != self._state_size:
            raise ValueError(
                f"{self._where(index)}: state() has {len(state)} numbers, before it had {self._state_size}; return as "
                "many in every step"
            )
        if not np.isfinite(state).all():
            place = int(np.flatnonzero(~np.isfinite(state))[0])
            raise ValueError(
                f"{self._where(index)}: number {place} of its global state is {state[place]}; a critic reads it: let "
                "state() return finite numbers"
            )
        return state

    def _own(self, index: int, observations: Mapping[AgentID, Any]) -> dict[AgentID, Any]:
        """Copies of the observations: many environments write each into the array of the one before."""
        return {
            agent: self._copies[agent](observation, lambda: self._where(index))
            if agent in self._copies
            else observation
            for agent, observation in observations.items()
        }

    def _flags(
        self,
        index: int,
        observations: Mapping[AgentID, Any],
        terminateds: Mapping[AgentID, bool],
        truncateds: Mapping[AgentID, bool],
    ) -> tuple[Mapping[AgentID, bool], Mapping[AgentID, bool]]:
        """Both with `"__all__"`, set where all agents have ended: RLlib's loop asks for it."""
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            for agent, flag in flags.items():
                if not is_flag(flag):
                    raise TypeError(f"{self._where(index)}: {name} of agent {agent!r} is {flag!r}; return a bool")
                if flag and agent != ALL and agent not in self.possible_agents:
                    raise ValueError(
                        f"{self._where(index)}: {name} name agent {agent!r}, which is not in possible_agents "
                        f"{self.possible_agents}"
                    )
        ended = self._ended[index]
        ended.update(a for flags in (terminateds, truncateds) for a, end in flags.items() if end and a != ALL)
        self._living[index].update(observations)
        told = ALL in terminateds or ALL in truncateds
        if terminateds.get(ALL) or truncateds.get(ALL):
            self._over[index] = True
            return {ALL: False, **terminateds}, {ALL: False, **truncateds}
        # Who says "__all__": False with some agents still to come means it; without the key it is for us to say.
        over = ended >= (set(self.possible_agents) if told else self._living[index])
        self._over[index] = over
        by_end = over and any(terminateds.values())
        return {**terminateds, ALL: by_end}, {**truncateds, ALL: over and not by_end}

    def _dicts(self, index: int, method: str, returned: Any, names: Sequence[str]) -> tuple[Any, ...]:
        try:
            return returned_dicts(self.envs[index].unwrapped, method, returned, names)
        except TypeError as error:
            raise TypeError(f"{self._where(index)}: {error}") from None

    def _where(self, index: int) -> str:
        return f"environment {self.name!r}, environment index {index}, step {self._steps[index]} of its episode"

    def get_state(self) -> dict[str, Any]:
        """The states of all environments, and who lives in each.

        Raises:
            NotImplementedError: an environment has none.
        """
        return {
            "envs": [state_of(env) for env in self.envs],
            "over": [*self._over],
            "steps": [*self._steps],
            "living": [[a for a in self.possible_agents if a in agents] for agents in self._living],
            "ended": [[a for a in self.possible_agents if a in agents] for agents in self._ended],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.set_state(saved)
        self._over, self._steps = [*state["over"]], [*state["steps"]]
        self._living, self._ended = ([set(agents) for agents in state[name]] for name in ("living", "ended"))

    @override(VectorMultiAgentEnv)
    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs)

    @override(VectorMultiAgentEnv)
    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


def _dict_space(spaces: dict[Any, gym.Space]) -> gym.spaces.Dict:
    """By agent id, which may be a number."""
    return gym.spaces.Dict(spaces)
