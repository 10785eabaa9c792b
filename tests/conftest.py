"""Shared by all tests: one thread, the audit of joint rows, and one Ray for those that ask for it."""

import logging
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["THRUST_RLLIB_AUDIT"] = "1"  # Ray's processes take it over


@pytest.fixture(scope="session")
def ray_session():
    """Ray with 4 logical CPUs, started at the first test that needs it and stopped at the end.

    Algorithms start Ray themselves where it is missing (only those with remote runners or learners need it);
    asking for this fixture first gives them this one.
    """
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        ignore_reinit_error=True,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def build(ray_session):
    """Builds algorithms from copies of configurations, and stops them after the test."""
    built = []

    def make(config):
        built.append(config.copy(copy_frozen=False).build_algo())
        return built[-1]

    yield make
    for algo in built:
        algo.stop()
