"""What breaks while `train` runs: environments, processes, the disk. What is kept, what is said, and how it goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.rllib.callbacks.callbacks import RLlibCallback

from tests.cli.helpers import TINY, checkpoints, events, read_json, rows, thrust_rllib
from thrust_rllib import JointPPO, JointPPOConfig
from thrust_rllib.command_line import train, whole_writes
from thrust_rllib.command_line.messages import error_text
from thrust_rllib.command_line.run_folder import RunFolder

ENV = "tests.cli.breaking_env:Breaking"
ONE_ENV = [*TINY, "--envs-per-runner", "1", "--eval-episodes", "0"]  # 64 steps an iteration, of all runners together


def iterations(folder):
    return [int(float(row["training_iteration"])) for row in rows(folder)]


def breaks(how, at, marker=None):
    options = ["-e", f"how={how}", "-e", f"at={at}"]
    return options if marker is None else [*options, "-e", f"marker={marker}"]


def test_a_process_that_cannot_start_says_why(ray_session):
    @ray.remote
    class Broken:
        def __init__(self):
            raise OSError("no licence for the simulator")

        def ping(self):
            return 1

    with pytest.raises(ray.exceptions.ActorDiedError) as error:
        ray.get(Broken.remote().ping.remote())
    said = error_text(error.value)
    assert (
        said.startswith("a process could not start: OSError: no licence for the simulator. Try again")
        and len(said) < 120
    )


# ---------------------------------------------------------------------------------------------------- environments


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runners", [0, pytest.param(1, marks=pytest.mark.slow_checkpoints)])
def test_an_environment_that_raises_once(ray_session, tmp_path, runners):
    """Step 150 is in the third iteration: the environment is made anew, and the run goes on."""
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--runners", runners, "--iterations", 4, *breaks("raise", 150, tmp_path / "marker"),
        "--output", folder,
    )  # fmt: skip
    assert code == 0, err
    assert "warning: environment 'tests.cli.breaking_env:Breaking' failed in step" in out
    assert f"(runner {runners}): " in out and "OSError: the simulator lost its connection" in out
    assert out.count("it is made anew (1 of 3 failures") == 1
    assert checkpoints(folder) == ["iteration_000004"] and iterations(folder) == [1, 2, 3, 4]
    assert [row.get("env_runners/num_env_restarts") for row in rows(folder)] == ["", "", "1.0", "1.0"]


@pytest.mark.timeout(120)
def test_an_environment_that_may_not_raise(ray_session, tmp_path):
    """Its error comes while sampling the third iteration, so that the first two are kept."""
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", ENV, *ONE_ENV, "--iterations", 4, *breaks("raise", 150, tmp_path / "marker"),
        "--set", "restart_failed_env_runners=False", "--output", folder,
    )  # fmt: skip
    assert code == 1 and "Traceback" not in err
    assert "environment 'tests.cli.breaking_env:Breaking' failed in step" in err
    assert "OSError: the simulator lost its connection" in err and "made anew" not in err
    assert "failed: 2 iterations" in out and f"thrust-rllib train --resume {folder}\n" in out
    assert checkpoints(folder) == ["iteration_000002"] and iterations(folder) == [1, 2]
    code, out, err = thrust_rllib("train", "--resume", folder)
    assert code == 0, err
    assert iterations(folder) == [1, 2, 3, 4] and "finished: 4 iterations" in out


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_an_environment_that_always_raises(ray_session, tmp_path):
    folder = tmp_path / "run"
    arguments = ["train", ENV, *ONE_ENV, "--runners", 1, "--iterations", 20]
    code, out, err = thrust_rllib(*arguments, *breaks("raise", 3), "--output", tmp_path / "first")
    assert code == 1 and "the simulator lost its connection" in err and "failed in the first iteration" in out
    assert "it was made anew 3 times before, and failed 4 times in the last 4 calls to sample" in err
    assert "none was written" in out and "--resume" not in out
    code, _, err = thrust_rllib(*arguments, *breaks("raise", 100), "--output", folder)  # in every second iteration
    assert code == 1 and "it was made anew 3 times before" in err
    done = iterations(folder)
    assert 3 <= len(done) <= 8 and checkpoints(folder) == [f"iteration_{done[-1]:06}"]
    code, _, err = thrust_rllib("train", "--resume", folder)
    assert code == 1 and "the simulator lost its connection" in err
    more = iterations(folder)
    assert more[: len(done)] == done and len(more) > len(done) and checkpoints(folder)[-1] == f"iteration_{more[-1]:06}"


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
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


class KillsALearner(RLlibCallback):
    """Behind iteration 3, once: where there is no marker yet."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        marker = Path(algorithm.config.env_config["marker"])
        if algorithm.iteration == 3 and not marker.exists():
            marker.touch()
            kill("learner_group", 1)(algorithm)


@pytest.mark.timeout(180)
@pytest.mark.slow_checkpoints
@pytest.mark.parametrize("max_failures", [0, 1])
def test_a_killed_learner_in_tune(ray_session, tmp_path, max_failures):
    """With `max_failures` the trial goes on from its last checkpoint, without it ends with an error that says which."""
    config = (
        JointPPOConfig()
        .environment(ENV, env_config={"at": -1, "marker": str(tmp_path / "marker")})
        .env_runners(num_envs_per_env_runner=1)
        .learners(num_learners=2)
        .training(train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1, lr=1e-3)
        .debugging(seed=1)
        .callbacks(KillsALearner)
    )
    run = tune.RunConfig(
        name="killed", storage_path=str(tmp_path), verbose=0, stop={"training_iteration": 5},
        failure_config=tune.FailureConfig(max_failures=max_failures),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True),
    )  # fmt: skip
    (result,) = tune.Tuner(JointPPO, param_space=config, run_config=run).fit()
    (folder,) = [path for path in (tmp_path / "killed").iterdir() if path.is_dir()]
    assert (tmp_path / "marker").exists()
    assert "learner 1 of 2 failed" in (folder / "error.txt").read_text()
    reached = iterations(folder)
    if max_failures:
        assert result.error is None and reached == [1, 2, 3, 3, 4, 5]
        assert result.metrics["num_env_steps_sampled_lifetime"] == 5 * 64
    else:
        assert "learner 1 of 2 failed" in str(result.error) and reached == [1, 2, 3]
    saved = JointPPO.from_checkpoint(result.checkpoint.path)
    try:
        assert saved.iteration == (5 if max_failures else 2)
    finally:
        saved.stop()


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
    folder, write, calls = tmp_path / "run", whole_writes._write_all, []

    def full(write_bytes, data):
        calls.append(len(data))
        if 3 < len(calls) < 10:  # three files an iteration
            write(write_bytes, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(write_bytes, data)

    monkeypatch.setattr(whole_writes, "_write_all", full)
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
