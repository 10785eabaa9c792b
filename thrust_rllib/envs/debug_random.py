"""Debug environments that draw what is seen from each agent's space; part of `debug`.

Shapes: E environments, N agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.fixed_length import FixedLengthEnv
from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.spaces import map_space

Agents = int | Sequence[AgentID]


class _Random(FixedLengthEnv):
    """Observations drawn at random from each agent's space, anew in each step."""

    saved_arrays = (*FixedLengthEnv.saved_arrays, "_uniforms")

    def __init__(
        self, num_envs: int, agents: Agents, observation_spaces: Any, action_spaces: Any, **kwargs: Any
    ) -> None:
        super().__init__(num_envs, agents, observation_spaces, action_spaces, **kwargs)
        self._width = max(_size(space) for space in self.observation_spaces.values())
        self.streams = type(self.streams)(num_envs, self._width)
        self._uniforms = np.zeros((self.num_agents, num_envs, self._width))

    def _begin(self, envs: np.ndarray) -> None:
        self._uniforms[:, envs] = self.streams.take(self.num_agents, envs).transpose(1, 0, 2)

    def _observe(self, envs: np.ndarray) -> Any:
        drawn = {
            agent: _from_uniforms(self.observation_spaces[agent], self._uniforms[i, envs])
            for i, agent in enumerate(self.possible_agents)
        }
        return np.stack(list(drawn.values())) if self.stacked else drawn

    def _pay(self, actions: Any) -> np.ndarray:
        rewards = self._judge(actions)
        self._begin(np.arange(self.num_envs))  # what is seen next
        return rewards

    def _judge(self, actions: Any) -> np.ndarray:
        """1 for the first action of a discrete space (in every dimension), minus the mean square in a Box."""
        rewards = np.empty((self.num_agents, self.num_envs))
        for i, agent in enumerate(self.possible_agents):
            values, space = (
                np.asarray(actions[i] if self.stacked else actions[agent]),
                self.action_spaces[agent],
            )
            values = values.reshape(self.num_envs, -1)
            if isinstance(space, spaces.Box):
                rewards[i] = -np.square(values).mean(axis=1)
            else:
                rewards[i] = (values == getattr(space, "start", 0)).all(axis=1)
        return rewards


class RandomObservations(_Random):
    """Three agents that see 5 uniform numbers; action 0 pays 1."""

    def __init__(
        self,
        num_envs: int = 1,
        agents: Agents = 3,
        size: int = 5,
        num_actions: int = 3,
        episode_length: int = 10,
    ) -> None:
        super().__init__(
            num_envs,
            agents,
            spaces.Box(0, 1, (size,)),
            spaces.Discrete(num_actions),
            episode_length=episode_length,
        )


class MultiDiscreteActions(_Random):
    """MultiDiscrete([3, 2]) actions; (0, 0) pays 1."""

    def __init__(
        self, num_envs: int = 1, agents: Agents = 4, nvec: Sequence[int] = (3, 2), episode_length: int = 10
    ) -> None:
        action_space = spaces.MultiDiscrete(list(nvec))
        super().__init__(num_envs, agents, spaces.Box(0, 1, (4,)), action_space, episode_length=episode_length)


class MatchObservation(_Random):
    """Each agent sees the one-hot of a random number below K and is paid 1 for acting that number, else 0."""

    def __init__(
        self,
        num_envs: int = 1,
        agents: Agents = 2,
        num_actions: int = 4,
        episode_length: int = 16,
        ends: Any = "truncated",
    ) -> None:
        super().__init__(
            num_envs, agents, spaces.Box(0, 1, (num_actions,)), spaces.Discrete(num_actions),
            episode_length=episode_length, ends=ends,
        )  # fmt: skip

    def _wanted(self) -> np.ndarray:
        return (self._uniforms[..., 0] * self._width).astype(np.int64)

    def _observe(self, envs: np.ndarray) -> Any:
        return np.eye(self._width, dtype=np.float32)[self._wanted()[:, envs]]

    def _judge(self, actions: Any) -> np.ndarray:
        return np.asarray(actions) == self._wanted()


class MatchTarget(_Random):
    """Each agent sees a point in [-1, 1]^size, and is paid minus the mean squared distance of its action."""

    def __init__(self, num_envs: int = 1, agents: Agents = 2, size: int = 1, episode_length: int = 16) -> None:
        super().__init__(
            num_envs,
            agents,
            spaces.Box(-1, 1, (size,)),
            spaces.Box(-1, 1, (size,)),
            episode_length=episode_length,
        )

    def _judge(self, actions: Any) -> np.ndarray:
        targets = _from_uniforms(spaces.Box(-1, 1, (self._width,)), self._uniforms)
        return -np.square(np.asarray(actions) - targets).mean(axis=-1)


