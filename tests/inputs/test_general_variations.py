"""Lives, ends and payments in the general door that are no reported inputs, but of the same kinds."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.inputs.general_envs import ALL, GOES_ON, PAID, WHERE, Game, Minibatches, Says, Told, error_of, saw
from tests.support import largest_difference, parameters


def test_an_agent_that_comes_back_after_its_end():
    error_of(
        Says("a1", PAID, {"a0": True}),
        Says("a1", {"a1": 1.0}),
        Says("a0 a1", {"a1": 1.0}),
        match=WHERE.format(3, "a0") + " has ended and still got an observation",
    )


@pytest.mark.parametrize("terminateds, truncateds", [({"a1": True}, {}), ({}, {"a1": True})], ids=str)
def test_an_agent_that_ends_in_the_step_it_is_born_in_has_no_row(terminateds, truncateds, caplog):
    class Stillborn(Told):
        """A name of its own: the warning comes once for each name."""

    steps = [Says("a0 a1", {"a0": 1.0, "a1": 3.0}, terminateds, truncateds), Says("", {"a0": 2.0}, ALL)]
    Stillborn.__name__ = f"Stillborn{sorted(terminateds)}"
    game = Game(*steps, start="a0", env=Stillborn)
    with caplog.at_level(logging.WARNING):
        rows = game.rows()
    assert sorted(rows) == [("a0", 0, 0), ("a0", 0, 1)] and rows["a0", 0, 1].target == 2.0
    told = [r.getMessage() for r in caplog.records if "never acted" in r.getMessage()]
    assert len(told) == 1 and "agent 'a1': it was paid 3 but never acted" in told[0]
    assert [sorted(acted) for acted in game.envs[0].acted] == [["a0"], ["a0"]]


@pytest.mark.parametrize("kind", ["terminateds", "truncateds"])
def test_an_agent_that_appears_in_the_last_step_has_no_row(kind):
    game = Game(Says("a0", {"a0": 1.0}), Says("a0 a1", {"a0": 2.0}, **{kind: ALL}), start="a0")
    rows = game.rows()
    assert sorted(rows) == [("a0", 0, 0), ("a0", 0, 1)]
    assert rows["a0", 0, 1].target == (2.0 if kind == "terminateds" else 2.0 + 0.5 * saw(2, 0))
    assert sorted(game.rows()) == [("a0", 1, 0), ("a0", 1, 1)]


def test_agents_of_one_module_of_which_one_waits(monkeypatch):
    steps = [Says("a0", PAID), Says("a0", PAID), Says("a0 a1", PAID), Says("", PAID, ALL)]
    game = Game(*steps, policies={"team": ["a0", "a1"]}, iterate_all_minibatches=True, minibatch_size=3)
    episodes = game.sample()
    rows = game.rows(episodes)
    assert rows["a1", 0, 0].reward == 3.0 and rows["a1", 0, 0].target == 3.0 + 0.5 * saw(3, 1)
    assert sorted(rows) == [*(("a0", 0, t) for t in range(4)), ("a1", 0, 0), ("a1", 0, 3)]
    seen = Minibatches(monkeypatch)
    game.update(episodes)
    assert set(seen.uses()) == set(rows) and set(seen.uses().values()) == {2}


@pytest.mark.parametrize("told", [{}, {"__all__": False}], ids=["no __all__", "__all__ False"])
def test_all_agents_end_at_different_times(told):
    steps = [Says("a0 a1 a2", {"a0": 1.0, "a1": 1.0, "a2": 1.0}, told)]
    steps += [Says("a0 a2", {"a0": 1.0, "a1": 1.0, "a2": 1.0}, {"a1": True, **told}, told)]
    steps += [Says("a0 a2", {"a0": 1.0, "a2": 1.0}, told, {"a0": True, **told})]
    steps += [Says("a2", {"a2": 1.0}, told), Says("a2", {"a2": 1.0}, told, {"a2": True, **told})]
    game = Game(*steps, agents=("a0", "a1", "a2"))
    rows = game.rows()
    assert sorted(rows) == [(a, 0, t) for a, length in (("a0", 3), ("a1", 2), ("a2", 5)) for t in range(length)]
    assert rows["a1", 0, 1].target == 1.0 and rows["a0", 0, 2].target == 1.0 + 0.5 * saw(3, 0)
    assert rows["a2", 0, 4].truncated and rows["a2", 0, 4].target == 1.0 + 0.5 * saw(5, 2)
    assert game.metrics()["episode_len_mean"] == 5.0


@pytest.mark.parametrize("length", [5, 2, 1])
def test_nobody_is_to_act_in_the_middle(length):
    steps = [GOES_ON, Says("", {"a0": 2.0, "a1": 0.0}), Says("", {"a0": 4.0}), Says("a0 a1", {"a1": 8.0})]
    game, rows = Game(*steps, Says("", PAID, ALL)), {}
    for _ in range(-(-5 // length)):
        rows.update(game.rows(game.sample(num_timesteps=length)))
    mine = {key: row for key, row in rows.items() if key[1] == 0}
    assert sorted(mine) == [(agent, 0, t) for agent in ("a0", "a1") for t in (0, 1, 4)]
    assert (rows["a0", 0, 1].reward, rows["a1", 0, 1].reward) == (6.0, 8.0)
    assert rows["a0", 0, 1].target == 6.0 + 0.5 * saw(4, 0)


def test_an_update_on_a_fragment_in_which_nobody_acts():
    steps = [Says("", {"a0": 1.0}, {"a0": True, "__all__": False}), *[Says("", {}, {"__all__": False})] * 4]
    game = Game(*steps, Says("a1", {}, {"__all__": False}), Says("", {"a1": 1.0}, ALL), start="a0")
    game.sample(num_timesteps=1)
    before = parameters(game.learner)
    result = game.update(game.sample(num_timesteps=3))
    assert largest_difference(before, parameters(game.learner)) == 0.0
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 0


def test_terminated_and_truncated_is_terminated():
    rows = Game(GOES_ON, Says("a0 a1", PAID, {"a0": True}, {"a0": True, "a1": True})).rows()
    assert rows["a0", 0, 1].terminated and rows["a0", 0, 1].target == 1.0
    assert rows["a1", 0, 1].truncated and rows["a1", 0, 1].target == 1.0 + 0.5 * saw(2, 1)
    rows = Game(GOES_ON, Says("a0 a1", PAID, ALL, ALL)).rows()
    assert rows["a0", 0, 1].terminated and rows["a1", 0, 1].terminated


def test_an_agent_with_a_flag_of_its_own_keeps_it_where_the_episode_is_over():
    rows = Game(GOES_ON, Says("a0 a1", PAID, ALL, {"a1": True})).rows()
    assert rows["a0", 0, 1].target == 1.0 and rows["a1", 0, 1].target == 1.0 + 0.5 * saw(2, 1)
    rows = Game(GOES_ON, Says("a1", PAID, {"a0": True}, ALL)).rows()
    assert rows["a0", 0, 1].target == 1.0 and rows["a1", 0, 1].target == 1.0 + 0.5 * saw(2, 1)


def test_flags_and_rewards_of_numpy():
    yes, no = np.bool_(True), np.bool_(False)
    first = Says("a0 a1", {"a0": np.float32(1.5), "a1": np.array(2.5)}, {"a0": no, "__all__": no}, {"__all__": no})
    rows = Game(first, Says("a0 a1", {"a0": np.int64(2), "a1": True}, {"a0": yes}, {"a1": np.array(True)})).rows()
    assert [row.reward for row in rows.values()] == [1.5, 2.0, 2.5, 1.0]
    assert rows["a0", 0, 1].target == 2.0 and rows["a1", 0, 1].target == 1.0 + 0.5 * saw(2, 1)
    assert rows["a0", 0, 1].terminated and rows["a1", 0, 1].truncated


@pytest.mark.parametrize(
    "infos",
    [{"a0": None, "a1": {}}, {"a1": {"x": 1}}, {"__common__": {"x": 1}}, {"a1": {}, "a0": {"x": 1}, "a2": {"x": 1}}],
    ids=str,
)
def test_infos_of_absent_agents_and_none_change_nothing(infos):
    def play(infos):
        steps = [Says("a0", {"a0": 1.0}, infos=infos), Says("a0 a1", {"a0": 1.0}, infos=infos)]
        steps += [Says("a1", PAID, {"a0": True}, infos=infos), Says("", {"a1": 1.0}, ALL, infos=infos)]
        return Game(*steps, start="a0", agents=("a0", "a1", "a2")).rows()

    assert play(infos) == play({}) and len(play(infos)) == 5


def test_flags_of_an_agent_that_has_ended_change_nothing():
    steps = [Says("a1", PAID, {"a0": True}), Says("a1", {"a1": 1.0}, {"a0": True}, {"a0": True})]
    rows = Game(*steps, Says("", {"a1": 1.0}, {"a0": False, **ALL})).rows()
    assert sorted(rows) == [("a0", 0, 0), *(("a1", 0, t) for t in range(3))]
    assert rows["a0", 0, 0].target == 1.0 and rows["a1", 0, 2].target == 1.0


def test_an_agent_that_waits_terminates_by_itself():
    steps = [Says("a1", PAID), Says("a1", {"a1": 1.0}), Says("a1", {"a0": -4.0, "a1": 1.0}, {"a0": True})]
    rows = Game(*steps, Says("", {"a1": 1.0}, ALL)).rows()
    assert rows["a0", 0, 0].terminated and rows["a0", 0, 0].target == -3.0
    assert len(rows) == 5
