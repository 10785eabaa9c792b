"""Whole runs in this process; Ctrl-C and fresh processes are in test_processes."""

import pytest

from tests.cli.helpers import TINY, checkpoints, events, read_json, rows, thrust_rllib
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.trained_team import load_team


@pytest.fixture(scope="module")
def run(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    code, out, err = thrust_rllib(
        "train", "debug/match_observation", *TINY, "--iterations", 5, "--checkpoint-every", 2, "--redundancy", 0.1,
        "--output", folder,
    )  # fmt: skip
    return folder, code, out, err


def test_run_finishes_and_says_where_everything_is(run):
    folder, code, out, err = run
    assert code == 0 and "error: " not in err
    for name in ("report/learning_curves.png", "checkpoints/iteration_000005", "progress.csv", "tensorboard --logdir"):
        assert name in out
    assert "evaluation (4 episodes, greedy)" in out and "all agents" in out


def test_output_without_a_terminal_is_one_plain_line_per_iteration(run):
    _, _, out, _ = run
    lines = [line for line in out.splitlines() if line.startswith("iteration ")]
    assert [line.split()[1] for line in lines] == [f"{i}/5" for i in range(1, 6)]
    assert all("redundancy" in line and "agent_0" in line for line in lines)
    assert "\x1b" not in out and "new API stack" not in out


def test_folder_has_everything(run):
    folder = run[0]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "progress.csv", "checkpoints", "report", "train.log"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert checkpoints(folder) == ["iteration_000002", "iteration_000004", "iteration_000005"]
    assert (folder / "report" / "learning_curves.png").stat().st_size > 10_000
    read = read_json(folder / "report" / "summary.json")
    assert read["iterations"] == 5 and read["env_steps"] == 320
    assert read["evaluation"]["episodes"] == 4 and len(read["evaluation"]["agent_returns"]) == 2


def test_progress_table_has_every_iteration(run):
    table = rows(run[0])
    assert [row["training_iteration"] for row in table] == ["1", "2", "3", "4", "5"]
    assert float(table[-1]["learners/__all_modules__/cross_agent_loss/redundancy"]) >= 0
    assert float(table[-1]["env_runners/episode_return_mean"]) > 0


def test_tensorboard_counts_environment_steps(run):
    (path,) = run[0].glob("events.out.tfevents.*")
    tag = "ray/tune/env_runners/episode_return_mean"
    assert [e.step for e in events(path) if any(v.tag == tag for v in e.summary.value)] == [64, 128, 192, 256, 320]


def test_config_file_says_how_to_repeat_the_run(run):
    read = read_json(run[0] / "config.json")
    assert read["seed"] == 1 and read["environment"]["name"] == "debug/match_observation"
    assert {"thrust_rllib", "python", "ray", "torch"} <= set(read["versions"])
    assert read["command"].startswith("thrust-rllib") and read["limit"] == {"iterations": 5}
    assert read["options"]["lr"] == [[0, 1e-3], [320, 0.0]] and read["changed"]["train_batch_size_per_learner"] == 64


def test_an_environment_that_fails_leaves_what_was_written(ray_session, tmp_path):
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", "debug/faulty", "-e", "step=40", "-e", "episode_length=60", *TINY, "--checkpoint-every", 1,
        "--set", "restart_failed_env_runners=False", "--output", folder,
    )  # fmt: skip
    assert code == 1
    assert "the simulator lost its connection" in err and "Traceback" not in err
    assert "failed: 2 iterations" in out and "checkpoints/iteration_000002" in out
    assert len(rows(folder)) == 2 and (folder / "report" / "learning_curves.png").exists()
    assert "OSError" in (folder / "error.txt").read_text()


def test_steps_end_the_run_with_the_iteration_that_reaches_them(ray_session, tmp_path):
    code, _, _ = thrust_rllib(
        "train", "debug/match_observation", *TINY, "--steps", 100, "--freeze", "agent_1", "--live",
        "--eval-episodes", 0, "--output", tmp_path / "run",
    )  # fmt: skip
    assert code == 0
    last = rows(tmp_path / "run")[-1]
    assert last["training_iteration"] == "2"
    assert checkpoints(tmp_path / "run") == ["iteration_000002"]
    assert read_json(tmp_path / "run" / "report" / "summary.json")["evaluation"] is None
    assert read_json(tmp_path / "run" / "config.json")["options"]["policies_to_train"] == ["agent_0"]


def test_the_non_finite_warning_is_visible(ray_session, tmp_path):
    code, out, _ = thrust_rllib(
        "train", "debug/match_observation", *TINY, "--iterations", 1, "--lr", 1e30, "--eval-episodes", 0,
        "--output", tmp_path / "run",
    )  # fmt: skip
    assert code in (0, 1)
    assert "warning: " in out


def test_a_training_that_the_entropy_guard_ends(ray_session, tmp_path):
    folder = tmp_path / "run"
    code, out, err = thrust_rllib(
        "train", "debug/match_observation", *TINY, "--iterations", 9, "--set", "min_entropy=10",
        "--set", "min_entropy_updates=2", "--output", folder,
    )  # fmt: skip
    assert code == 1
    assert "ended early: the entropy guard ended the training" in err and "Traceback" not in err
    assert "ended early: 2 iterations" in out and "evaluation (4 episodes, greedy)" in out
    assert checkpoints(folder) == ["iteration_000002"]
    assert [row["stop_reason"][:16] for row in rows(folder)] == ["", "the entropy guar"]
    assert read_json(folder / "report" / "summary.json")["stop_reason"] == rows(folder)[-1]["stop_reason"]
    assert "the entropy guard ended the training" in (folder / "report" / "report.html").read_text()


@pytest.fixture(scope="module")
def recurrent_run(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent") / "run"
    code, out, err = thrust_rllib(
        "train", "gymnasium:CartPole-v1", "--cell", "lstm", "--model", "cell_size=16", *TINY, "--iterations", 2,
        "--output", folder,
    )  # fmt: skip
    return folder, code, out, err


def test_a_network_with_a_memory_trains(recurrent_run):
    folder, code, out, err = recurrent_run
    assert code == 0 and "error: " not in err
    assert "finished: 2 iterations" in out and "evaluation (4 episodes, greedy)" in out
    assert checkpoints(folder) == ["iteration_000002"]
    assert read_json(folder / "config.json")["options"]["model_config"] == {"cell": "lstm", "cell_size": 16}
    # Two minibatches of 32 rows, each of two sequences of 16 steps, in each of 4 epochs.
    assert float(rows(folder)[-1]["learners/__all_modules__/num_minibatch_steps"]) == 8


def test_its_checkpoint_is_evaluated_and_reported(recurrent_run, tmp_path):
    folder = recurrent_run[0]
    code, out, err = thrust_rllib("evaluate", folder, "--episodes", 5, "--seed", 3, "--output", tmp_path / "new.json")
    assert code == 0 and "error: " not in err and "agent_0" in out
    played = play_episodes(load_team(folder / "checkpoints" / "iteration_000002"), 5, seed=3)
    assert read_json(tmp_path / "new.json")["policy"]["played"]["lengths"] == played.lengths.tolist()
    code, out, _ = thrust_rllib("report", folder, "--output", tmp_path / "report")
    assert code == 0 and "report.html" in out
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
