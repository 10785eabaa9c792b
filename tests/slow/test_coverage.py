"""The coverage world: a team learns to cover it and stays connected, and its weights serve teams of other sizes.

One training run of about two minutes for both; the experiments themselves: `benchmarks/coverage_world.py`.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

from thrust_rllib.evaluation import play_episodes

pytestmark = [pytest.mark.slow_coverage, pytest.mark.timeout(900)]
SEED, STEPS = 5, 64_000


@pytest.fixture(scope="module")
def covering():
    """Imports a module of `benchmarks/covering`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield lambda name: importlib.import_module(f"covering.{name}")


@pytest.fixture(scope="module")
def trained(covering, ray_session, tmp_path_factory):
    """A row of `mechanisms` and the checkpoint of its last weights."""
    folder = tmp_path_factory.mktemp("kept")
    (row,) = covering("mechanisms").measure("pid", "open", SEED, STEPS, str(folder))
    return row, folder / f"open_pid_{SEED}"


def test_a_team_covers_the_world_and_stays_connected(covering, trained):
    row, _ = trained
    (chance,) = covering("mechanisms").measure("random", "open", SEED, STEPS)
    assert row["env_steps"] <= STEPS
    assert row["coverage"] > 0.75 > chance["coverage"] + 0.05, (row, chance)
    assert row["connected"] >= 0.95 > chance["connected"], (row, chance)


def test_a_team_that_grows_again_and_again_starts_ahead_each_time(covering, trained, tmp_path):
    """Four agents become six, eight, then three; each team starts with the weights of the one before."""
    team, experiment = covering("team"), importlib.import_module("common.experiment")
    path = trained[1]
    for agents, grid in ((6, 20), (8, 24), (3, 12)):
        world = team.world_of("pid", "open", num_agents=agents, grid=grid)
        with experiment.trainer(team.config_of(world, "pid", SEED, 10**6)) as algo:
            algo.warm_start(path)
            before, chance = team.play(algo), team.play_at_random(algo)
            assert before["coverage"] > chance["coverage"], (agents, grid, before, chance)
            progress = experiment.train_through(algo, 8000, {"loss": "learners/shared/total_loss"})
            assert progress.env_steps == 8000 and np.isfinite(progress.late("loss")), progress
            played = play_episodes(algo, 8, seed=SEED)
            assert played.returns.shape == (8, agents) and np.isfinite(played.returns).all()
            path = algo.save_to_path(tmp_path / f"{agents}")
