"""Making the algorithm known to Ray by name."""

from __future__ import annotations

from ray.tune import register_trainable

from thrust_rllib.algorithm import JointPPO


def register() -> None:
    """After this, `tune.Tuner("JointPPO", …)` and `JointPPOConfig().algo_class` as a name find the algorithm."""
    register_trainable("JointPPO", JointPPO)
