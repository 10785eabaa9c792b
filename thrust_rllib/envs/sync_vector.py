"""E copies of a `JointEnv` stepped one after another in this process, with automatic reset and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.batching import ObservationBatch, Where, split_actions
from thrust_rllib.envs.extras import stack_extras
from thrust_rllib.envs.global_state import flat_state, stack_states
from thrust_rllib.envs.joint_env import (
    AgentID,
    JointEnv,
    JointStepResult,
    VectorJointEnv,
    check_seeds,
)
from thrust_rllib.envs.presence import EpisodeAgents
from thrust_rllib.envs.spaces import check_spaces, identical_spaces
from thrust_rllib.envs.wrapped_state import global_state_of


class SyncVectorJointEnv(VectorJointEnv):
    """A `VectorJointEnv` of E scalar environments; `stacked` where all agents have identical array spaces.

    It checks what each environment returns (agents, shapes, types, ends) and names agent, environment index
    and step in the error. It does not look at every number: finite values and bounds are checked on whole
    rollouts elsewhere.

    Where agents are absent (see `JointEnv`), the result says in `present` who acted and in `over` which episodes ended.
    An absent agent shows the element of its observation space that is nearest to zero, with an action mask of ones; one
    that was truncated in this step its last observation.

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
        self._state_space = first.state_space
        self.state_space = None if first.state_space is None else spaces.flatten_space(first.state_space)
        self.render_mode = first.render_mode
        self.stacked = identical_spaces(first)
        self._batch = ObservationBatch(self.possible_agents, self.observation_spaces, num_envs, self.stacked)
        self._steps: list[int] | None = None  # of the episode that runs, by environment
        self._episodes = [EpisodeAgents(self.possible_agents) for _ in range(num_envs)]
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
        episode = self._episodes[row]
        episode.begin(observations, where)
        if episode.everybody:
            self._batch.write(arrays, row, observations, where)
        else:
            self._batch.write_some(arrays, row, observations, where, episode.acting)

    def acts_next(self) -> np.ndarray:
        """See `VectorJointEnv.acts_next`."""
        return np.array([[agent in episode.acting for episode in self._episodes] for agent in self.possible_agents])

    def step_joint(self, actions: Any) -> JointStepResult:
        """See `VectorJointEnv.step_joint`."""
        if self._steps is None:
            raise RuntimeError("step_joint was called before reset_joint; reset the environments first")
        agents = self.possible_agents
        rows = split_actions(actions, agents, self.action_spaces, self.num_envs, self.stacked)
        step = _Step(self._batch)
        for row, (env, episode) in enumerate(zip(self.envs, self._episodes, strict=True)):
            self._steps[row] += 1
            where = Where(self._names[row], row, self._steps[row])
            everybody = episode.everybody
            try:
                result = env.step_joint(rows[row] if everybody else episode.choose(rows[row], where))
            except Exception as error:
                _raise_from(where, error)
            if type(result) is not JointStepResult:
                _check_result(result, where)
            if result.present is not None or result.final_observations is not None or result.final_state is not None:
                _refuse_unused(result, where)
            step.extras.append(result.extras)
            if everybody and result.terminated is False and result.truncated is False and not result.over:
                rewards, seen = result.rewards, result.observations
                if type(seen) is dict and type(rewards) is dict and len(seen) == len(rewards) == len(agents):
                    try:  # the usual case: everybody goes on
                        paid = [rewards[agent] for agent in agents]
                        self._batch.write(step.arrays, row, seen, where)
                        step.rewards.append(paid)
                        continue
                    except KeyError:
                        pass  # an unknown agent, for which `_take` finds the words
            self._take(step, row, result, where)
        return JointStepResult(
            rewards=self._reward_array(step.rewards),
            observations=step.observations,
            terminated=step.terminated,
            truncated=step.truncated,
            extras=stack_extras(self._names, self.possible_agents, step.extras, step.present),
            final_observations=step.final_observations,
            present=step.present,
            over=None if step.over_as_usual else step.over,
            final_state=stack_states(step.final_states, self._names) if step.final_states else None,
        )

    def _take(self, step: _Step, row: int, result: JointStepResult, where: Where) -> None:
        """Takes in what one environment answered, and resets it if its episode is over."""
        assert self._steps is not None
        agents, episode = self.possible_agents, self._episodes[row]
        taken = episode.advance(result, where)
        step.rewards.append([result.rewards.get(agent, 0.0) for agent in agents])
        step.terminated[:, row] = [taken.terminated.get(agent, False) for agent in agents]
        step.truncated[:, row] = [taken.truncated.get(agent, False) for agent in agents]
        step.over[row] = taken.over
        if len(taken.acted) < len(agents):
            if step.present is None:
                step.present = np.ones((len(agents), self.num_envs), dtype=bool)
            step.present[:, row] = [agent in taken.acted for agent in agents]
            step.over_as_usual = False
        elif taken.over != (len(taken.ended) == len(agents)):
            step.over_as_usual = False
        if not taken.over:
            cut = [agent for agent in taken.truncated if taken.truncated[agent] and agent in result.observations]
            self._batch.write_some(step.arrays, row, result.observations, where, {*episode.acting, *cut}, cut)
            return
        if step.final_observations is None:
            step.final_observations, step.final_arrays = self._batch.zeros()
        shown = [agent for agent in taken.terminated if agent in result.observations]
        if len(shown) == len(agents):
            self._batch.write(step.final_arrays, row, result.observations, where)
        else:
            self._batch.write_some(step.final_arrays, row, result.observations, where, shown)
        if self.records_state and any(taken.truncated.values()):
            step.final_states[row] = self._state_of(row)
        self._steps[row] = 0
        self._reset_one(row, None, step.arrays)

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

    def record_states(self) -> None:
        """See `VectorJointEnv.record_states`."""
        super().record_states()
        for env in self.envs:
            env.record_states()

    def state(self) -> np.ndarray:
        """The environments' global states, flat: float32 [E, S].

        Raises:
            ValueError: one has another shape than declared, or than the others'.
        """
        return stack_states({row: self._state_of(row) for row in range(self.num_envs)}, self._names)

    @property
    def state_parts(self) -> gym.Space | None:
        """The space as the environments declare it."""
        return self._state_space

    def _state_of(self, row: int) -> np.ndarray:
        where = Where(self._names[row], row, 0 if self._steps is None else self._steps[row])
        try:
            state = global_state_of(self.envs[row])
        except NotImplementedError:
            raise
        except Exception as error:
            _raise_from(where, error)
        return flat_state(self._state_space, state, where())

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
            "agents": [episode.get_state() for episode in self._episodes],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.set_state(saved)
        self._steps = None if state["steps"] is None else [*state["steps"]]
        for episode, agents in zip(self._episodes, state["agents"], strict=True):
            episode.set_state(agents)


