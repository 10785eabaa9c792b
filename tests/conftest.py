"""Shared by all tests: one thread, and one Ray for those that ask for it."""

import logging

import pytest
import torch

torch.set_num_threads(1)


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
