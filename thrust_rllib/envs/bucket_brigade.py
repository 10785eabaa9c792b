"""Bucket Brigade: agents guard a ring of houses against fire; vectorised over environments.

The rules are in `bucket_brigade_rules`. Two things differ from the original engine on purpose: observations
show the houses one-hot instead of raw scenario constants, and every environment index has a random stream of its
own.

Shapes: E environments, N agents, H houses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.bucket_brigade_rules import (
    BURNING,
    HOUSE,
    MODE,
    RUINED,
    SAFE,
    SCENARIOS,
    SIGNAL,
    Night,
    Scenario,
    night,
)
from thrust_rllib.envs.joint_env import AgentID, JointStepResult, VectorJointEnv, check_seeds
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.streams import UniformStreams

__all__ = ["SCENARIOS", "BucketBrigade", "Night", "Scenario", "night"]


class BucketBrigade(VectorJointEnv):
    """E games of Bucket Brigade.

    Action of an agent: MultiDiscrete [H, 2, 2] = (house, mode with 1 = work, signal). Ends are terminations;
    there is no time limit. Observation, float32: the houses' states one-hot (3H), every agent's location / H,
    signal and last mode (3N), night / 20, and the agent's own one-hot (N). `state()` is the same without the
    last part.

    Args:
        num_envs: number of games E.
        scenario: a name in `SCENARIOS`.
        num_agents: N; agent i owns the houses h with h mod N = i.
        num_houses: H.
        raw_observations: houses as 0, 1, 2, locations and night unscaled, and the scenario's constants (up to
            100, equal in every step), as the original shows them. They saturate a tanh layer: only for
            comparison.
        kappa, rho, team_reward, team_penalty, own_saved, own_ruined, work_cost, min_nights: replace single
            constants, see `Scenario`.

    Raises:
        ValueError: an unknown scenario, or a number out of its range.
    """

    metadata = {"name": "bucket_brigade", "render_modes": ["rgb_array"], "render_fps": 2}
    render_mode = "rgb_array"
    stacked = True

    def __init__(
        self,
        num_envs: int = 1,
        scenario: str = "default",
        num_agents: int = 4,
        num_houses: int = 10,
        raw_observations: bool = False,
        *,
        kappa: float | None = None,
        rho: float | None = None,
        team_reward: float | None = None,
        team_penalty: float | None = None,
        own_saved: float | None = None,
        own_ruined: float | None = None,
        work_cost: float | None = None,
        min_nights: int | None = None,
    ) -> None:
        if scenario not in SCENARIOS:
            raise ValueError(f"unknown scenario {scenario!r}{nearest(scenario, SCENARIOS)} There are {list(SCENARIOS)}")
        given: dict[str, Any] = dict(
            kappa=kappa, rho=rho, team_reward=team_reward, team_penalty=team_penalty, own_saved=own_saved,
            own_ruined=own_ruined, work_cost=work_cost, min_nights=min_nights,
        )  # fmt: skip
        self.scenario = dataclasses.replace(
            SCENARIOS[scenario], **{name: value for name, value in given.items() if value is not None}
        )
        for name in ("kappa", "rho"):
            if not 0 <= getattr(self.scenario, name) <= 1:
                raise ValueError(f"{name} is {getattr(self.scenario, name)}; a probability lies in [0, 1]")
        for name, number in dict(num_envs=num_envs, num_agents=num_agents, num_houses=num_houses).items():
            if number < 1:
                raise ValueError(f"{name} is {number}; needed: at least 1")
        self.num_envs, self.num_agents, self.num_houses = num_envs, num_agents, num_houses
        self.raw_observations = raw_observations
        self.possible_agents: list[AgentID] = [f"agent_{i}" for i in range(num_agents)]
        self._action_high = np.array([num_houses, 2, 2])
        self._constants = np.array(dataclasses.astuple(self.scenario), dtype=np.float32)
        self.state_space = self._state_space()
        own_high = np.ones(num_agents, dtype=np.float32)
        observation_space = spaces.Box(
            np.concatenate([self.state_space.low, 0 * own_high]),
            np.concatenate([self.state_space.high, own_high]),
        )
        action_space = spaces.MultiDiscrete(self._action_high)
        self.observation_spaces = {agent: observation_space for agent in self.possible_agents}
        self.action_spaces = {agent: action_space for agent in self.possible_agents}

        self._streams = UniformStreams(num_envs, num_houses)
        self._houses = np.zeros((num_envs, num_houses), dtype=np.int64)
        self._previous_houses = np.zeros_like(self._houses)
        self._last_actions = np.zeros((num_agents, num_envs, 3), dtype=np.int64)
        self._night = np.zeros(num_envs, dtype=np.int64)
        self._last_rewards: np.ndarray | None = None
        self._ended: tuple[np.ndarray, ...] | None = None  # over, houses, actions, nights

    @property
    def houses(self) -> np.ndarray:
        """The houses now, int [E, H]; a copy."""
        return self._houses.copy()

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> np.ndarray:
        """Observations [N, E, D]; see `VectorJointEnv.reset_joint`."""
        self._streams.seed(check_seeds(seeds, self.num_envs))
        everyone = np.arange(self.num_envs)
        self._restart(everyone)
        self._last_rewards, self._ended = None, None
        return self._observe(everyone)

    def step_joint(self, actions: np.ndarray) -> JointStepResult:
        """One night in every game. `actions`: int [N, E, 3]."""
        actions = np.array(actions)
        if actions.shape != self._last_actions.shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions have shape {actions.shape} and type {actions.dtype}; needed: integers [agents, "
                f"environments, 3] = {self._last_actions.shape}"
            )
        if actions.min() < 0 or (actions >= self._action_high).any():
            agent, env = np.argwhere(((actions < 0) | (actions >= self._action_high)).any(axis=-1))[0]
            raise ValueError(
                f"agent {self.possible_agents[agent]!r} of environment {env} was given the action "
                f"{actions[agent, env].tolist()}, outside MultiDiscrete {self._action_high.tolist()}"
            )
        uniforms = self._streams.take(2)
        before = self._houses
        self._houses, rewards, terminated = night(
            before, self._previous_houses, actions, uniforms[:, 0], uniforms[:, 1], self.scenario, self._night
        )
        self._previous_houses = self._houses.copy()
        self._last_actions = actions
        self._last_rewards = rewards
        self._night += 1

        observations = self._observe(np.arange(self.num_envs))
        final_observations = final_state = None
        self._ended = None
        if terminated.any():
            final_state = self.state() if self.records_state else None
            final_observations, observations = observations, observations.copy()
            over = np.flatnonzero(terminated)
            self._ended = (terminated, self._houses.copy(), self._last_actions.copy(), self._night.copy())
            self._restart(over)
            observations[:, over] = self._observe(over)
        shape = (self.num_agents, self.num_envs)
        return JointStepResult(
            rewards=rewards.astype(np.float32),
            observations=observations,
            terminated=np.broadcast_to(terminated, shape),
            truncated=np.zeros(shape, dtype=bool),
            final_observations=final_observations,
            final_state=final_state,
        )

    def _restart(self, envs: np.ndarray) -> None:
        self._houses[envs] = np.where(self._streams.take(1, envs)[:, 0] < self.scenario.rho, BURNING, SAFE)
        self._previous_houses[envs] = SAFE
        self._last_actions[:, envs] = 0
        self._night[envs] = 0

    def _state_space(self) -> spaces.Box:
        """Bounds of `_shared`; nights have no upper bound."""
        ones = np.ones(3 * self.num_agents)
        high: list[Any] = [np.ones(3 * self.num_houses), ones, [np.inf]]
        low: list[Any] = [np.zeros(3 * self.num_houses + 3 * self.num_agents + 1)]
        if self.raw_observations:
            locations = np.full(self.num_agents, self.num_houses - 1)
            high = [
                np.full(self.num_houses, RUINED),
                locations,
                ones[self.num_agents :],
                [np.inf],
                self._constants,
            ]
            low = [np.zeros(self.num_houses + 3 * self.num_agents + 1), self._constants]
        return spaces.Box(np.concatenate(low).astype(np.float32), np.concatenate(high).astype(np.float32))

    def _shared(self, envs: np.ndarray) -> np.ndarray:
        """What all agents of the games `envs` see, float32 [len(envs), S]."""
        houses = self._houses[envs]
        actions = self._last_actions[:, envs].astype(np.float32).transpose(1, 2, 0)  # [E, 3, N]
        nights = self._night[envs, None].astype(np.float32)
        if self.raw_observations:
            parts = [houses, actions[:, HOUSE], actions[:, SIGNAL], actions[:, MODE], nights]
            parts.append(np.broadcast_to(self._constants, (len(envs), len(self._constants))))
        else:
            one_hot = np.eye(3, dtype=np.float32)[houses].reshape(len(envs), -1)
            parts = [
                one_hot,
                actions[:, HOUSE] / self.num_houses,
                actions[:, SIGNAL],
                actions[:, MODE],
                nights / 20,
            ]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        shared = self._shared(envs)
        size = shared.shape[1]
        observations = np.empty((self.num_agents, len(envs), size + self.num_agents), dtype=np.float32)
        observations[..., :size] = shared
        observations[..., size:] = np.eye(self.num_agents, dtype=np.float32)[:, None]
        return observations

    def state(self) -> np.ndarray:
        """What all agents see, float32 [E, S]."""
        return self._shared(np.arange(self.num_envs))

    def render(self, index: int = 0) -> np.ndarray:
        """Game `index` after its last night, uint8 [480, 480, 3]; see `draw_game`."""
        return self._draw(index, self._houses[index], self._last_actions[:, index], int(self._night[index]))

    def render_final(self, index: int = 0) -> np.ndarray:
        """The end of the game that the last step ended, as `render`; what `render` shows where it ended none."""
        if self._ended is not None:
            over, houses, actions, nights = self._ended
            if over[index]:
                return self._draw(index, houses[index], actions[:, index], int(nights[index]))
        return self.render(index)

    def _draw(self, index: int, houses: np.ndarray, actions: np.ndarray, nights: int) -> np.ndarray:
        from thrust_rllib.envs.bucket_brigade_drawing import draw_game

        rewards = None if self._last_rewards is None or not nights else self._last_rewards[:, index]
        return draw_game(houses, actions, nights, rewards)

    def get_state(self) -> dict[str, Any]:
        """Games and streams."""
        names = ("_houses", "_previous_houses", "_last_actions", "_night")
        return {"streams": self._streams.get_state(), **{name: getattr(self, name).copy() for name in names}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self._streams.set_state(state["streams"])
        for name in ("_houses", "_previous_houses", "_last_actions", "_night"):
            setattr(self, name, state[name].copy())
        self._last_rewards, self._ended = None, None
