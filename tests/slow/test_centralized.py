"""The bars of `benchmarks/centralized.py`, one seed each: critics of the team, credit, budgets, diversity, talking."""

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow_ctde, pytest.mark.timeout(900)]
NAMES = ("games", "spread", "timing", "budget", "diversity", "speaker")


@pytest.fixture(scope="module")
def ctde():
    """{name: module of `benchmarks/ctde`}."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield {name: importlib.import_module(f"ctde.{name}") for name in NAMES}


@pytest.mark.parametrize("game", ["climbing", "penalty"])
def test_an_optimist_finds_the_best_pair_of_actions_and_others_do_not(ray_session, ctde, game):
    """Three runs of 100,000 env steps each."""
    games = ctde["games"]
    found = {side: games.learn(game, side, 0, games.STEPS) for side in games.SIDES}
    assert found["optimistic"]["reached"], found
    assert not found["independent"]["reached"] and not found["central"]["reached"], found


def test_a_central_critic_learns_to_cover_the_landmarks(ray_session, ctde):
    """500,000 env steps."""
    spread = ctde["spread"]
    (row,) = spread.measure("central", 0, spread.STEPS)
    assert row["env_steps"] <= 500_000
    assert row["greedy_100"] >= row["bar"] == -17.5, row


def test_a_central_critic_costs_little_at_eight_agents(ray_session, ctde):
    timing = ctde["timing"]
    rows = timing.measure(8, timing.ROUNDS, 0)
    medians = {row["side"]: row["median"] for row in rows}
    assert medians[timing.BASE] == 1
    assert all(ratio <= 1.5 for side, ratio in medians.items() if side.startswith("central")), medians


def test_a_budget_of_collisions_is_kept(ray_session, ctde):
    """Within a tenth of the limit at the end, from above and from below; without a price there are more."""
    budget = ctde["budget"]
    (row,) = budget.measure(budget.FOUND, 0, budget.STEPS)
    (free,) = budget.measure("0", 0, budget.STEPS)
    assert abs(row["off"]) <= budget.WITHIN == 0.1, row
    assert free["collisions"] > 1.5 * row["limit"], free


@pytest.mark.parametrize("place", range(3))
def test_diversity_is_driven_to_a_target(ray_session, ctde, place):
    diversity = ctde["diversity"]
    (row,) = diversity.measure(diversity.TARGETS[place], diversity.SEED, diversity.STEPS)
    assert abs(row["off"]) <= 0.1, row


def test_speaker_and_listener_come_to_talk(ray_session, ctde):
    """Who hears random words instead walks to the wrong place."""
    speaker = ctde["speaker"]
    (row,) = speaker.measure("central, signalling", 0, speaker.STEPS)
    assert row["greedy"] >= row["bar"] == -24, row
    assert row["random_speaker"] < row["greedy"] - 10, row
