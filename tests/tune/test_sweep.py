"""Sweeps of two trials, in processes of their own: every scheduler, every search, stopping and going on."""

import csv
import io
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tests.cli.helpers import thrust_rllib
from tests.tune.helpers import COUPLING, ENV, LR, sweep, tiny
from thrust_rllib.command_line.sweep_view import LiveSweepView
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweep_results import SweepResults, TrialRow, read_curves
from thrust_rllib.sweeps import Sweep
from thrust_rllib.trained_team import load_team

pytestmark = pytest.mark.timeout(120)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- the command, a grid and ASHA ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asha(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("asha") / "sweep"
    code, out, err = thrust_rllib(
        "sweep", ENV, "--lr", "1e-9,1e-2", "--redundancy", "0.1", "--batch", "64", "--minibatch", "32",
        "--envs-per-runner", "4", "--steps", "1920", "--search", "grid", "--scheduler", "asha", "--concurrent", "1",
        "--seed", "0", "--output", folder,
    )  # fmt: skip
    return folder, code, out, err


def test_the_command_says_what_came_of_it(asha):
    folder, code, out, err = asha
    assert (code, err) == (0, "")
    assert "2 trials of 1,920 steps, scheduler asha, search grid, 1 at a time, seed 0; lr 1e-09,0.01" in out
    assert "trial 1/2 running  lr 1.0e-09" in out and "trial 2/2 finished  score" in out
    for place in ("trials.csv", "sweep.png", "best (2: lr 0.01)", f"thrust-rllib evaluate {folder}/best"):
        assert place in out
    assert "\x1b" not in out and "Tune" not in out and "ray" not in out.replace(str(folder), "").lower()


def test_the_folder_has_the_table_the_figure_and_the_best_team(asha):
    folder = asha[0]
    table = rows(folder / "trials.csv")
    assert [row["trial"] for row in table] == ["2", "1"] and [float(row["lr"]) for row in table] == [1e-2, 1e-9]
    assert float(table[0]["score"]) > float(table[1]["score"])
    assert (folder / "sweep.png").stat().st_size > 10_000
    best = json.loads((folder / "best.json").read_text())
    assert best["parameters"] == {"lr": 0.01} and best["score"] == float(table[0]["score"])
    assert best["env_steps"] == 1920 and best["iteration"] == 30
    steps = [steps for steps, _ in read_curves(folder)[table[0]["folder"]]]
    assert steps == list(range(64, 1921, 64))


def test_the_best_checkpoint_plays_as_well_as_was_reported(asha):
    folder = asha[0]
    table = rows(folder / "trials.csv")
    best, worst = (
        play_episodes(load_team(path), 200, explore=True).team_returns.mean()
        for path in (folder / "best", folder / table[1]["checkpoint"])
    )
    # The score is the mean of the latest 100 episodes, the older of them by less trained networks; 32 is possible.
    assert float(table[0]["score"]) - 0.5 < best <= 32
    assert abs(worst - float(table[1]["score"])) < 2  # it has learned nothing: the same policy all the time
    assert worst < 12 < 28 < best


def test_a_sweep_that_is_over_need_not_be_resumed(asha):
    folder = asha[0]
    (folder / "trials.csv").unlink()
    code, out, err = thrust_rllib("sweep", "--resume", folder)
    assert code == 0 and "running" not in out and err == ""
    assert len(rows(folder / "trials.csv")) == 2
    code, _, err = thrust_rllib("sweep", "--resume", folder, "--trials", "3")
    assert code == 2 and "trials cannot be given beside it" in err


def test_a_folder_of_a_sweep_may_be_moved(asha, tmp_path):
    shutil.copytree(asha[0], tmp_path / "moved")
    moved = SweepResults.read(tmp_path / "moved")
    assert moved.best.checkpoint.parents[2] == tmp_path / "moved" and moved.best.values == {"lr": 0.01}
    assert not moved.unfinished and not moved.failed


# --- Optuna -------------------------------------------------------------------------------------------------------


def test_optuna_draws_from_the_space(ray_session, tmp_path):
    seen = []
    results = sweep(search="optuna", trials=3, concurrent=1).run(tmp_path / "sweep", seen.append)
    assert [row.state for row in results.rows] == ["finished"] * 3
    assert len({row.values["lr"] for row in results.rows}) == 3
    for row in results.rows:
        assert 1e-4 <= row.values["lr"] <= 1e-2 and row.values["redundancy"] in COUPLING.choices
        assert row.env_steps == 128 and math.isfinite(row.score)
    assert max(sum(row.state == "running" for row in rows) for rows in seen) == 1
    assert results.best.score == max(row.score for row in results.rows)


# --- stopped and resumed ------------------------------------------------------------------------------------------


def test_a_stopped_sweep_keeps_what_is_done_and_goes_on(ray_session, tmp_path):
    folder = tmp_path / "sweep"

    def stop(rows):
        if len(rows) == 2 and rows[1].iteration >= 3 and not signalled:
            signalled.append(rows[1].iteration)
            signal.raise_signal(signal.SIGINT)

    signalled = []
    handler = signal.getsignal(signal.SIGINT)
    stopped = sweep(concurrent=1, steps=32 * 30).run(folder, stop)
    signal.signal(signal.SIGINT, handler)
    assert signalled and stopped.unfinished == 1 and stopped.rows[0].state == "finished"
    halfway = stopped.rows[1]
    assert halfway.checkpoint is not None and 2 <= halfway.iteration < 30
    assert (folder / "best.json").exists()

    def logged():
        return [int(r["training_iteration"]) for r in rows(folder / "curves.csv") if r["trial"] == halfway.trial_id]

    before = len(logged())
    resumed = Sweep.resume(folder)
    assert not resumed.unfinished and [row.env_steps for row in resumed.rows] == [960, 960]
    assert resumed.rows[0] == stopped.rows[0]
    assert resumed.rows[1].values == halfway.values
    assert logged()[before] == halfway.iteration + 1  # it went on from its checkpoint, not from the start
    assert [steps for steps, _ in resumed.rows[1].curve] == list(range(32, 961, 32))


def test_what_cannot_be_resumed(tmp_path):
    code, _, err = thrust_rllib("sweep", "--resume", tmp_path)
    assert code == 2 and "it has no readable sweep.json" in err
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "trials").mkdir()
    code, _, err = thrust_rllib("sweep", "--resume", tmp_path)
    assert code == 2 and "ended before its first trial" in err


