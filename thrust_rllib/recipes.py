"""The settings that the command line, the demo and the examples start from, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig


def recipe(config: JointPPOConfig) -> JointPPOConfig:
    """Sets, on top of `JointPPOConfig`'s defaults, what learns well out of the box; returns the same object.

    Call it first: every later `.training(…)` or `.env_runners(…)` has the last word.
    """
    return config.env_runners(num_envs_per_env_runner=16).training(iterate_all_minibatches=True)