class _Step:
    """The arrays of one step, filled environment by environment."""

    def __init__(self, batch: ObservationBatch) -> None:
        shape = (len(batch.agents), batch.num_envs)
        self.observations, self.arrays = batch.zeros()
        self.rewards: list[list[Any]] = []
        self.terminated, self.truncated = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.extras: list[Mapping[str, Any]] = []
        self.final_observations: Any = None
        self.final_arrays: list[np.ndarray] = []
        self.final_states: dict[int, np.ndarray] = {}
        self.present: np.ndarray | None = None
        self.over = np.zeros(batch.num_envs, dtype=bool)
        self.over_as_usual = True  # `episode_over` finds the same out of the other fields


def _raise_from(where: Where, error: Exception) -> NoReturn:
    raise RuntimeError(f"{where()}: {type(error).__name__}: {error}") from error


def _check_result(result: Any, where: Where) -> None:
    if not isinstance(result, JointStepResult):
        raise TypeError(
            f"{where()}: step_joint returned a {type(result).__name__}; return "
            "JointStepResult(rewards, observations, terminated, truncated)"
        )


def _refuse_unused(result: JointStepResult, where: Where) -> NoReturn:
    if result.final_observations is not None or result.final_state is not None:
        raise ValueError(
            f"{where()}: final_observations is for a VectorJointEnv, like final_state; a JointEnv returns the last "
            "observation as observations and does not reset itself"
        )
    raise ValueError(
        f"{where()}: present is for a VectorJointEnv; a JointEnv shows an observation to the agents that act next, and "
        "to no others"
    )
