"""Reference policies for Bucket Brigade, and their return, which places every learned number on a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrust_rllib.envs.bucket_brigade import BucketBrigade
from thrust_rllib.envs.bucket_brigade_rules import BURNING, REST, WORK

Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def houses_from_observations(observations: np.ndarray, num_agents: int) -> np.ndarray:
    """The houses that the (one-hot) observations [N, E, D] show, int [E, H]; D = 3H + 4N + 1."""
    num_houses = (observations.shape[-1] - 4 * num_agents - 1) // 3
    one_hot = observations[0, :, : 3 * num_houses].reshape(len(observations[0]), num_houses, 3)
    return one_hot.argmax(axis=-1)


def random_policy(houses: np.ndarray, generator: np.random.Generator, num_agents: int = 4) -> np.ndarray:
    """Uniform actions, int [N, E, 3], for houses [E, H]."""
    num_envs, num_houses = houses.shape
    return generator.integers((num_houses, 2, 2), size=(num_agents, num_envs, 3))


def specialist_policy(
    houses: np.ndarray, generator: np.random.Generator | None = None, num_agents: int = 4
) -> np.ndarray:
    """Work at the owned burning house with the lowest index (signal 1), else rest at house 0 (signal 0).

    Args:
        houses: int [E, H].
        generator: not used; every policy has it.
        num_agents: N.

    Returns:
        Actions, int [N, E, 3].
    """
    num_envs, num_houses = houses.shape
    owns = np.arange(num_houses) % num_agents == np.arange(num_agents)[:, None]
    own_burning = owns[:, None] & (houses == BURNING)  # [N, E, H]
    works = own_burning.any(axis=-1)
    target = own_burning.argmax(axis=-1)  # 0 where nothing burns
    return np.stack([target, np.where(works, WORK, REST), works], axis=-1).astype(np.int64)


POLICIES: dict[str, Callable[..., np.ndarray]] = {"random": random_policy, "specialist": specialist_policy}


@dataclass(frozen=True)
class Calibration:
    """Team reward per step (sum over agents) of a policy.

    Args:
        mean: over episodes of the episode's mean.
        standard_error: of `mean`.
        episodes: how many.
        mean_length: steps per episode.
    """

    mean: float
    standard_error: float
    episodes: int
    mean_length: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean."""
        return self.mean - 1.96 * self.standard_error, self.mean + 1.96 * self.standard_error


def calibrate(
    scenario: str,
    policy: str | Policy,
    episodes: int = 1000,
    seed: int = 0,
    batch: int = 1000,
    **overrides: Any,
) -> Calibration:
    """Plays whole episodes of a policy.

    Each environment plays one episode, so that short episodes do not count more often than long ones.

    Args:
        scenario: a name in `SCENARIOS`.
        policy: "random", "specialist", or a function (houses [E, H], generator) -> actions [N, E, 3].
        episodes: how many, at least 2.
        seed: of environments and policy.
        batch: environments at a time.
        **overrides: further settings of `BucketBrigade`.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}; an interval needs at least 2")
    generator = np.random.default_rng([seed, 1])
    means: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for first in range(0, episodes, batch):
        env = BucketBrigade(min(batch, episodes - first), scenario, **overrides)
        play = POLICIES[policy] if isinstance(policy, str) else policy
        extra = {"num_agents": env.num_agents} if isinstance(policy, str) else {}
        env.reset_joint(np.random.SeedSequence([seed, first]).generate_state(env.num_envs).tolist())
        total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=np.int64)
        running = np.ones(env.num_envs, dtype=bool)
        while running.any():
            result = env.step_joint(play(env.houses, generator, **extra))
            total += np.where(running, result.rewards.sum(axis=0), 0)
            length += running
            running &= ~result.terminated[0]
        means.append(total / length)
        lengths.append(length)
    values = np.concatenate(means)
    return Calibration(
        mean=float(values.mean()),
        standard_error=float(values.std(ddof=1) / np.sqrt(episodes)),
        episodes=episodes,
        mean_length=float(np.concatenate(lengths).mean()),
    )


def gap_closed(value: float, random: float, specialist: float) -> float:
    """(x - random) / (specialist - random): 0 for the random policy, 1 for the specialist."""
    return (value - random) / (specialist - random)
