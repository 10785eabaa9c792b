"""E copies of a `JointEnv` stepped one after another in this process, with automatic reset and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from thrust_rllib.envs.batching import ObservationBatch, Where, check_agents, split_actions
from thrust_rllib.envs.joint_env import (
    GENERAL_DOOR,
    AgentID,
    JointEnv,
    JointStepResult,
    VectorJointEnv,
    check_seeds,
)
from thrust_rllib.envs.spaces import check_spaces, identical_spaces


class SyncVectorJointEnv(VectorJointEnv):
    """A `VectorJointEnv` of E scalar environments; `stacked` where all agents have identical array spaces.

    It checks what each environment returns (agents, shapes, types, ends) and names agent, environment index
    and step in the error. It does not look at every number: finite values and bounds are checked on whole
    rollouts elsewhere.

    Args:
        factory: makes one environment; called E times.
        num_envs: E.

    Raises:
        TypeError: `factory` makes something that is no `JointEnv`.
        ValueError: the environments declare different agents or spaces.
    """

    def __init__(self, factory: Callable[[], JointEnv], num_envs: int = 1) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; needed: at least 1")
        self.num_envs = num_envs
        self.envs: list[JointEnv] = []
        for index in range(num_envs):
            env = factory()
            if not isinstance(env, JointEnv):
                raise TypeError(
                    f"the environment factory made a {type(env).__name__}, which is not a JointEnv; derive "
                    "the class from thrust_rllib.JointEnv and implement reset_joint and step_joint"
                )
            if any(env is other for other in self.envs):
                raise ValueError(
                    "the environment factory gave the same object twice; it must make a new environment each time"
                )
            check_spaces(env)
            self.envs.append(env)
            self._check_alike(index)
        first = self.envs[0]
        self.possible_agents: list[AgentID] = list(first.possible_agents)
        self.observation_spaces = {agent: first.observation_spaces[agent] for agent in self.possible_agents}
        self.action_spaces = {agent: first.action_spaces[agent] for agent in self.possible_agents}
        self.state_space = first.state_space
        self.render_mode = first.render_mode
        self.stacked = identical_spaces(first)
        self._batch = ObservationBatch(self.possible_agents, self.observation_spaces, num_envs, self.stacked)
        self._steps: list[int] | None = None  # of the episode that runs, by environment
        self._names = [type(getattr(env, "unwrapped", env)).__name__ for env in self.envs]

    def _check_alike(self, index: int) -> None:
        first, env = self.envs[0], self.envs[index]
        for attribute in ("possible_agents", "observation_spaces", "action_spaces"):
            if getattr(env, attribute) != getattr(first, attribute):
                raise ValueError(
                    f"{type(env).__name__}: environment {index} declares {attribute} "
                    f"{getattr(env, attribute)}, environment 0 {getattr(first, attribute)}; they must be "
                    "equal"
                )

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> Any:
        """See `VectorJointEnv.reset_joint`."""
        checked = check_seeds(seeds, self.num_envs)
        observations, arrays = self._batch.zeros()
        self._steps = [0] * self.num_envs
        for row, seed in enumerate(checked):
            self._reset_one(row, seed, arrays)
        return observations

    def _reset_one(self, row: int, seed: int | None, arrays: list[np.ndarray]) -> None:
        where = Where(self._names[row], row, 0)
        try:
            observations = self.envs[row].reset_joint(seed)
        except Exception as error:
            _raise_from(where, error)
        if isinstance(observations, tuple):
            raise TypeError(
                f"{where()}: it returned a tuple; return only {{agent: observation}} (infos are no part of a JointEnv)"
            )
        self._batch.write(arrays, row, observations, where)

    def step_joint(self, actions: Any) -> JointStepResult:
        """See `VectorJointEnv.step_joint`."""
        if self._steps is None:
            raise RuntimeError("step_joint was called before reset_joint; reset the environments first")
        agents = self.possible_agents
        rows = split_actions(actions, agents, self.action_spaces, self.num_envs, self.stacked)
        observations, arrays = self._batch.zeros()
        final_observations: Any = None
        final_arrays: list[np.ndarray] = []
        rewards: list[list[Any]] = []
        terminated = np.zeros((len(agents), self.num_envs), dtype=bool)
        truncated = np.zeros((len(agents), self.num_envs), dtype=bool)
        extras: list[Mapping[str, Any]] = []

        for row, env in enumerate(self.envs):
            self._steps[row] += 1
            where = Where(self._names[row], row, self._steps[row])
            try:
                result = env.step_joint(rows[row])
            except Exception as error:
                _raise_from(where, error)
            if type(result) is not JointStepResult:
                _check_result(result, where)
            if result.present is not None or result.final_observations is not None:
                _refuse_unused(result, where)
            rewards.append(self._reward_row(result.rewards, where))
            over = False
            if result.terminated is not False or result.truncated is not False:
                terminated[:, row] = self._flag_row(result.terminated, "terminated", where)
                truncated[:, row] = self._flag_row(result.truncated, "truncated", where)
                over = self._is_over(terminated[:, row], truncated[:, row], where)
            extras.append(result.extras)
            optional = terminated[:, row].tolist() if over else ()
            self._batch.write(arrays, row, result.observations, where, optional)
            if over:
                if final_observations is None:
                    final_observations, final_arrays = self._batch.zeros()
                for array, final in zip(arrays, final_arrays, strict=True):
                    final[row] = array[row]
                self._steps[row] = 0
                self._reset_one(row, None, arrays)

        return JointStepResult(
            rewards=self._reward_array(rewards),
            observations=observations,
            terminated=terminated,
            truncated=truncated & ~terminated if final_observations is not None else truncated,
            extras=self._stack_extras(extras),
            final_observations=final_observations,
        )

    def _reward_row(self, rewards: Any, where: Where) -> list[Any]:
        if type(rewards) is dict and len(rewards) == len(self.possible_agents):
            try:
                return [rewards[agent] for agent in self.possible_agents]
            except KeyError:
                pass
        check_agents(rewards, self.possible_agents, "rewards", where())
        return [rewards[agent] for agent in self.possible_agents]

    def _reward_array(self, rows: list[list[Any]]) -> np.ndarray:
        try:
            array = np.array(rows, dtype=np.float32)
            if array.ndim == 2:
                return array.T
        except (TypeError, ValueError):
            pass
        for row, values in enumerate(rows):
            for agent, value in zip(self.possible_agents, values, strict=True):
                try:
                    is_number = np.asarray(value, dtype=np.float32).ndim == 0
                except (TypeError, ValueError):
                    is_number = False
                if not is_number:
                    raise TypeError(
                        f"{self._names[row]}, environment {row}: the reward of agent {agent!r} is {value!r}; "
                        "return one number"
                    )
        raise AssertionError("unreachable: every reward is a number")

    def _flag_row(self, flags: Any, what: str, where: Where) -> Any:
        if isinstance(flags, (bool, np.bool_)):
            return flags
        if not isinstance(flags, Mapping):
            raise TypeError(
                f"{where()}: {what} is a {type(flags).__name__}; return one bool for all agents or a dict agent -> bool"
            )
        check_agents(flags, self.possible_agents, f"{what} flags", where())
        for agent in self.possible_agents:
            if not isinstance(flags[agent], (bool, np.bool_)):
                raise TypeError(f"{where()}: {what} of agent {agent!r} is {flags[agent]!r}; return a bool")
        return [flags[agent] for agent in self.possible_agents]

    def _is_over(self, terminated: np.ndarray, truncated: np.ndarray, where: Where) -> bool:
        ended = terminated | truncated
        if not ended.any():
            return False
        if not ended.all():
            gone = [agent for agent, end in zip(self.possible_agents, ended, strict=True) if end]
            stay = [agent for agent, end in zip(self.possible_agents, ended, strict=True) if not end]
            raise ValueError(f"{where()}: agents {gone} ended while {stay} go on. {GENERAL_DOOR}")
        return True

    def _stack_extras(self, extras: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        stacked: dict[str, np.ndarray] = {}
        if not any(extras):
            return stacked
        for row, given in enumerate(extras):
            if given.keys() != extras[0].keys():
                raise ValueError(
                    f"{self._names[row]}: environment {row} returned extras {sorted(given)}, environment 0 "
                    f"{sorted(extras[0])}; return the same names in every step"
                )
        for name, value in extras[0].items():
            if not isinstance(value, Mapping):
                stacked[name] = np.array([given[name] for given in extras])
                continue
            for row, given in enumerate(extras):
                check_agents(given[name], self.possible_agents, f"extras {name!r}", f"environment {row}")
            stacked[name] = np.array([[given[name][agent] for given in extras] for agent in self.possible_agents])
        return stacked

    def state(self) -> np.ndarray:
        """The environments' global states, [E, S]."""
        return np.stack([env.state() for env in self.envs])

    def render(self, index: int = 0) -> Any:
        """An image of environment `index`."""
        return self.envs[index].render()

    def close(self) -> None:
        """Closes every environment."""
        for env in self.envs:
            env.close()

    def get_state(self) -> dict[str, Any]:
        """The states of all environments."""
        return {
            "envs": [env.get_state() for env in self.envs],
            "steps": None if self._steps is None else [*self._steps],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.set_state(saved)
        self._steps = None if state["steps"] is None else [*state["steps"]]


def _raise_from(where: Where, error: Exception) -> NoReturn:
    raise RuntimeError(f"{where()}: {type(error).__name__}: {error}") from error


def _check_result(result: Any, where: Where) -> None:
    if not isinstance(result, JointStepResult):
        raise TypeError(
            f"{where()}: step_joint returned a {type(result).__name__}; return "
            "JointStepResult(rewards, observations, terminated, truncated)"
        )


def _refuse_unused(result: JointStepResult, where: Where) -> None:
    if result.final_observations is not None:
        raise ValueError(
            f"{where()}: final_observations is for a VectorJointEnv; a JointEnv returns the last "
            "observation as observations and does not reset itself"
        )
    present = result.present
    if not (present is True or (isinstance(present, Mapping) and all(present.values()))):
        raise ValueError(f"{where()}: present says that not every agent acted. {GENERAL_DOOR}")
