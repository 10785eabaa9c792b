"""Whole algorithms with everything that only learners have."""

from __future__ import annotations

from typing import Any

from tests.support import tiny_config
from thrust_rllib import AuxiliaryTarget, Constraint, JointPPOConfig

TARGETS = (AuxiliaryTarget("covered", weight=0.5), AuxiliaryTarget("collisions", "huber"))
LIMIT = Constraint("collisions", 0.01, "lagrangian", rate=5.0, initial=0.25)
GRU = {"cell": "gru", "cell_size": 5, "max_seq_len": 8}


def spread(
    cell: bool = False, runners: int = 0, learners: int = 0, plain: bool = False, **options: Any
) -> JointPPOConfig:
    """Three agents that cover landmarks.

    Args:
        cell: the critic has a memory.
        runners: remote ones.
        learners: remote ones.
        plain: nothing that only a learner has, and no constraint.
        **options: of `tiny_config`.
    """
    if not plain:
        network = {"fcnet_hiddens": [8], **(GRU if cell else {})}
        asked = {"critic": "central", "credit": "agent", "critic_config": network}
        options = {**asked, "auxiliary_targets": TARGETS, "constraints": (LIMIT,), **options}
    options = {"minibatch_size": 16 // max(learners, 1), "lr": 1e-3, "diversity_interval": 2, **options}
    config = tiny_config(
        "spread",
        {"max_cycles": 7},
        runners={"num_env_runners": runners, "num_cpus_per_env_runner": 0.5},
        train_batch_size_per_learner=64 // max(learners, 1),
        **options,
    )
    return config.learners(num_learners=learners, num_cpus_per_learner=0.5)
