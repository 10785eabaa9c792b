"""Simple spread: agents cover landmarks and should not touch each other; vectorised.

The world of mpe2's `simple_spread_v3` with discrete actions, number for number: the same seed gives the same episodes
(`tests/envs/test_spread.py` compares them). Collisions are told as extras, for a constraint or an auxiliary target.

Shapes: E environments, N agents and N landmarks; float64 inside, as in mpe2.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.fixed_length import FixedLengthEnv

TOUCH = 0.3
"""Agents closer than this touch: twice their size."""
CAPTURE = 0.1
"""A landmark is covered where an agent is closer than this."""
_PUSH = np.array([(0, 0), (-5, 0), (5, 0), (0, -5), (0, 5)], dtype=np.float64)  # forces of the five actions
_TIME_STEP, _DAMPING, _CONTACT_FORCE, _CONTACT_MARGIN = 0.1, 0.25, 100.0, 1e-3


class Spread(FixedLengthEnv):
    """E worlds of N agents and N landmarks.

    Actions, Discrete(5): nothing, left, right, down, up. Observation, float32: own velocity (2), own position (2),
    where the landmarks (2N) and the other agents (2N − 2) are from here, and zeros in place of messages (2N − 2).
    `state()` is all observations behind each other, as in mpe2. Agent i is paid

        local_ratio · (−1 for each agent it touches) + (1 − local_ratio) · (−Σ over landmarks of the nearest agent's
        distance).

    Extras of each step: "collisions" [N, E], how many others each agent touches; "touching" [N, N, E], 1 for each pair
    that touches; "covered" [E], how many landmarks an agent is on.

    Args:
        num_envs: number of worlds E.
        num_agents: N.
        local_ratio: weight of the agent's own part of the reward.
        max_cycles: steps of an episode, which is then truncated.
        collision_penalty: False: the agent's own part of the reward is 0, and collisions are told as extras alone.

    Raises:
        ValueError: a number out of its range.
    """

    metadata = {"name": "spread", "render_modes": ["rgb_array"], "render_fps": 10}
    saved_arrays = (*FixedLengthEnv.saved_arrays, "_positions", "_velocities", "_landmarks")

    def __init__(
        self,
        num_envs: int = 1,
        num_agents: int = 3,
        local_ratio: float = 0.5,
        max_cycles: int = 25,
        collision_penalty: bool = True,
    ) -> None:
        if num_agents < 1:
            raise ValueError(f"num_agents is {num_agents}; needed: at least 1")
        if not 0 <= local_ratio <= 1:
            raise ValueError(f"local_ratio is {local_ratio}; a share lies in [0, 1]")
        if max_cycles < 1:
            raise ValueError(f"max_cycles is {max_cycles}; needed: at least 1")
        self.local_ratio, self.collision_penalty = float(local_ratio), bool(collision_penalty)
        self._size = 4 + 2 * num_agents + 4 * (num_agents - 1)
        super().__init__(
            num_envs,
            num_agents,
            spaces.Box(-np.inf, np.inf, (self._size,)),
            spaces.Discrete(5),
            episode_length=max_cycles,
            stream_width=4 * num_agents,
        )
        self.state_space = spaces.Box(-np.inf, np.inf, (num_agents * self._size,))
        self._positions = np.zeros((num_envs, num_agents, 2))
        self._velocities = np.zeros_like(self._positions)
        self._landmarks = np.zeros_like(self._positions)
        self._others = np.array([[j for j in range(num_agents) if j != i] for i in range(num_agents)], dtype=np.int64)
        self._told: dict[str, np.ndarray] = {}

    def _begin(self, envs: np.ndarray) -> None:
        places = 2 * self.streams.take(1, envs).reshape(len(envs), 2, self.num_agents, 2) - 1
        self._positions[envs], self._landmarks[envs] = places[:, 0], places[:, 1]
        self._velocities[envs] = 0

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        force = _PUSH[np.asarray(actions)].swapaxes(0, 1) + self._contact_forces()
        # New arrays: what was handed out, and saved, stays.
        self._positions = self._positions + self._velocities * _TIME_STEP
        self._velocities = self._velocities * (1 - _DAMPING) + force * _TIME_STEP
        touching = self._distances(self._positions) < TOUCH
        touching[:, range(self.num_agents), range(self.num_agents)] = False
        nearest = self._distances(self._positions, self._landmarks).min(axis=1)  # [E, N] of each landmark
        collisions = touching.sum(axis=2).T
        self._told = {
            "collisions": collisions.astype(np.float32),
            "touching": touching.transpose(1, 2, 0).astype(np.float32),
            "covered": (nearest < CAPTURE).sum(axis=1).astype(np.float32),
        }
        own = -self.local_ratio * collisions if self.collision_penalty else 0.0
        return (1 - self.local_ratio) * -nearest.sum(axis=1) + np.broadcast_to(own, collisions.shape)

    def _extras(self) -> dict[str, np.ndarray]:
        return self._told

    @staticmethod
    def _distances(positions: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
        """[E, N, M] between [E, N, 2] and [E, M, 2], by default the same."""
        others = positions if others is None else others
        return np.sqrt(np.square(positions[:, :, None] - others[:, None]).sum(axis=-1))

    def _contact_forces(self) -> np.ndarray:
        """[E, N, 2]: agents that are close push each other away."""
        away = self._positions[:, :, None] - self._positions[:, None]  # [E, N, N, 2]
        distances = np.sqrt(np.square(away).sum(axis=-1))
        pushed = np.logaddexp(0, (TOUCH - distances) / _CONTACT_MARGIN) * _CONTACT_MARGIN
        distances[:, range(self.num_agents), range(self.num_agents)] = 1  # away from itself is 0
        return (_CONTACT_FORCE * (pushed / distances)[..., None] * away).sum(axis=2)

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        count = self.num_agents
        seen = np.zeros((count, len(envs), self._size), dtype=np.float32)
        positions = self._positions[envs].swapaxes(0, 1)  # [N, E, 2]
        seen[..., 0:2] = self._velocities[envs].swapaxes(0, 1)
        seen[..., 2:4] = positions
        landmarks = self._landmarks[envs] - positions[:, :, None]  # [N, E, N, 2]
        seen[..., 4 : 4 + 2 * count] = landmarks.reshape(count, len(envs), -1)
        if count > 1:
            others = positions[self._others].swapaxes(1, 2) - positions[:, :, None]  # [N, E, N − 1, 2]
            seen[..., 4 + 2 * count : 4 + 2 * count + 2 * (count - 1)] = others.reshape(count, len(envs), -1)
        return seen

    def state(self) -> np.ndarray:
        """All agents' observations behind each other, float32 [E, S]."""
        return self._observe(np.arange(self.num_envs)).swapaxes(0, 1).reshape(self.num_envs, -1)