@pytest.mark.slow_checkpoints
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_which_says_how_to_go_on(tmp_path, number):
    folder = tmp_path / "sweep"
    options = ["--lr", "1e-4:1e-2", "--batch", "64", "--minibatch", "32", "--trials", "3", "--steps", "64000"]
    command = [sys.executable, "-m", "thrust_rllib", "sweep", ENV, *options, "--concurrent", "1", "-o", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        deadline = time.monotonic() + 90
        # The checkpoint of iteration 10 is known to the sweep by then.
        while not (folder / "curves.csv").exists() or len(rows(folder / "curves.csv")) < 15:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert f"3 trials are left; resume with thrust-rllib sweep --resume {folder}" in err and "Traceback" not in err
    assert "best trial" in out and (folder / "best.json").exists()
    assert SweepResults.read(folder).unfinished == 3


# --- trials that fail ---------------------------------------------------------------------------------------------


@pytest.mark.slow_checkpoints
def test_a_trial_that_fails_is_told_and_the_others_go_on(ray_session, tmp_path):
    folder = tmp_path / "sweep"
    config = tiny().environment("debug/faulty").training(cross_agent_losses={}, cross_agent_coeffs={})
    fault = Parameter("fault", ("env_config", "fault"), choices=("raise", "none"))
    failing = sweep(config=config, parameters=(fault,), search="grid", trials=None, concurrent=1)
    results = failing.run(folder)
    assert [row.state for row in results.rows] == ["failed", "finished"] and not results.unfinished
    assert "the simulator lost its connection" in results.failed[0].error
    assert results.best.number == 2 and math.isnan(results.rows[0].score)
    code, out, err = thrust_rllib("sweep", "--resume", folder)  # which tries it again
    assert code == 1 and "trial 1/2 failed" in out
    assert "trial 1 failed: " in err and "the simulator lost its connection" in err and "error.txt" in err


# --- without training ---------------------------------------------------------------------------------------------


def made_up(rows):
    return SweepResults("folder", (LR,), len(rows), 64, tuple(rows))


def test_ranks_are_by_score_and_the_best_has_a_checkpoint(tmp_path):
    def row(number, score, checkpoint=None, state="finished"):
        return TrialRow(number, str(number), state, {"lr": 1.0}, score=score, checkpoint=checkpoint)

    results = made_up([row(1, 1.0, tmp_path), row(2, math.nan), row(3, 3.0), row(4, 2.0, tmp_path), row(5, math.nan)])
    assert [r.number for r in results.ranked] == [3, 4, 1, 2, 5]
    assert results.best.number == 4 and results.unfinished == 0
    assert made_up([row(1, math.nan, tmp_path)]).best is None
    waiting = made_up([row(1, 1.0, state="paused"), row(2, 1.0, state="failed"), row(3, 1.0, state="stopped")])
    assert waiting.unfinished == 1 and [r.number for r in waiting.failed] == [2]


def test_the_live_table_shows_who_runs_and_who_is_best_where_there_is_little_room():
    def row(number, state, score):
        return TrialRow(number, str(number), state, {"lr": 1e-3}, env_steps=64, score=score)

    console = Console(width=80, height=10, file=io.StringIO(), force_terminal=False)
    view = LiveSweepView(console, 9, 128, "runs/mine")
    view.update([row(k, "finished", float(k)) for k in range(1, 8)] + [row(8, "running", math.nan)])
    console.print(view)
    text = console.file.getvalue()
    assert "runs/mine   7 of 9 trials over, 1 running" in text and "… 4 more" in text
    assert [line.split()[0] for line in text.splitlines() if "64 / 128" in line] == ["5", "6", "7", "8"]


def test_curves_count_repeated_iterations_once(tmp_path):
    (tmp_path / "curves.csv").write_text(
        "trial,training_iteration,num_env_steps_sampled_lifetime,env_runners/episode_return_mean,lr\n"
        "a,1,64.0,nan,1\nb,1,64,5,1\na,2,128,1.0,1\na,3,192,2.0,1\na,2,128,1.5,1\na,3,192,2.5,1\n"
    )
    curves = read_curves(tmp_path)
    assert curves["a"][1:] == ((128, 1.5), (192, 2.5)) and math.isnan(curves["a"][0][1])
    assert curves["b"] == ((64, 5.0),) and read_curves(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needed: an environment"),
        (["climbing"], "nothing is varied"),
        (["climbing", "--lr", "1e-2:1e-4"], "needed: finite, the smaller first"),
        (["climbing", "--minibatch", "64:128"], "needed: a list of values"),
        (["climbing", "--minibatch", "64,4096"], "minibatch_size=4096 is larger than the batch"),
        (["climbin", "--lr", "1e-4,1e-2"], "did you mean 'climbing'?"),
        (["climbing", "--lr", "1e-4,1e-2", "--search", "optuna", "--scheduler", "pbt"], "not optuna"),
        (["--resume", "nowhere"], "is no folder of a sweep"),
    ],
)
def test_mistakes_end_with_one_line_and_write_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = thrust_rllib("sweep", *arguments)
    assert code == 2
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
