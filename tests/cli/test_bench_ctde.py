"""What the experiments of `benchmarks/centralized.py` are made of, and one of them for two iterations."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def ctde():
    """Imports a module of `benchmarks/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


def signalling(ctde, table):
    """Loss and its gradient in the logits where each goal has a row of word probabilities."""
    logits = torch.tensor(table, dtype=torch.float64).clamp(min=1e-6).log().requires_grad_()
    loss = ctde("ctde.speaker").Signalling()({}, {"speaker_0": logits}, {}, None)
    loss.backward()
    return float(loss.detach()), logits.grad


def test_signalling_is_best_with_a_word_for_each_goal_and_leaves_one_word_for_two(ctde):
    best, _ = signalling(ctde, np.eye(3)[[2, 0, 1]])
    assert best == pytest.approx(-math.log(3), abs=1e-3)
    alike, _ = signalling(ctde, np.full((3, 3), 1 / 3))
    assert alike == pytest.approx(-math.log(3) / 2)
    two_goals_one_word, gradient = signalling(ctde, [[0.98, 0.01, 0.01], [0.98, 0.01, 0.01], [0.01, 0.98, 0.01]])
    assert best < two_goals_one_word < alike
    assert (gradient[:, 2] < -1e-3).all()  # the word that nobody says becomes likelier


@pytest.mark.parametrize("game", ["climbing", "penalty"])
def test_an_optimist_ranks_payoffs_alike_and_prefers_the_best_pair_against_a_partner_at_random(ctde, game):
    games = ctde("ctde.games")
    count = 9
    env = games.ToldToAnOptimist(count, game)
    env.reset_joint(list(range(count)))
    first, second = np.divmod(np.arange(count), 3)
    result = env.step_joint(np.stack([first, second]))
    worth = result.extras["difference_reward"]
    np.testing.assert_array_equal(worth[0], worth[1])
    paid = result.rewards[0]
    assert paid.max() * 25 == games.BEST[game]
    np.testing.assert_array_equal(np.sign(paid[:, None] - paid), np.sign(worth[0][:, None] - worth[0]))
    best = paid == paid.max()
    for own in (first, second):
        plain, told = (np.array([x[own == action].mean() for action in range(3)]) for x in (paid, worth[0]))
        assert plain.argmax() not in own[best], "relative overgeneralisation: the average leads elsewhere"
        assert told.argmax() in own[best]


def test_an_experiment_writes_rows_and_a_plot(ctde, ray_session, tmp_path):
    from typer.testing import CliRunner

    path = tmp_path / "games.csv"
    arguments = ["matrix_games", "--game", "penalty", "--side", "optimistic", "--steps", "4096", "--output", str(path)]
    found = CliRunner().invoke(ctde("centralized").app, [*arguments, "--seed", "3", "--seed", "4"])
    assert found.exit_code in (0, 1), found.output
    rows = ctde("common.results").read(path)
    assert [(row["seed"], row["env_steps"]) for row in rows] == [("3", "4096"), ("4", "4096")]
    assert rows[0]["command"].endswith("--seed 3 --seed 4 --steps 4096")
    assert path.with_suffix(".png").stat().st_size > 5000
