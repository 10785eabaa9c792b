"""What breaks while `train` runs: environments, processes, the disk. What is kept, what is said, and how it goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import TINY, checkpoints, events, read_json, rows, thrust_rllib
from thrust_rllib.command_line import result_log, train
from thrust_rllib.command_line.run_folder import RunFolder

ENV = "tests.cli.breaking_env:Breaking"
ONE_ENV = [*TINY, "--envs-per-runner", "1", "--eval-episodes", "0"]  # 64 steps an iteration, of all runners together


def iterations(folder):
    return [int(float(row["training_iteration"])) for row in rows(folder)]


def breaks(how, at, marker=None):
    options = ["-e", f"how={how}", "-e", f"at={at}"]
    return options if marker is None else [*options, "-e", f"marker={marker}"]


# ---------------------------------------------------------------------------------------------------- environments


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runners", [0, 1])
def test_an_environment_that_raises_once(ray_session, tmp_path, runners):
    """Step 150 is in the third iteration; its error comes while sampling, so that the first two are kept."""
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", runners, "--iterations", 4, *breaks("raise", 150, tmp_path / "marker"),
        "--output", folder,
    )  # fmt: skip
    assert code == 1 and "Traceback" not in err
    assert "environment 'tests.cli.breaking_env:Breaking' failed in step" in err
    assert f"(runner {runners}): " in err and "OSError: the simulator lost its connection" in err
    assert "failed: 2 iterations" in out and f"thrust-rllib train --resume {folder}\n" in out
    assert checkpoints(folder) == ["iteration_000002"] and iterations(folder) == [1, 2]
    code, out, err = thrust_rllib("train", "--resume", folder)
    assert code == 0, err
    assert iterations(folder) == [1, 2, 3, 4] and "finished: 4 iterations" in out


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_an_environment_that_always_raises(ray_session, tmp_path):
    folder = tmp_path / "run"
    arguments = ["train", ENV, *ONE_ENV, "--runners", 1, "--iterations", 4]
    code, out, err = thrust_rllib(*arguments, *breaks("raise", 3), "--output", tmp_path / "first")
    assert code == 1 and "the simulator lost its connection" in err and "failed in the first iteration" in out
    assert "none was written" in out and "--resume" not in out
    code, _, err = thrust_rllib(*arguments, *breaks("raise", 100), "--output", folder)
    assert code == 1 and checkpoints(folder) == ["iteration_000001"]
    for _ in range(2):  # a new environment lives for 100 steps, too
        code, out, err = thrust_rllib("train", "--resume", folder)
        assert code == 1 and "the simulator lost its connection" in err
    assert checkpoints(folder) == ["iteration_000001", "iteration_000002", "iteration_000003"]
    assert iterations(folder) == [1, 2, 3]


@pytest.mark.timeout(120)
def test_an_environment_that_no_runner_can_build(ray_session, tmp_path):
    code, _, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", 1, "-e", f"alone_in={os.getpid()}", "--output", tmp_path / "run"
    )
    assert code in (1, 2) and "there is no licence for another process" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_an_environment_that_hangs_in_one_of_two_runners(ray_session, tmp_path):
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", 2, "--iterations", 3, *breaks("hang", 50, tmp_path / "marker"),
        "--set", "sample_timeout_s=3", "--output", folder,
    )  # fmt: skip
    assert code == 0, err
    assert iterations(folder) == [1, 2, 3] and checkpoints(folder) == ["iteration_000003"]
    assert "warning: 1 of 2 runners did not answer within sample_timeout_s=3 seconds; the others go on" in out
    assert "the state of some training runners is not in the checkpoint" in out


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_an_environment_that_hangs_everywhere(ray_session, tmp_path):
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", 1, "--iterations", 9, *breaks("hang", 100, tmp_path / "marker"),
        "--set", "sample_timeout_s=3", "--output", folder,
    )  # fmt: skip
    assert code == 1
    assert "no runner answered within sample_timeout_s=3 seconds" in err and "raise .env_runners(sample_time" in err
    assert f"thrust-rllib train --resume {folder}\n" in out
    reached = iterations(folder)
    assert reached == list(range(1, len(reached) + 1)) and checkpoints(folder) == [f"iteration_{reached[-1]:06}"]
    code, _, err = thrust_rllib("train", "--resume", folder)
    assert code == 0 and iterations(folder) == list(range(1, 10)), err


# ------------------------------------------------------------------------------------------------------- processes


@pytest.fixture
def between_iterations(monkeypatch):
    """Lets a test do something with the algorithm behind an iteration: {iteration: function}."""
    actions, built, build, log = {}, [], train.build, RunFolder.log

    def remembered(config):
        context = build(config)
        enter = context.__enter__

        class Remembering:
            def __enter__(self):
                built.append(enter())
                return built[-1]

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Remembering()

    def acting_log(folder, result):
        log(folder, result)
        actions.pop(result["training_iteration"], lambda algo: None)(built[-1])

    monkeypatch.setattr(train, "build", remembered)
    monkeypatch.setattr(RunFolder, "log", acting_log)
    return actions


def kill(group, number):
    def now(algo):
        ask = getattr(algo, group)
        called = (
            ask.foreach_learner(_pid)
            if group == "learner_group"
            else ask.foreach_env_runner(_pid, local_env_runner=False)
        )
        pids = [r.get() if hasattr(r, "get") else r for r in called]
        os.kill(pids[number], signal.SIGKILL)

    return now


def _pid(_):
    return os.getpid()


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
@pytest.mark.parametrize("runners", [1, 2])
def test_a_killed_runner_is_started_again(between_iterations, ray_session, tmp_path, runners):
    between_iterations[2] = kill("env_runner_group", 0)
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", runners, "--iterations", 8, "--checkpoint-every", 4, "--output", folder
    )
    assert code == 0, out + err
    assert iterations(folder) == list(range(1, 9)) and not between_iterations
    assert checkpoints(folder) == ["iteration_000004", "iteration_000008"]


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_a_runner_that_dies_while_it_samples(ray_session, tmp_path):
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", 2, "--iterations", 6, *breaks("exit", 40, tmp_path / "marker"),
        "--output", folder,
    )  # fmt: skip
    assert code == 0, out + err
    assert (tmp_path / "marker").exists() and iterations(folder) == list(range(1, 7))


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_a_killed_learner(between_iterations, ray_session, tmp_path):
    between_iterations[3] = kill("learner_group", 1)
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--learners", 2, "--iterations", 5, "--checkpoint-every", 2, "--output", folder
    )
    assert code == 1 and "learner 1 of 2 failed" in err
    assert "failed: 3 iterations" in out and "checkpoints/iteration_000002" in out
    assert f"thrust-rllib train --resume {folder}\n" in out
    code, out, err = thrust_rllib("train", "--resume", folder)
    assert code == 0, out + err
    assert "goes on from iteration 2" in out and iterations(folder) == [1, 2, 3, 4, 5]


# -------------------------------------------------------------------------------------------------------- the disk


def test_a_checkpoint_that_finds_no_room_is_tried_again(ray_session, tmp_path, monkeypatch):
    folder, save, refused = tmp_path / "run", RunFolder.save_checkpoint, []

    def full(self, algo, iteration):
        if iteration in (2, 3):
            refused.append(iteration)
            raise OSError(28, "No space left on device")
        return save(self, algo, iteration)

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--iterations", 4, "--checkpoint-every", 1, "--output", folder
    )
    assert code == 0 and refused == [2, 3], err
    for iteration in (2, 3):
        assert (
            f"warning: the checkpoint of iteration {iteration} could not be written ([Errno 28] No space left on "
            "device); the newest one is iteration_000001"
        ) in out
    assert checkpoints(folder) == ["iteration_000001", "iteration_000004"]


def test_a_last_checkpoint_that_finds_no_room(ray_session, tmp_path, monkeypatch):
    folder, save = tmp_path / "run", RunFolder.save_checkpoint

    def full(self, algo, iteration):
        if iteration > 2:
            raise OSError(28, "No space left on device")
        return save(self, algo, iteration)

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--iterations", 3, "--checkpoint-every", 2, "--output", folder
    )
    assert code == 1
    assert "error: the last checkpoint could not be written" in err and "the newest is iteration_000002" in err
    assert f"thrust-rllib train --resume {folder}\n" in out
    monkeypatch.undo()
    code, _, err = thrust_rllib("train", "--resume", folder)
    assert code == 0 and iterations(folder) == [1, 2, 3] and checkpoints(folder)[-1] == "iteration_000003", err


def test_results_that_find_no_room_are_written_later(ray_session, tmp_path, monkeypatch):
    folder, write, calls = tmp_path / "run", result_log._write_all, []

    def full(write_bytes, data):
        calls.append(len(data))
        if 3 < len(calls) < 10:  # three files an iteration
            write(write_bytes, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(write_bytes, data)

    monkeypatch.setattr(result_log, "_write_all", full)
    code, out, err = thrust_rllib("train", ENV, *ONE_ENV, "--iterations", 5, "--output", folder)
    assert code == 0, err
    assert out.count("warning: results cannot be written") == 1
    assert iterations(folder) == [1, 2, 3, 4, 5] and len((folder / "result.json").read_text().splitlines()) == 5
    (path,) = folder.glob("events.*")
    tag = "ray/tune/learners/a/policy_loss"
    assert [e.step for e in events(path) if any(v.tag == tag for v in e.summary.value)] == [64, 128, 192, 256, 320]
    assert read_json(folder / "report" / "summary.json")["iterations"] == 5


FULL = """
import resource, sys
import ray
from thrust_rllib.cli import app
ray.init(num_cpus=1, include_dashboard=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
app(sys.argv[2:])
"""


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_files_that_the_system_refuses_to_write(ray_session, tmp_path):
    """No file may have more than 40 kB: neither checkpoints nor figures fit; the run gets to its end all the same."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FULL, "40000", "train", ENV, *ONE_ENV, "--iterations", "4", "--checkpoint-every", "2",
         "--output", str(folder)],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the checkpoint of iteration 2 could not be written" in done.stdout
    assert "the last checkpoint could not be written" in done.stderr and "there is no other" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "iteration 4/4" in done.stdout and list((folder / "checkpoints").iterdir()) == []
