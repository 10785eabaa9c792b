"""Small environments whose values are known in closed form, for tests of every layer; vectorised.

| name | what is known |
|---|---|
| `ConstantReward` | never-ending (truncated) pay of 1: the value is 1 / (1 - gamma) everywhere |
| `ScriptedRewards` | rewards 1, 2, 3, then an end of the chosen kind: targets by hand |
| `Identity` | agent i always sees the one-hot of i |
| `Alignment` | the observation is (episode, step, agent): rows that belong together agree |
| `RandomObservations` | shapes only: 3 agents, 5 numbers |
| `MultiDiscreteActions`, `MatchObservation`, `MatchTarget` | learnable at once: 1, 1 and 0 per step at best |
| `MixedSpaces`, `ObservationKinds` | every agent has spaces of another kind |
| `MaskedActions` | one agent has one legal action; an illegal one is an error |
| `Faulty` | raises, or shows a NaN or a value outside the space, in a chosen step |

Shapes: E environments, N agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.debug_random import (
    Agents,
    MaskedActions,
    MatchObservation,
    MatchTarget,
    MixedSpaces,
    MultiDiscreteActions,
    ObservationKinds,
    RandomObservations,
)
from thrust_rllib.envs.fixed_length import FixedLengthEnv
from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult

__all__ = [
    "Alignment",
    "ConstantReward",
    "Faulty",
    "Identity",
    "MaskedActions",
    "MatchObservation",
    "MatchTarget",
    "MixedSpaces",
    "MultiDiscreteActions",
    "ObservationKinds",
    "RandomObservations",
    "ScriptedRewards",
]


class ConstantReward(FixedLengthEnv):
    """Every agent is paid `reward` in every step and sees [1]."""

    def __init__(
        self,
        num_envs: int = 1,
        agents: Agents = 2,
        reward: float = 1.0,
        episode_length: int = 10,
        ends: Any = "truncated",
    ) -> None:
        self.reward = reward
        super().__init__(
            num_envs,
            agents,
            spaces.Box(0, 1, (1,)),
            spaces.Discrete(2),
            episode_length=episode_length,
            ends=ends,
        )

    def _observe(self, envs: np.ndarray) -> Any:
        return np.ones((self.num_agents, len(envs), 1), dtype=np.float32)

    def _pay(self, actions: Any) -> np.ndarray:
        return np.full((self.num_agents, self.num_envs), self.reward)


class ScriptedRewards(FixedLengthEnv):
    """Step t pays rewards[t]; the last one ends the episode. Observation: one-hot of the step, [T + 1]."""

    def __init__(
        self,
        num_envs: int = 1,
        agents: Agents = 2,
        rewards: Sequence[float] = (1, 2, 3),
        ends: Any = "terminated",
    ) -> None:
        self.rewards = np.array(rewards, dtype=np.float64)
        space = spaces.Box(0, 1, (len(self.rewards) + 1,))
        super().__init__(num_envs, agents, space, spaces.Discrete(2), episode_length=len(self.rewards), ends=ends)

    def _observe(self, envs: np.ndarray) -> Any:
        steps = np.eye(self.episode_length + 1, dtype=np.float32)[self.step_count[envs]]
        return np.repeat(steps[None], self.num_agents, axis=0)

    def _pay(self, actions: Any) -> np.ndarray:
        return self.rewards[self.step_count]


class Identity(FixedLengthEnv):
    """Agent i sees the one-hot of i and is paid 1 for action i."""

    def __init__(self, num_envs: int = 1, agents: Agents = 4, episode_length: int = 8, ends: Any = "truncated") -> None:
        count = agents if isinstance(agents, int) else len(agents)
        super().__init__(
            num_envs, agents, spaces.Box(0, 1, (count,)), spaces.Discrete(count),
            episode_length=episode_length, ends=ends,
        )  # fmt: skip

    def _observe(self, envs: np.ndarray) -> Any:
        return self.own_one_hot(len(envs))

    def _pay(self, actions: Any) -> np.ndarray:
        return np.asarray(actions) == np.arange(self.num_agents)[:, None]


class Alignment(FixedLengthEnv):
    """The observation is (episode, step, agent), counted from 0; the reward is the step.

    The episode counter starts again when a seed is given.
    """

    def __init__(self, num_envs: int = 1, agents: Agents = 3, episode_length: int = 7, ends: Any = "truncated") -> None:
        super().__init__(
            num_envs,
            agents,
            spaces.Box(0, np.inf, (3,)),
            spaces.Discrete(2),
            episode_length=episode_length,
            ends=ends,
        )

    def _observe(self, envs: np.ndarray) -> Any:
        observations = np.empty((self.num_agents, len(envs), 3), dtype=np.float32)
        observations[..., 0] = self.episode_count[envs]
        observations[..., 1] = self.step_count[envs]
        observations[..., 2] = np.arange(self.num_agents)[:, None]
        return observations

    def _pay(self, actions: Any) -> np.ndarray:
        return self.step_count.astype(np.float64)


class Faulty(JointEnv):
    """Two agents and one fault, in one step of every episode (counted from 1).

    Args:
        fault: "raise", "nan_observation", "nan_reward", "outside" (an observation of 7 in a Box(0, 1)) or
            "none".
        step: in which step.
        episode_length: steps per episode, then truncated.
    """

    def __init__(self, fault: str = "raise", step: int = 3, episode_length: int = 5) -> None:
        self.possible_agents = ["agent_0", "agent_1"]
        self.observation_spaces = {agent: spaces.Box(0, 1, (3,)) for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.possible_agents}
        self.fault, self.step, self.episode_length, self.step_count = fault, step, episode_length, 0

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """Zeros for both agents."""
        self.step_count = 0
        return {agent: np.zeros(3, dtype=np.float32) for agent in self.possible_agents}

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """Pays 1, and commits the fault when its step has come; agent_1 has the bad value."""
        self.step_count += 1
        observations = {agent: np.zeros(3, dtype=np.float32) for agent in self.possible_agents}
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        if self.step_count == self.step:
            if self.fault == "raise":
                raise OSError("the simulator lost its connection")
            if self.fault == "nan_reward":
                rewards["agent_1"] = float("nan")
            elif self.fault != "none":
                observations["agent_1"][1] = np.nan if self.fault == "nan_observation" else 7.0
        return JointStepResult(rewards, observations, False, self.step_count >= self.episode_length)

    def get_state(self) -> int:
        """The step."""
        return self.step_count

    def set_state(self, state: int) -> None:
        """Goes on from where `get_state` was called."""
        self.step_count = state
