"""What `thrust-rllib evaluate` shows and saves of the environment's extras."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from tests.cli.helpers import read_json, thrust_rllib
from tests.support import tiny_config
from thrust_rllib.command_line.evaluation_result import EvaluationResult
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes
from thrust_rllib.trained_team import load_team


def played(final, mean, count=4):
    """Episodes of two agents with the given extras of the team, beside some of agents and of a vector."""
    others = {"load": np.ones((count, 2)), "map": np.ones((count, 5)), "pairs": np.ones((count, 2, 2))}
    return PlayedEpisodes(
        ["a", "b"],
        np.arange(2.0 * count).reshape(count, 2),
        np.full(count, 3),
        {"connected": np.array(final), **others},
        {"connected": np.array(mean), **others},
    )


def result(policy, **baselines):
    return EvaluationResult(Path("x"), 1, "env", {}, 0, False, policy, baselines)


def printed(shown):
    text = io.StringIO()
    shown.print(Console(file=text, width=120))
    return text.getvalue()


TEAM = played([True, True, False, True], [1.0, 0.5, 0.25, 0.75])
RANDOM = played([False, True, False, False], [0.0, 0.5, 0.25, 0.0])


def test_the_teams_numbers_have_a_table_of_their_own():
    lines = printed(result(TEAM)).splitlines()
    half = stats.t.ppf(0.975, 3) * np.std([1, 1, 0, 1], ddof=1) / 2
    table = [line.split("  ") for line in lines[lines.index("") + 1 :]]
    assert [[cell.strip() for cell in line if cell.strip()] for line in table] == [
        ["extras of the team", "team"],
        ["connected, last step", f"0.75 ± {half:.4g}"],
        [
            "connected, mean over steps",
            f"0.625 ± {stats.t.ppf(0.975, 3) * np.std([1, 0.5, 0.25, 0.75], ddof=1) / 2:.4g}",
        ],
    ]
    assert not any(name in line for line in lines for name in ("load", "map", "pairs"))


def test_baselines_have_columns_and_differences():
    lines = printed(result(TEAM, random=RANDOM)).splitlines()
    last = [line for line in lines if line.startswith("connected, last step")]
    assert len(last) == 2 and "0.75 ± " in last[0] and "0.25 ± " in last[0] and "0.5 ± " in last[1]
    over = [line for line in lines if line.startswith("connected, mean over steps")]
    assert len(over) == 2 and "0.625 ± " in over[0] and "0.1875 ± " in over[0] and "0.4375 ± " in over[1]
    heads = [
        line.split("  ")[0] for line, before in zip(lines[1:], lines, strict=False) if not before or line == lines[1]
    ]
    assert heads == ["mean and 95 % interval", "difference", "extras of the team", "difference of extras"]
    assert "" not in (lines[0], lines[1]) and not any(a == b == "" for a, b in zip(lines, lines[1:], strict=False))


def test_the_record_has_means_differences_and_every_episode():
    record = json.loads(json.dumps(result(TEAM, random=RANDOM).record()))
    policy, random = record["policy"], record["baselines"]["random"]
    assert policy["final_extras"].keys() == policy["mean_extras"].keys() == {"connected"}
    assert policy["final_extras"]["connected"]["mean"] == 0.75
    assert policy["mean_extras"]["connected"]["standard_error"] == pytest.approx(
        np.std([1, 0.5, 0.25, 0.75], ddof=1) / 2
    )
    assert random["mean_extras"]["connected"]["mean"] == 0.1875
    assert random["difference"]["mean_extras"]["connected"]["mean"] == 0.4375
    assert random["difference"]["final_extras"]["connected"]["mean"] == 0.5
    assert policy["played"]["final_extras"] == {"connected": [True, True, False, True]}
    assert random["played"]["mean_extras"] == {"connected": [0.0, 0.5, 0.25, 0.0]}


def test_without_such_extras_nothing_is_shown():
    bare = PlayedEpisodes(TEAM.agents, TEAM.returns, TEAM.lengths, {"load": np.ones((4, 2))}, {"load": np.ones((4, 2))})
    assert "extras" not in printed(result(bare, random=bare))
    assert result(bare).record()["policy"]["final_extras"] == {}


def test_an_extra_may_be_infinite():
    never = played([np.inf, 2.0, np.inf, 1.0], [np.inf] * 4)
    assert "connected, last step" in printed(result(never, random=never))


def test_a_team_of_a_checkpoint(ray_session, tmp_path):
    algo = tiny_config("spread", {"max_cycles": 5}).build_algo()
    algo.save_to_path(str(tmp_path / "checkpoint"))
    algo.stop()
    path = tmp_path / "x.json"
    arguments = ["--episodes", 12, "--seed", 3, "--baseline", "random", "--output", path]
    exit_code, out, err = thrust_rllib("evaluate", tmp_path / "checkpoint", *arguments)
    assert exit_code == 0, err
    assert out.count("covered, last step") == out.count("covered, mean over steps") == 2
    found = play_episodes(load_team(tmp_path / "checkpoint"), 12, seed=3)
    record = read_json(path)["policy"]
    assert record["final_extras"]["covered"]["mean"] == pytest.approx(found.final_extras["covered"].mean())
    assert record["mean_extras"]["covered"]["mean"] == pytest.approx(found.mean_extras["covered"].mean())
    assert record["played"]["final_extras"] == {"covered": found.final_extras["covered"].tolist()}
