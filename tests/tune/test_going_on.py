"""Sweeps that were interrupted: what had not begun is drawn as if nothing had happened."""

import csv
import shutil
import signal

import pytest

from tests.tune.helpers import sweep
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweeps import Sweep

pytestmark = pytest.mark.timeout(300)


def stopped(asked, folder, when):
    """Runs a sweep and sends Ctrl-C once, as soon as `when(rows)`."""
    sent = []

    def watch(rows):
        if not sent and when(rows):
            sent.append(True)
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    try:
        results = asked.run(folder, watch)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sent
    return results


def curves(folder):
    with (folder / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def values(results):
    return [(row.values["lr"], row.values["redundancy"]) for row in results.rows]


@pytest.mark.slow_checkpoints
@pytest.mark.parametrize("search", ["random", "optuna"])
def test_trials_that_had_not_been_drawn_are_those_of_a_sweep_without_a_stop(ray_session, tmp_path, search):
    asked = sweep(concurrent=1, steps=64, trials=4, search=search)
    whole = asked.run(tmp_path / "whole")
    before = stopped(asked, tmp_path / "stopped", lambda rows: len(rows) == 2)
    assert before.unfinished >= 2 and len(before.rows) == 2

    shutil.move(tmp_path / "stopped", tmp_path / "moved")
    with pytest.raises(ValueError, match="was begun in .*/stopped, where .* 2 trials .*move it back there"):
        Sweep.resume(tmp_path / "moved")
    (tmp_path / "stopped").symlink_to(tmp_path / "moved")

    resumed = Sweep.resume(tmp_path / "moved")
    assert [row.state for row in resumed.rows] == ["finished"] * 4
    assert values(resumed) == values(whole) and len(set(values(whole))) == 4
    assert [row.score for row in resumed.rows] == [row.score for row in whole.rows]


@pytest.mark.slow_checkpoints
def test_a_population_goes_on_with_the_parameters_it_had(ray_session, tmp_path):
    lr = Parameter("lr", ("lr",), choices=(1e-9, 1e-2, 2e-2))
    asked = sweep(parameters=(lr,), scheduler="pbt", search="grid", trials=None, steps=32 * 20)
    folder = tmp_path / "sweep"
    drawn = dict(enumerate(lr.choices, 1))

    def changed(rows):
        return [row for row in rows if row.values["lr"] != drawn[row.number]]

    # A trial that has taken over another one is saved as such when it runs again.
    before = stopped(asked, folder, lambda rows: any(row.state == "running" for row in changed(rows)))
    assert before.unfinished and changed(before.rows)
    logged = len(curves(folder))
    resumed = Sweep.resume(folder)
    assert not resumed.unfinished and not resumed.failed
    after = {}
    for row in curves(folder)[logged:]:
        after.setdefault(row["trial"], float(row["lr"]))
    assert after == {row.trial_id: row.values["lr"] for row in before.rows}
