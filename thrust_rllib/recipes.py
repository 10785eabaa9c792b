"""The settings that the command line, the demo and the examples start from, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig


def recipe(config: JointPPOConfig, total_steps: int | None = None) -> JointPPOConfig:
    """Sets, on top of `JointPPOConfig`'s defaults, what learns well out of the box; returns the same object.

    16 environments per runner, every minibatch of every epoch, normalised observations and a learning rate of 1e-3.
    `benchmarks/learning.py` measures it: two scenarios of the bucket brigade, CartPole and Pendulum, with no other
    setting. Call it first: every later `.training(…)` or `.env_runners(…)` has the last word.

    Args:
        config: is changed.
        total_steps: environment steps that are going to be sampled; the learning rate then falls linearly to 0, which
            keeps a solved task solved. None keeps it constant.
    """
    return config.env_runners(num_envs_per_env_runner=16, normalize_observations=True).training(
        lr=1e-3 if total_steps is None else [[0, 1e-3], [total_steps, 0.0]], iterate_all_minibatches=True
    )
