"""A sweep of eight trials finds a team for the bucket brigade: at most ten minutes on two idle cores."""

import json
import subprocess
import sys
import time

import pytest

from thrust_rllib.baselines import play_baseline
from thrust_rllib.confidence import gap_closed_of
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.trained_team import load_team

pytestmark = [pytest.mark.slow_checkpoints, pytest.mark.timeout(3600)]

# Two decades of the learning rate around the usual 1e-3, the penalty off to strong, few or many gradient steps.
SPACE = ["--lr", "1e-4:1e-2", "--redundancy", "0,0.1,1", "--minibatch", "128,256,512"]
EPISODES, BAR, MINUTES = 1000, 0.8, 10


def test_closes_the_gap(tmp_path):
    folder = tmp_path / "sweep"
    command = ["sweep", "bucket_brigade", "-e", "scenario=minimal_specialization", *SPACE, "--trials", "8"]
    options = ["--steps", "200000", "--scheduler", "asha", "--seed", "0", "--concurrent", "2", "--output", str(folder)]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "thrust_rllib", *command, *options], check=True)
    minutes = (time.perf_counter() - began) / 60

    team = load_team(folder / "best")
    played = play_episodes(team, EPISODES, seed=1_000_000)
    random, specialist = (play_baseline(team, name, EPISODES, seed=1_000_000) for name in ("random", "specialist"))
    gap = gap_closed_of(*(p.means().team_reward_per_step for p in (played, random, specialist)))
    print(json.loads((folder / "best.json").read_text()), gap, f"{minutes:.1f} minutes")
    assert gap.value >= BAR
    assert minutes <= MINUTES

    # Its score is the mean of the latest episodes of training, with sampled actions.
    sampled = play_episodes(team, EPISODES, seed=1_000_000, explore=True).means().team_return
    score = json.loads((folder / "best.json").read_text())["score"]
    scale = abs(specialist.team_returns.mean() - random.team_returns.mean())
    assert abs(sampled.mean - score) < 0.2 * scale
