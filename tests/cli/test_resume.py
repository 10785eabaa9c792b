"""`train --resume`: a run that was stopped, killed or finished goes on as if it had never ended."""

import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
import tree
from tensorboardX.record_writer import masked_crc32c

from tests.cli.helpers import TINY, checkpoints, events, read_json, rows, thrust_rllib
from tests.support import largest_difference

# The recipe's learning rate depends on the length of the run, which is not the same for one that is stopped early.
RUN = [*TINY, "--lr", "0.001", "--checkpoint-every", "3"]
ENV = "debug/match_observation"


def train(*arguments, code=0):
    found, out, err = thrust_rllib("train", *arguments)
    assert found == code, out + err
    return out, err


def weights(folder, iteration):
    modules = folder / "checkpoints" / f"iteration_{iteration:06}" / "learner_group" / "learner" / "rl_module"
    return {path.parent.name: pickle.loads(path.read_bytes()) for path in sorted(modules.glob("*/module_state.pkl"))}


def optimizers(folder, iteration):
    file = folder / "checkpoints" / f"iteration_{iteration:06}" / "learner_group" / "learner" / "state.pkl"
    state = pickle.loads(file.read_bytes())["optimizer"]
    return {name: [np.asarray(leaf) for leaf in tree.flatten(each["state"])] for name, each in state.items()}


def iterations(folder):
    return [int(row["training_iteration"]) for row in rows(folder)]


def policy_loss_steps(folder):
    """The environment steps at which TensorBoard has the policy's loss."""
    tag = "ray/tune/learners/agent_0/policy_loss"
    found = [e.step for path in folder.glob("events.*") for e in events(path)
             if any(v.tag == tag for v in e.summary.value)]  # fmt: skip
    return sorted(found)


def assert_the_same_run(folder, straight, until, first=1):
    """Every iteration once, and the same numbers in all of them as in the run that was never stopped."""
    assert iterations(folder) == list(range(1, until + 1))
    json_lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert [line["training_iteration"] for line in json_lines] == list(range(1, until + 1))
    for name in ("timesteps_total", "env_runners/episode_return_mean", "learners/agent_0/policy_loss"):
        assert [row[name] for row in rows(folder)] == [row[name] for row in rows(straight)], name
    seconds = [float(row["time_total_s"]) for row in rows(folder)]
    assert all(np.diff(seconds) > 0)
    assert policy_loss_steps(folder) == [64 * k for k in range(first, until + 1)]
    assert weights(folder, until).keys() == weights(straight, until).keys() and weights(folder, until)
    assert largest_difference(weights(folder, until), weights(straight, until)) == 0
    assert largest_difference(optimizers(folder, until), optimizers(straight, until)) == 0


