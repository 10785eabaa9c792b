"""How a number of episodes is spread over environments."""

from __future__ import annotations

import numpy as np


def episodes_per_environment(num_episodes: int, num_envs: int) -> np.ndarray:
    """How many episodes each environment plays, int [E]: equal shares, the first ones take what is left over.

    A share that is fixed beforehand keeps short episodes from being counted more often than long ones, which happens
    where playing stops as soon as `num_episodes` have ended anywhere.

    Args:
        num_episodes: n, at least 0; the shares add up to it.
        num_envs: E, at least 1.
    """
    share = np.full(num_envs, num_episodes // num_envs)
    share[: num_episodes % num_envs] += 1
    return share
