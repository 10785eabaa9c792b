"""The bars of `benchmarks/recurrent.py`, one seed each; 4 minutes on two cores."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow_recurrent, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("recurrent")


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_cue_is_remembered_for_32_steps(ray_session, benchmark, cell):
    """300,000 env steps; 50 to 90 s on a busy machine."""
    outcome = benchmark.learn("recall_32", cell, seed=0)
    assert outcome.env_steps <= 300_000 and outcome.training_seconds < 240
    assert outcome.curve[0][1] < 0.5, "there was nothing to learn"
    assert outcome.score >= outcome.bar == 0.95, outcome


def test_without_a_memory_success_stays_at_chance(ray_session, benchmark):
    """150,000 env steps; about 15 s."""
    outcome = benchmark.learn("recall_8", "mlp", seed=0)
    assert outcome.bar == 0.25 and abs(outcome.score - 0.25) < 0.05, outcome


def test_who_has_seen_nothing_acts_on_what_the_other_has_told(ray_session, benchmark):
    """150,000 env steps; about 40 s."""
    outcome = benchmark.learn("relay", "lstm", seed=0)
    assert outcome.curve[0][1] < 0.7, "there was nothing to learn"
    assert outcome.score >= outcome.bar == 0.95, outcome


def test_a_pole_is_balanced_without_seeing_its_velocity(ray_session, benchmark):
    """300,000 env steps; about 60 s."""
    outcome = benchmark.learn("stateless_cartpole", "lstm", seed=0)
    assert outcome.env_steps <= 500_000
    assert outcome.curve[0][1] < 60, "there was nothing to learn"
    assert outcome.score >= outcome.bar == 450.0, outcome
