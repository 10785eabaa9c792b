"""The command line with games of turns."""

from __future__ import annotations

import pytest

from tests.cli.helpers import read_json, rows, thrust_rllib
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.trained_team import load_team


@pytest.fixture(scope="module")
def turns(ray_session, tmp_path_factory):
    """A run folder of a game with turns."""
    folder = tmp_path_factory.mktemp("turns") / "run"
    code, out, err = thrust_rllib(
        "train", "pettingzoo:tictactoe_v3", "--batch", 64, "--minibatch", 32, "--envs-per-runner", 2, "--seed", 1,
        "--iterations", 2, "--eval-episodes", 4, "--output", folder,
    )  # fmt: skip
    assert code == 0, out + err
    return folder


def test_the_command_line_trains_games_with_turns(turns):
    table = rows(turns)
    assert len(table) == 2 and all(5.0 <= float(row["env_runners/episode_len_mean"]) <= 9.0 for row in table)


def test_the_command_line_evaluates_games_with_turns(turns, tmp_path):
    record = tmp_path / "x.json"
    code, _, err = thrust_rllib("evaluate", turns, "--episodes", 6, "--seed", 4, "--output", record)
    assert code == 0, err
    found = read_json(record)
    assert set(found["policy"]["agent_returns"]) == {"player_1", "player_2"}
    (checkpoint, *_) = sorted((turns / "checkpoints").iterdir(), reverse=True)
    played = play_episodes(load_team(checkpoint), 6, seed=4)
    assert played.lengths.tolist() == found["policy"]["played"]["lengths"]
    assert (played.lengths >= 5).all() and (played.lengths <= 9).all()
