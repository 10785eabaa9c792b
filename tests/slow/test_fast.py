"""The bars of `benchmarks/pettingzoo_tasks.py` and `redundancy.py`, one seed each; 6 minutes on two cores."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow_fast, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def benchmark():
    """Imports a benchmark by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module


def test_three_agents_with_one_module_spread_over_the_landmarks(ray_session, benchmark):
    """300,000 env steps from two remote runners; about 100 s."""
    outcome = benchmark("pettingzoo_tasks").learn("simple_spread", seed=0)
    assert outcome.env_steps <= 300_000
    assert -28 < outcome.random < -25
    assert outcome.score >= outcome.bar == -20.0, outcome


def test_speaker_and_listener_learn_with_modules_of_their_own(ray_session, benchmark):
    """200,000 env steps from two remote runners; about 60 s."""
    outcome = benchmark("pettingzoo_tasks").learn("simple_speaker_listener", seed=0)
    assert outcome.env_steps <= 200_000
    assert outcome.random < -70
    assert outcome.score >= outcome.bar == -36.0, outcome


def test_redundancy_penalty_lowers_the_correlation_and_keeps_the_score(ray_session, benchmark):
    """Two runs of 200,000 env steps; about 100 s."""
    redundancy = benchmark("redundancy")
    without, with_penalty = (redundancy.study(weight, seed=0) for weight in (0.0, 1.0))
    assert without.correlation > 100 / redundancy.ROWS, "nothing to lower"
    assert with_penalty.correlation <= without.correlation / 3
    assert min(without.gap, with_penalty.gap) >= 0.9
    assert with_penalty.feature_std > 0.1, "features that have died correlate with nothing"


@pytest.mark.parametrize(
    ("gap", "correlation", "passes"), [(0.95, 0.02, True), (0.85, 0.02, False), (0.95, 0.04, False)]
)
def test_a_seed_counts_only_with_both_parts_of_the_bar(benchmark, gap, correlation, passes):
    redundancy = benchmark("redundancy")
    row = {"seed": "0", "sampled": "1", "own": "1", "feature_std": "1", "lost": "1", "lost_share": "1"}
    alone = row | {"weight": "1", "gap": str(gap), "correlation": str(correlation)}
    base = row | {"weight": "0", "gap": "0.5", "correlation": "0.09"}
    assert redundancy.seeds_that_pass([alone, base]) == {1.0: (int(passes), 1)}
    assert redundancy.show([alone, base]) is passes
    assert redundancy.show([alone]) is None


def test_rows_of_the_same_case_are_replaced(benchmark, tmp_path):
    runs = benchmark("common.runs")
    path = tmp_path / "found.csv"
    runs.add_rows(path, [{"weight": 10.0, "seed": 0, "gap": 0.1}, {"weight": 2.0, "seed": 0, "gap": 0.2}], ["weight"])
    runs.add_rows(path, [{"weight": 10.0, "seed": 1, "gap": 0.3}], ["weight"])
    assert path.read_text().split() == ["weight,seed,gap", "2,0,0.2", "10,1,0.3"]