@pytest.fixture(scope="module")
def straight(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(ENV, *RUN, "--iterations", 6, "--output", folder)
    return folder


@pytest.fixture(scope="module")
def stopped(ray_session, tmp_path_factory):
    """A run of three iterations, then resumed up to six."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    out, _ = train(ENV, *RUN, "--iterations", 3, "--output", folder)
    assert f"thrust-rllib train --resume {folder} --iterations 6" in out
    return folder, *train("--resume", folder, "--iterations", 6)


def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(straight, stopped):
    folder, out, _ = stopped
    assert "goes on from iteration 3: debug/match_observation, 6 iterations, seed 1" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("iteration ")] == ["4/6", "5/6", "6/6"]
    assert checkpoints(folder) == ["iteration_000003", "iteration_000006"]
    assert_the_same_run(folder, straight, 6)


def test_bucket_brigade_stopped_after_five_of_ten_iterations(ray_session, tmp_path):
    """An environment with a state of its own, moments of observations and a coupling: to the bit all the same."""
    arguments = [
        "bucket_brigade", "--batch", 128, "--minibatch", 64, "--envs-per-runner", 2, "--seed", 3, "--lr", 0.001,
        "--redundancy", 0.1, "--normalize-observations", "--eval-episodes", 0,
    ]  # fmt: skip
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(*arguments, "--iterations", 10, "--output", straight)
    train(*arguments, "--iterations", 5, "--output", stopped)
    train("--resume", stopped, "--iterations", 10)
    assert weights(stopped, 5).keys() == weights(straight, 10).keys() and len(weights(straight, 10)) > 1
    assert largest_difference(weights(stopped, 10), weights(straight, 10)) == 0
    assert largest_difference(optimizers(stopped, 10), optimizers(straight, 10)) == 0
    assert largest_difference(weights(stopped, 5), weights(straight, 10)) > 0
    columns = [name for name in rows(straight)[0] if TRAINED.match(name)]
    assert len(columns) > 60 and sum("policy_loss" in name for name in columns) == len(weights(straight, 10))
    for name in columns:
        assert [row[name] for row in rows(stopped)] == [row[name] for row in rows(straight)], name


TRAINED = re.compile(
    "timesteps_total|learners/(?!.*time)|env_runners/(episode_(return|len)|agent_|module_|num_(?!.*throughput))"
)


def test_a_run_that_differs_is_told_apart(straight, stopped, ray_session, tmp_path):
    train(ENV, *RUN, "--iterations", 6, "--seed", 2, "--output", tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_the_same_run(tmp_path / "other", straight, 6)


def test_the_report_covers_the_whole_run(straight, stopped):
    read, expected = (read_json(folder / "report" / "summary.json") for folder in (stopped[0], straight))
    assert read["iterations"] == 6 and read["env_steps"] == 384
    assert read["evaluation"] == expected["evaluation"]
    code, out, err = thrust_rllib("report", stopped[0], straight, "--output", straight.parent / "report")
    assert code == 0, err
    groups = read_json(straight.parent / "report" / "summary.json")["groups"]
    assert [len(group["runs"]) for group in groups] == [2]  # the same settings


def test_config_file_keeps_the_beginning_and_tells_of_the_rest(stopped):
    read = read_json(stopped[0] / "config.json")
    assert read["environment"]["name"] == ENV and read["seed"] == 1 and read["limit"] == {"iterations": 6}
    (entry,) = read["resumed"]
    assert entry["iteration"] == 3 and entry["checkpoint"] == "checkpoints/iteration_000003" and entry["options"] == {}
    assert read["run"] == {"checkpoint_every": 3, "eval_episodes": 4, "lr_of_recipe": False}


def test_an_older_checkpoint_sets_aside_what_lies_behind_it(straight, stopped, ray_session, tmp_path):
    folder = tmp_path / "run"
    train(ENV, *RUN, "--iterations", 6, "--output", folder)
    out, _ = train("--resume", folder / "checkpoints" / "iteration_000003", "--set", "num_epochs=2")
    assert "is now in" in out and iterations(folder) == [1, 2, 3, 4, 5, 6]
    aside = folder / "set_aside" / "1"
    assert checkpoints(aside) == ["iteration_000006"] and iterations(aside) == [1, 2, 3, 4, 5, 6]
    assert largest_difference(weights(aside, 6), weights(straight, 6)) == 0
    assert largest_difference(weights(folder, 6), weights(straight, 6)) > 0
    assert read_json(folder / "config.json")["resumed"][0]["options"] == {"num_epochs": 2}


def test_the_learning_rate_falls_over_the_new_length(ray_session, tmp_path):
    folder = tmp_path / "run"
    train(ENV, *TINY, "--iterations", 2, "--output", folder)
    train("--resume", folder, "--steps", 256)
    assert read_json(folder / "config.json")["options"]["lr"] == [[0, 1e-3], [256, 0.0]]
    # Reported is the value that the next update begins with.
    rates = [float(row["learners/agent_0/default_optimizer_learning_rate"]) for row in rows(folder)]
    assert rates == pytest.approx([5e-4, 0, 2.5e-4, 0])
    _, err = train("--resume", folder, "--minutes", 1, code=2)
    assert "the run's learning rate has fallen to 0 at 256 steps" in err and "Give --lr" in err
    assert iterations(folder) == [1, 2, 3, 4]


def test_what_may_change_changes_from_the_first_iteration(straight, ray_session, tmp_path):
    folder = tmp_path / "run"
    train(ENV, *RUN, "--iterations", 3, "--output", folder)
    before = weights(folder, 3)
    train(
        "--resume", folder, "--iterations", 4, "--lr", 0.0001, "--entropy", 0.5, "--redundancy", 0.2,
        "--freeze", "agent_1", "--eval-episodes", 0,
    )  # fmt: skip
    last = rows(folder)[-1]
    assert float(last["learners/agent_0/default_optimizer_learning_rate"]) == pytest.approx(0.0001)
    assert last["learners/__all_modules__/cross_agent_loss/redundancy"] != ""
    assert rows(folder)[0]["learners/__all_modules__/cross_agent_loss/redundancy"] == ""
    assert largest_difference(weights(folder, 4)["agent_1"], before["agent_1"]) == 0
    assert largest_difference(weights(folder, 4)["agent_0"], before["agent_0"]) > 0
    read = read_json(folder / "config.json")
    assert read["resumed"][0]["options"]["policies_to_train"] == ["agent_0"]
    assert read["changed"]["lr"] == 0.0001 and read["run"]["eval_episodes"] == 0


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_other_numbers_of_runners_and_learners(straight, ray_session, tmp_path):
    folder = tmp_path / "run"
    train(ENV, *RUN, "--iterations", 3, "--output", folder)
    train("--resume", folder, "--iterations", 4, "--runners", 2)
    out, _ = train("--resume", folder, "--iterations", 5, "--learners", 2, "--runners", 1)
    assert "an iteration has 128 environment steps from now on, 64 before" in out
    train("--resume", folder, "--iterations", 6, "--learners", 0, "--runners", 0)
    assert iterations(folder) == [1, 2, 3, 4, 5, 6]
    # Two learners take their batches together.
    assert [int(float(row["timesteps_total"])) for row in rows(folder)] == [64, 128, 192, 256, 384, 448]
    assert [entry["options"] for entry in read_json(folder / "config.json")["resumed"]] == [
        {"num_env_runners": 2}, {"num_env_runners": 1, "num_learners": 2}, {"num_env_runners": 0, "num_learners": 0},
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ processes that end

CHILD = {**os.environ, "COLUMNS": "200"}


def process(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "thrust_rllib", "train", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=CHILD,
    )  # fmt: skip


def until_iteration(process, number):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"iteration {number}"):
            return lines
    raise AssertionError("".join(lines))


def straight_as_far_as(folder, tmp_path):
    """The run that was never stopped, as far as `folder` got in the end."""
    last = iterations(folder)[-1]
    train(ENV, *RUN, "--iterations", last, "--eval-episodes", 0, "--output", tmp_path / "straight")
    return tmp_path / "straight", last


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_ctrl_c_loses_nothing(ray_session, tmp_path):
    folder = tmp_path / "run"
    with process(ENV, *RUN, "--minutes", 4, "--output", folder) as run:
        until_iteration(run, 7)
        run.send_signal(signal.SIGINT)
        out = run.stdout.read()
        assert run.wait(60) == 130, out
    assert f"thrust-rllib train --resume {folder}\n" in out
    reached = iterations(folder)[-1]
    assert checkpoints(folder)[-1] == f"iteration_{reached:06}"
    train("--resume", folder, "--iterations", reached + 3, "--eval-episodes", 0)
    straight, last = straight_as_far_as(folder, tmp_path)
    assert last == reached + 3
    assert_the_same_run(folder, straight, last)


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_a_killed_driver_loses_what_came_after_its_last_checkpoint(ray_session, tmp_path):
    folder = tmp_path / "run"
    with process(ENV, *RUN, "--minutes", 4, "--output", folder) as run:
        until_iteration(run, 8)
        run.kill()
        run.stdout.read()
    newest = int(next(name for name in reversed(checkpoints(folder)) if name.startswith("iteration_"))[-6:])
    assert 6 <= newest and newest % 3 == 0
    with (folder / "progress.csv").open("a") as file:
        file.write("1,2,cut o")
    out, _ = train("--resume", folder, "--iterations", newest + 3, "--eval-episodes", 0)
    assert f"goes on from iteration {newest}:" in out
    straight, last = straight_as_far_as(folder, tmp_path)
    assert last == newest + 3
    assert_the_same_run(folder, straight, last)


def test_a_run_that_still_goes_on_is_not_resumed(ray_session, straight):
    from thrust_rllib.command_line.run_folder import RunFolder

    open_run = RunFolder(straight)
    try:
        _, err = train("--resume", straight, "--iterations", 7, code=2)
    finally:
        open_run.close()
    assert "is in use: another process trains into it" in err


# ------------------------------------------------------------------------------------------------------ early errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bucket_brigade"], "bucket_brigade beside --resume: the run has an environment of its own"),
        (["--seed", "3"], "--seed cannot be given beside --resume: the run goes on with what it began with"),
        (["--gamma", "0.9"], "--gamma cannot be given beside --resume: to change it, give --set gamma=0.9"),
        (["--batch", "32"], "--set train_batch_size_per_learner=32"),
        (["--output", "elsewhere"], "--output cannot be given beside --resume: the run goes on in its own folder"),
        (["--policies", "shared"], "--policies cannot be given beside --resume"),
        (["--cell", "gru"], "--cell cannot be given beside --resume"),
        (["--no-normalize-observations"], "--normalize-observations cannot be given beside --resume"),
        (["--set", "policies=shared"], "--set policies cannot be given beside --resume"),
        (["--set", "entropy_coef=3"], "did you mean 'entropy_coeff'?"),
        (["--critic-lr", "0.1"], "critic_lr=0.1 beside --resume, and the run has critic_lr=None"),
        (["--freeze", "agent_7"], "The agents are ['agent_0', 'agent_1']"),
        ([], "the run has got as far as 6 iterations (6 iterations, 384 steps). Give a limit that lies further"),
        (["--iterations", "6"], "--iterations 12"),
        (["--steps", "100"], "the run has got as far as 100 steps"),
    ],
)
def test_mistakes_beside_resume_change_nothing(straight, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*") if path.name != "train.log"}
    more = [] if not arguments or arguments[0] in ("--iterations", "--steps") else ["--iterations", 9]
    _, err = train("--resume", straight, *arguments, *more, code=2)
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*") if path.name != "train.log"} == before
    assert list(tmp_path.iterdir()) == []


def test_neither_an_environment_nor_a_run():
    _, err = train(code=2)
    assert "ENV is missing" in err


def test_no_run(tmp_path, straight):
    _, err = train("--resume", tmp_path / "rum", code=2)
    assert "does not exist" in err and "needed: a run folder" in err
    (tmp_path / "empty").mkdir()
    _, err = train("--resume", tmp_path / "empty", code=2)
    assert "has no checkpoint in it" in err
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text("{}")
    _, err = train("--resume", tmp_path / "early", code=2)
    assert "ended before the first one was written" in err
    _, err = train("--resume", straight / "config.json", code=2)
    assert "is a file" in err


def test_only_half_a_checkpoint(tmp_path, straight):
    half = tmp_path / "run" / "checkpoints" / "iteration_000003"
    half.mkdir(parents=True)
    (half / "algorithm_state.pkl").touch()
    (tmp_path / "run" / "config.json").write_bytes((straight / "config.json").read_bytes())
    _, err = train("--resume", tmp_path / "run", code=2)
    assert "without a checkpoint" in err


def copy_of(straight, tmp_path):
    return shutil.copytree(straight, tmp_path / "copy")


def test_a_checkpoint_elsewhere(tmp_path, straight):
    folder = copy_of(straight, tmp_path)
    (folder / "config.json").unlink()
    _, err = train("--resume", folder, "--iterations", 9, code=2)
    assert "lies in no run folder" in err and "JointPPO.from_checkpoint" in err


def test_paths_as_people_type_them(ray_session, tmp_path, straight, monkeypatch):
    folder = copy_of(straight, tmp_path)
    folder = folder.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(folder)
    for number, (where, path) in enumerate(
        [(".", "moved/"), ("moved/checkpoints", ".."), ("moved/checkpoints", "iteration_000008"), (".", "link")],
        start=7,
    ):
        monkeypatch.chdir(tmp_path / where)
        out, _ = train("--resume", path, "--iterations", number, "--eval-episodes", 0)
        assert f"goes on from iteration {number - 1}:" in out and "/.." not in out
    assert iterations(folder) == list(range(1, 11))


def test_another_version(tmp_path, straight):
    folder = copy_of(straight, tmp_path)
    record = read_json(folder / "config.json")
    record["versions"] |= {"ray": "2.51.1", "thrust_rllib": "0.0.3"}
    (folder / "config.json").write_text(json.dumps(record))
    _, err = train("--resume", folder, "--iterations", 9, code=2)
    assert "written by thrust_rllib 0.0.3 and ray 2.51.1" in err and "thrust_rllib==0.0.3 ray==2.51.1" in err
    (folder / "config.json").write_text("{")
    _, err = train("--resume", folder, "--iterations", 9, code=2)
    assert "config.json cannot be read" in err


def test_a_checkpoint_that_is_broken(tmp_path, straight):
    folder = copy_of(straight, tmp_path)
    file = folder / "checkpoints" / "iteration_000006" / "algorithm_state.pkl"
    file.write_bytes(file.read_bytes()[:50])
    _, err = train("--resume", folder, "--iterations", 9, code=2)
    assert "iteration_000006 cannot be restored" in err and "take an earlier one of" in err
    (folder / "checkpoints" / "iteration_000006" / "class_and_ctor_args.pkl").write_bytes(b"no pickle")
    _, err = train("--resume", folder, "--iterations", 9, code=2)
    assert "iteration_000006 cannot be read" in err and "iteration_…" in err
    out, _ = train("--resume", folder / "checkpoints" / "iteration_000003", "--iterations", 4)
    assert "goes on from iteration 3" in out


@pytest.mark.parametrize(
    "part", ["learner_group", "learner_group/learner/rl_module/agent_1", "env_runner/env_to_module_connector"]
)
def test_a_checkpoint_that_lacks_a_folder(tmp_path, straight, part):
    """RLlib would go on with what it has built, untrained."""
    folder = copy_of(straight, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "iteration_000006" / part)
    _, err = train("--resume", folder, "--iterations", 7, code=2)
    assert "iteration_000006 cannot be restored: it lacks" in err and "Take an earlier one of" in err
    assert part.rpartition("/")[2] in err or part == "learner_group"
    assert iterations(folder) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("entry", ["environment", "limit", "run", "resumed", "versions"])
def test_a_config_file_with_something_else_in_it(tmp_path, straight, entry):
    folder = copy_of(straight, tmp_path)
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {entry: 3}))
    _, err = train("--resume", folder, "--iterations", 7, code=2)
    assert f"config.json cannot be read: '{entry}' is 3; needed: what the run wrote there" in err


def cut(folder):
    file = folder / "progress.csv"
    file.write_bytes(file.read_bytes()[:-9])


DAMAGE = {
    "the last line of the table is cut off": cut,
    "the table is gone": lambda folder: (folder / "progress.csv").unlink(),
    "the table ends in zeros": lambda folder: append(folder / "progress.csv", bytes(300)),
    "a line of the table is no text": lambda folder: append(folder / "progress.csv", b"\xff\xfe\n"),
    "a quotation mark in the table is not closed": lambda folder: append(
        folder / "progress.csv", b'"' + b"1" * 200_000 + b"\n"
    ),
    "result.json is longer": lambda folder: append(folder / "result.json", b'{"training_iteration": 7}\n{"training_it'),
    "events end in zeros": lambda folder: append(next(folder.glob("events.*")), bytes(300)),
    "events end in something else": lambda folder: append(next(folder.glob("events.*")), A_HEADER + b"\xff" * 30),
}
A_HEADER = struct.pack("<Q", 16) + struct.pack("<I", masked_crc32c(struct.pack("<Q", 16)))


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_results_that_are_damaged(ray_session, tmp_path, straight, damage):
    """Power has failed, or the disk was full when the run was killed: what one file lacks comes from the other."""
    folder = copy_of(straight, tmp_path)
    DAMAGE[damage](folder)
    train("--resume", folder, "--iterations", 7, "--eval-episodes", 0)
    assert iterations(folder) == [1, 2, 3, 4, 5, 6, 7]
    assert float(rows(folder)[-1]["timesteps_total"]) == 448
    for row, before in zip(rows(folder), rows(straight), strict=False):
        assert {name: value for name, value in row.items() if value} == {n: v for n, v in before.items() if v}
    json_lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert [line["training_iteration"] for line in json_lines] == [1, 2, 3, 4, 5, 6, 7]
    assert policy_loss_steps(folder) == [64 * k for k in range(1, 8)]


def test_an_environment_that_is_gone(ray_session, tmp_path, monkeypatch):
    module = tmp_path / "code" / "gone_env.py"
    module.parent.mkdir()
    module.write_text("from thrust_rllib.envs.debug import Identity\n\n\nclass Env(Identity):\n    pass\n")
    monkeypatch.syspath_prepend(str(module.parent))
    folder = tmp_path / "run"
    train("gone_env:Env", *TINY, "--iterations", 1, "--output", folder)
    module.unlink()
    del sys.modules["gone_env"]
    _, err = train("--resume", folder, "--iterations", 2, code=2)
    assert "No module named 'gone_env'" in err and "Run it where the environment" in err
