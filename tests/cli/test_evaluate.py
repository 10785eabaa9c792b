"""`thrust-rllib evaluate`: its numbers, baselines and files, in this process and in a fresh one."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.cli.helpers import TINY, read_json, thrust_rllib
from tests.support import tiny_config
from thrust_rllib import JointPPOConfig
from thrust_rllib.baselines import play_baseline
from thrust_rllib.command_line.checkpoints import find_checkpoint
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe
from thrust_rllib.trained_team import load_team

SETTINGS = {"scenario": "minimal_specialization", "num_houses": 6}


@pytest.fixture(scope="module")
def run(ray_session, tmp_path_factory):
    """A run folder with the checkpoints of iterations 2 and 3."""
    folder = tmp_path_factory.mktemp("run") / "run"
    code, _, err = thrust_rllib(
        "train", "bucket_brigade", "-e", "scenario=minimal_specialization", "-e", "num_houses=6", *TINY,
        "--iterations", 3, "--checkpoint-every", 2, "--eval-episodes", 2, "--output", folder,
    )  # fmt: skip
    assert code == 0, err
    return folder


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """Exit code, what was printed, the record and the GIF of an evaluation with everything."""
    folder = tmp_path_factory.mktemp("evaluation") / "new"
    arguments = ["--episodes", 60, "--baseline", "random", "--baseline", "specialist", "--seed", 4]
    code, out, err = thrust_rllib(
        "evaluate", run, *arguments, "--render", folder / "x.gif", "--output", folder / "x.json"
    )
    assert code == 0, err
    return out, read_json(folder / "x.json"), folder / "x.gif"


def test_the_numbers_are_those_of_the_latest_checkpoint(run, evaluated):
    _, record, _ = evaluated
    assert record["checkpoint"].endswith("iteration_000003") and record["iteration"] == 3
    team = load_team(run / "checkpoints" / "iteration_000003")
    played = play_episodes(team, 60, seed=4)
    means = played.means()
    assert record["policy"]["team_return"]["mean"] == means.team_return.mean
    found = record["policy"]["agent_returns"]["agent_2"]
    assert (found["low"], found["high"]) == means.agent_returns["agent_2"].interval
    assert record["policy"]["length"]["standard_error"] == means.length.standard_error
    assert record["policy"]["played"]["lengths"] == played.lengths.tolist()
    assert record["policy"]["played"]["returns"]["agent_1"] == played.returns[:, 1].tolist()
    assert record["environment"] == {"name": "bucket_brigade", "env_config": SETTINGS}
    assert record["episodes"] == 60 and record["seed"] == 4 and record["sampled"] is False
    assert record["command"].startswith("thrust-rllib") and {"thrust_rllib", "ray", "torch"} <= set(record["versions"])


def test_baselines_and_the_gap_closed(run, evaluated):
    _, record, _ = evaluated
    team = load_team(run / "checkpoints" / "iteration_000003")
    mean, error = {}, {}
    for name in ("random", "specialist"):
        found, played = record["baselines"][name], play_baseline(team, name, 60, seed=4)
        per_step = found["team_reward_per_step"]
        mean[name], error[name] = per_step["mean"], per_step["standard_error"]
        assert mean[name] == pytest.approx((played.returns.sum(axis=1) / played.lengths).mean())
        difference = record["policy"]["team_return"]["mean"] - found["team_return"]["mean"]
        assert found["difference"]["team_return"]["mean"] == pytest.approx(difference)
        low, high = (found["difference"]["team_return"][end] for end in ("low", "high"))
        assert low < difference < high
    assert mean["specialist"] > mean["random"]
    x = record["policy"]["team_reward_per_step"]
    gap = (x["mean"] - mean["random"]) / (mean["specialist"] - mean["random"])
    assert record["gap_closed"]["value"] == pytest.approx(gap)
    variance = x["standard_error"] ** 2 + ((1 - gap) * error["random"]) ** 2 + (gap * error["specialist"]) ** 2
    wanted = np.sqrt(variance) / (mean["specialist"] - mean["random"])
    assert record["gap_closed"]["standard_error"] == pytest.approx(wanted)


def test_the_table_shows_it_all(evaluated):
    out, record, _ = evaluated
    for text in ("60 episodes, greedy actions, seed 4", "num_houses=6", "team return", "return of agent_3", "random",
                 "specialist", "team − random", "gap closed", "x.gif (", "x.json"):  # fmt: skip
        assert text in out
    line = next(line for line in out.splitlines() if line.startswith("team return"))
    assert f"{record['policy']['team_return']['mean']:.4g}".replace("e+03", "") in line.replace(",", "")
    assert line.count("±") == 3 and "…" not in out and "\x1b" not in out


def test_the_gif_has_a_picture_for_every_step_and_one(evaluated):
    _, record, path = evaluated
    with Image.open(path) as gif:
        assert gif.n_frames == record["policy"]["played"]["lengths"][0] + 1
        first = np.asarray(gif.convert("RGB"))
        gif.seek(gif.n_frames - 1)
        assert (np.asarray(gif.convert("RGB")) != first).any()


def test_sampling_and_other_settings_of_the_environment(run, tmp_path):
    records = {}
    for name, arguments in {
        "greedy": [], "again": [], "sampled": ["--sample"], "other": ["-e", "scenario=easy"], "seed": ["--seed", 1]
    }.items():  # fmt: skip
        code, out, err = thrust_rllib("evaluate", run, "--episodes", 5, *arguments, "-o", tmp_path / f"{name}.json")
        assert code == 0, err
        records[name] = read_json(tmp_path / f"{name}.json")
        assert records[name]["gap_closed"] is None and "difference" not in out
    returns = {name: record["policy"]["played"]["returns"] for name, record in records.items()}
    assert returns["greedy"] == returns["again"]
    for name in ("sampled", "other", "seed"):
        assert returns[name] != returns["greedy"], name
    assert records["other"]["environment"]["env_config"] == SETTINGS | {"scenario": "easy"}
    assert records["sampled"]["sampled"] is True


def test_one_episode_has_no_interval(run, tmp_path):
    code, out, _ = thrust_rllib("evaluate", run, "--episodes", 1, "-o", tmp_path / "x.json")
    assert code == 0 and "± –" in out
    assert read_json(tmp_path / "x.json")["policy"]["length"]["low"] is None


def test_a_fresh_process_gets_the_numbers_of_the_one_that_trained(ray_session, tmp_path):
    config = recipe(JointPPOConfig().environment("bucket_brigade", env_config=SETTINGS))
    config.training(train_batch_size_per_learner=256, minibatch_size=64).env_runners(num_env_runners=1)
    algo = config.debugging(seed=0).build_algo()
    algo.train()
    algo.save_to_path(str(tmp_path / "checkpoint"))
    played = play_episodes(algo, 7, seed=2, explore=True)
    algo.stop()
    done = subprocess.run(
        [sys.executable, "-m", "thrust_rllib", "evaluate", str(tmp_path / "checkpoint"), "--episodes", "7",
         "--seed", "2", "--sample", "--output", str(tmp_path / "x.json")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "90"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # One line of what was played, the head and seven rows of the table, one line of where the numbers are.
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1 + 8 + 1, done.stdout
    found = read_json(tmp_path / "x.json")["policy"]["played"]
    assert found["returns"] == {agent: played.returns[:, i].tolist() for i, agent in enumerate(played.agents)}
    assert found["lengths"] == played.lengths.tolist()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env-config", "scenari=easy"], "did you mean 'scenario'?"),
        (["-e", "num_agents=3"], "the team was trained as ['agent_0', 'agent_1', 'agent_2', 'agent_3']"),
        (["-e", "num_houses=7"], "Choose settings of the environment that keep the spaces"),
        (["-e", "scenario"], "needed: NAME=VALUE"),
        (["--output", "x.txt"], "needed: a file name that ends in .json, such as x.json"),
        (["--render", "x.png"], "needed: a file name that ends in .gif, such as x.gif"),
    ],
)
def test_mistakes_end_with_one_line_and_write_nothing(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = thrust_rllib("evaluate", run, *arguments)
    assert code == 2 and message in err and err.startswith("error: ") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [] and "team return" not in out


@pytest.mark.parametrize(
    "arguments", [["--episode", "0"], ["--episodes", "0"], ["--baseline", "best"], ["--seed", "-1"]]
)
def test_options_out_of_range_are_named_by_the_command_line(run, arguments):
    code, _, err = thrust_rllib("evaluate", run, *arguments)
    assert code == 2 and arguments[0] in err


def test_files_that_exist_are_not_overwritten(run, tmp_path):
    for option, name in (("--output", "mine.json"), ("--render", "mine.gif")):
        (tmp_path / name).write_text("mine")
        code, _, err = thrust_rllib("evaluate", run, option, tmp_path / name)
        assert code == 2 and "nothing is overwritten" in err and f"rm {tmp_path / name}" in err
        assert (tmp_path / name).read_text() == "mine"


def test_a_specialist_that_is_not_known_is_an_early_error(ray_session, tmp_path):
    algo = tiny_config("climbing").build_algo()
    algo.save_to_path(str(tmp_path / "checkpoint"))
    algo.stop()
    code, out, err = thrust_rllib("evaluate", tmp_path / "checkpoint", "--baseline", "specialist")
    assert code == 2 and "there is one for bucket_brigade" in err and "team return" not in out


def test_what_is_neither_a_run_nor_a_checkpoint(run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints" / "unfinished_iteration_000002").mkdir(parents=True)
    (unfinished / "config.json").write_text("{}")
    cases = {
        run.with_name("runn"): "does not exist; did you mean 'run'?",
        run / "config.json": "is a file; needed: a run folder",
        run / "checkpoints": "is a folder of checkpoints; give one of them, e.g. ",
        run / "checkpoints" / "iteration_000003" / "learner_group": "has no checkpoint in it; needed: a run folder",
        empty: "has no checkpoint in it; needed: a run folder",
        unfinished: "is the folder of a run without a checkpoint",
    }
    for path, message in cases.items():
        code, _, err = thrust_rllib("evaluate", path)
        assert code == 2 and str(path) in err and message in err, err


def test_the_latest_checkpoint_is_the_one_with_the_highest_number(run, tmp_path):
    assert find_checkpoint(run) == run / "checkpoints" / "iteration_000003"
    for name in ("iteration_1000000", "iteration_999999", "unfinished_iteration_2000000"):
        target = tmp_path / "checkpoints" / name
        target.mkdir(parents=True)
        (target / "rllib_checkpoint.json").write_text("{}")
    assert find_checkpoint(tmp_path).name == "iteration_1000000"
    assert find_checkpoint(tmp_path / "checkpoints" / "iteration_999999").name == "iteration_999999"


def test_a_broken_checkpoint_says_what_it_needs(run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run / "checkpoints" / "iteration_000003", broken)
    (broken / "class_and_ctor_args.pkl").write_bytes(b"cnot_there\nThing\n.")
    code, _, err = thrust_rllib("evaluate", broken)
    assert code == 2 and "No module named 'not_there'" in err and "run where they can be imported" in err


def test_help_answers_without_ray():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom thrust_rllib.cli import app\n"
        "done = CliRunner().invoke(app, ['evaluate', '--help'])\n"
        "assert done.exit_code == 0 and '--baseline' in done.output and 'Student' in done.output\n"
        "assert CliRunner().invoke(app, ['evaluate', 'not_there']).exit_code == 2\n"
        "print([name for name in ('ray', 'torch', 'PIL') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
