"""What the processes of an algorithm take of a Ray cluster."""

from __future__ import annotations

import logging
from typing import Any

import ray

logger = logging.getLogger(__name__)


def needed_cpus(config: Any) -> float:
    """CPUs of runners, evaluation runners and learners in processes of their own."""
    runners = config.num_env_runners + config.evaluation_num_env_runners
    return float(runners * config.num_cpus_per_env_runner + config.num_learners * cpus_of_a_learner(config))


def cpus_of_a_learner(config: Any) -> float:
    """As RLlib counts them: with "auto" one, or none beside a GPU."""
    if config.num_cpus_per_learner == "auto":
        return 0.0 if config.num_gpus_per_learner else 1.0
    return float(config.num_cpus_per_learner)


def warn_of_too_few(config: Any) -> None:
    """Says so where the cluster has less than all processes together need: Ray then waits for machines that join."""
    has = ray.cluster_resources() if ray.is_initialized() else {}
    needed = {"CPU": needed_cpus(config), "GPU": float(config.num_learners * config.num_gpus_per_learner)}
    for kind, count in needed.items():
        if has and count > has.get(kind, 0.0):
            logger.warning(
                "runners and learners need %g %ss and the cluster has %g: they start when machines join, and until "
                "then nothing happens. Take fewer (num_env_runners, num_learners), let each take less "
                "(num_cpus_per_env_runner, num_cpus_per_learner), or start Ray with more (ray.init(num_cpus=...)).",
                count,
                kind,
                has.get(kind, 0.0),
            )
