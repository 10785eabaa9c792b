"""The bars of `benchmarks/learning.py`: one recipe, seeds fixed beforehand. All ten runs take 7 minutes on one core."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow_core


@pytest.fixture(scope="module")
def benchmark():
    folder = Path(__file__).parents[2] / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return runpy.run_path(str(folder / "learning.py"))


def run(benchmark, task, seed):
    outcome = benchmark["learn"](task, seed)
    assert outcome.score >= outcome.bar, outcome
    assert outcome.env_steps <= benchmark["TASKS"][task].steps
    return outcome


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("scenario", ["minimal_specialization", "rest_trap"])
def test_closes_the_gap_of_the_bucket_brigade(ray_session, benchmark, scenario, seed):
    """200,000 env steps with the redundancy penalty on; about 45 s."""
    outcome = run(benchmark, scenario, seed)
    assert outcome.bar == 0.9 and outcome.redundancy == 0.1
    assert outcome.training_seconds < 240


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_balances_the_cart_pole(ray_session, benchmark, seed):
    """150,000 env steps; about 22 s."""
    assert run(benchmark, "cartpole", seed).bar == 475


def test_swings_up_the_pendulum(ray_session, benchmark):
    """300,000 env steps; about 35 s."""
    assert run(benchmark, "pendulum", 0).bar == -400
