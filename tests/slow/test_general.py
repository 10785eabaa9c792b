"""The bar of `benchmarks/general_door.py`: agents that end before others, one seed by each way to sample."""

import importlib
from pathlib import Path

import pytest

from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.episode_runner import JointEpisodeRunner

pytestmark = [pytest.mark.slow_general, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("general_door")


@pytest.mark.parametrize(("side", "runner"), [("arrays", JointEnvRunner), ("episodes", JointEpisodeRunner)])
def test_two_cart_poles_are_balanced_though_one_falls_before_the_other(ray_session, benchmark, side, runner):
    """300,000 env steps; 75 s by arrays and 170 s by episodes on a busy machine."""
    config = benchmark.SIDES[side](benchmark.TASKS["cartpole"], benchmark.ENTROPY, benchmark.STANDARDIZE)
    config.validate()
    assert config.env_runner_cls is runner
    outcome = benchmark.learn("cartpole", side, seed=0)
    assert outcome.env_steps <= 300_000
    assert outcome.curve[0][1] < 60, "there was nothing to learn"
    assert len(outcome.returns) == 2
    assert outcome.score == min(outcome.returns) >= outcome.bar == 400, outcome