class MixedSpaces(_Random):
    """Sees 3, 4, 5, 6 numbers; acts in Discrete(2), Discrete(3, start=1), MultiDiscrete([2, 3]), Box(2)."""

    def __init__(
        self, num_envs: int = 1, agents: Agents = 4, episode_length: int = 10, ends: Any = "truncated"
    ) -> None:
        count = agents if isinstance(agents, int) else len(agents)
        kinds: tuple[Any, ...] = (
            spaces.Discrete(2),
            spaces.Discrete(3, start=1),
            spaces.MultiDiscrete([2, 3]),
            spaces.Box(-1, 1, (2,)),
        )
        super().__init__(
            num_envs,
            agents,
            [spaces.Box(0, 1, (3 + i,)) for i in range(count)],
            [kinds[i % 4] for i in range(count)],
            episode_length=episode_length,
            ends=ends,
        )


OBSERVATION_KINDS: dict[str, Any] = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "dict": spaces.Dict({"position": spaces.Box(-1, 1, (2,)), "room": spaces.Discrete(3)}),
    "image": spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3))),
    "multi_binary": spaces.MultiBinary(4),
}


class ObservationKinds(_Random):
    """One agent for each kind of observation space named in `kinds`, see `OBSERVATION_KINDS`."""

    def __init__(
        self,
        num_envs: int = 1,
        kinds: Sequence[str] = ("discrete", "multi_discrete", "dict", "image"),
        episode_length: int = 10,
    ) -> None:
        seen = [OBSERVATION_KINDS[kind] for kind in kinds]
        agents = [f"{kind}_{i}" if kind in kinds[:i] else kind for i, kind in enumerate(kinds)]
        super().__init__(num_envs, agents, seen, spaces.Discrete(3), episode_length=episode_length)


class MaskedActions(_Random):
    """Agent 0 has exactly one legal action of four, drawn anew in each step; the others may do everything.

    Every agent sees {"observation": 3 numbers, "action_mask": int8 [4]} and is paid 1 in every step.

    Raises:
        ValueError: in `step_joint`, for an illegal action.
    """

    def __init__(
        self, num_envs: int = 1, agents: Agents = 2, episode_length: int = 10, ends: Any = "truncated"
    ) -> None:
        space = spaces.Dict(
            {"observation": spaces.Box(0, 1, (3,)), "action_mask": spaces.Box(0, 1, (4,), dtype=np.int8)}
        )
        super().__init__(num_envs, agents, space, spaces.Discrete(4), episode_length=episode_length, ends=ends)

    def _masks(self, envs: np.ndarray) -> np.ndarray:
        masks = np.ones((self.num_agents, len(envs), 4), dtype=np.int8)
        masks[0] = np.eye(4, dtype=np.int8)[(self._uniforms[0, envs, 0] * 4).astype(np.int64)]
        return masks

    def _observe(self, envs: np.ndarray) -> Any:
        masks, seen = self._masks(envs), self._uniforms[:, envs, :3].astype(np.float32)
        return {
            agent: {"observation": seen[i], "action_mask": masks[i]} for i, agent in enumerate(self.possible_agents)
        }

    def _judge(self, actions: Any) -> np.ndarray:
        everyone = np.arange(self.num_envs)
        masks = self._masks(everyone)
        for i, agent in enumerate(self.possible_agents):
            illegal = masks[i][everyone, np.asarray(actions[agent])] == 0
            if illegal.any():
                env = int(illegal.argmax())
                raise ValueError(
                    f"agent {agent!r} of environment {env} took action {actions[agent][env]}, which its mask "
                    f"{masks[i][env].tolist()} forbids"
                )
        return np.ones((self.num_agents, self.num_envs))


def _size(space: Any) -> int:
    """Uniforms that one element of `space` needs."""
    sizes: list[int] = []
    map_space(space, lambda s: sizes.append(int(np.prod(s.shape))))
    return sum(sizes)


def _from_uniforms(space: Any, uniforms: np.ndarray) -> Any:
    """Elements of `space` from uniforms [..., width], leading axes kept."""
    used = 0

    def draw(leaf: Any) -> np.ndarray:
        nonlocal used
        size = int(np.prod(leaf.shape))
        u = uniforms[..., used : used + size].reshape(*uniforms.shape[:-1], *leaf.shape)
        used += size
        if isinstance(leaf, spaces.Box):
            if np.dtype(leaf.dtype).kind == "f":
                return (leaf.low + u * (leaf.high - leaf.low)).astype(leaf.dtype)
            return np.floor(leaf.low + u * (leaf.high.astype(float) - leaf.low + 1)).astype(leaf.dtype)
        if isinstance(leaf, spaces.MultiBinary):
            return (u < 0.5).astype(leaf.dtype)
        count = leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec
        return (np.floor(u * count) + leaf.start).astype(leaf.dtype)

    return map_space(space, draw)
