"""Cases 1 to 9 of the collection of reported inputs, through the general door: agents that die, join late, take turns.

The numbers are those of the collection. Cases that both doors have in common: see `test_reported_inputs`.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.inputs.general_envs import (
    ALL,
    GOES_ON,
    PAID,
    WHERE,
    Game,
    Minibatches,
    Says,
    Told,
    episodes_config,
    error_of,
    joined,
    lives,
    saw,
)

# --- cases 1 to 4: ends, births ---------------------------------------------------------------------------------------


def test_case_1_an_agent_ends_without_a_last_observation():
    game = Game(*lives(6, a0=1, a1=5))
    episodes = game.sample()
    rows = game.rows(episodes)
    assert sorted(rows) == [("a0", 0, 0), ("a0", 0, 1), *(("a1", 0, t) for t in range(6))]
    assert rows["a0", 0, 0].target == 1.0 + 0.5 * saw(1, 0)
    assert rows["a0", 0, 1].terminated and rows["a0", 0, 1].target == 1.0
    assert rows["a1", 0, 4].target == 1.0 + 0.5 * saw(5, 1) and rows["a1", 0, 5].target == 1.0
    batch = game.batch(episodes)
    present = {agent: batch.stream(agent).present[:, 0].tolist() for agent in ("a0", "a1")}
    assert present == {"a0": [True] * 2 + [False] * 4, "a1": [True] * 6}
    game.update(episodes)
    assert [sorted(acted) for acted in game.envs[0].acted] == [["a0", "a1"]] * 2 + [["a1"]] * 4


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_case_1_in_fragments(length):
    game, found = Game(*lives(6, a0=1, a1=5)), {}
    for _ in range(-(-12 // length)):  # two episodes
        rows = game.rows(game.sample(num_timesteps=length))
        assert not found.keys() & rows.keys()
        found.update(rows)
    expected = {(agent, e, t) for e in (0, 1) for agent, n in (("a0", 2), ("a1", 6)) for t in range(n)}
    assert {key for key in found if key[1] < 2} == expected
    for episode in (0, 1):
        assert found["a0", episode, 1].target == found["a1", episode, 5].target == 1.0  # no bootstrap
        assert found["a0", episode, 0].target == 1.0 + 0.5 * saw(1, 0)


@pytest.mark.parametrize("flags", ["own", "with __all__ False"])
def test_case_2_one_terminates_and_one_is_truncated_in_the_last_step(flags):
    told = {} if flags == "own" else {"__all__": False}
    last = Says("a0 a1", {"a0": 3.0, "a1": 4.0}, {"a0": True, **told}, {"a1": True, **told})
    game = Game(GOES_ON, GOES_ON, last, lambda_=1.0)
    rows = game.rows()
    end, cut = rows["a0", 0, 2], rows["a1", 0, 2]
    assert (end.terminated, end.truncated, end.target) == (True, False, 3.0)
    assert (cut.terminated, cut.truncated, cut.target) == (False, True, 4.0 + 0.5 * saw(3, 1))
    assert rows["a0", 0, 0].target == 1.0 + 0.5 * (1.0 + 0.5 * 3.0)
    assert rows["a1", 0, 0].target == 1.0 + 0.5 * (1.0 + 0.5 * (4.0 + 0.5 * saw(3, 1)))
    assert game.metrics()["num_episodes_lifetime"] == 1.0
    assert {key[1] for key in game.rows(game.sample(num_timesteps=6))} == {1, 2}  # two more of three steps each


@pytest.mark.parametrize("length", [10, 4, 3])
def test_case_3_nobody_lives_for_a_while(length):
    steps = [Says("a0", {"a0": 1.0}, {"__all__": False})] * 2 + [Says("", {"a0": 1.0}, {"a0": True, "__all__": False})]
    steps += [Says("", {}, {"__all__": False}), Says("a1", {}, {"__all__": False})]
    steps += [Says("a1", {"a1": 2.0}, {"__all__": False})] * 4 + [Says("", {"a1": 2.0}, {"a1": True, **ALL})]
    game, rows = Game(*steps, start="a0"), {}
    for _ in range(-(-10 // length)):
        rows.update(game.rows(game.sample(num_timesteps=length)))
    expected = {("a0", 0, t) for t in range(3)} | {("a1", 0, t) for t in range(5, 10)}
    assert {key for key in rows if key[1] == 0} == expected
    assert rows["a0", 0, 2].target == 1.0 and rows["a1", 0, 9].target == 2.0
    assert [sorted(acted) for acted in game.envs[0].acted][:10] == [["a0"]] * 3 + [[]] * 2 + [["a1"]] * 5
    metrics = game.metrics()
    assert metrics["num_episodes_lifetime"] == 1.0 and metrics["episode_len_mean"] == 10.0


def test_case_4_rewards_before_the_first_observation_belong_to_the_first_step(caplog):
    steps = [Says("a0", {"a0": 1.0}), Says("a0", {"a0": 1.0, "a1": 5.0}), Says("a0 a1", {"a0": 1.0, "a1": 5.0})]
    steps += [Says("", {"a0": 0.5, "a1": 0.5}, ALL)]
    game = Game(*steps, start="a0")
    with caplog.at_level(logging.WARNING):
        episodes = game.sample()
        rows = game.rows(episodes)
    assert sum(row.reward for row in rows.values()) == 14.0
    assert rows["a1", 0, 3].reward == rows["a1", 0, 3].target == 10.5
    assert sorted(rows) == [("a0", 0, t) for t in range(4)] + [("a1", 0, 3)]
    assert game.metrics()["agent_episode_returns_mean"] == {"a0": 3.5, "a1": 10.5}
    assert not [record for record in caplog.records if "paid" in record.getMessage()]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_case_4_in_fragments(length):
    steps = [Says("a0", {"a0": 1.0}), Says("a0", {"a0": 1.0, "a1": 5.0}), Says("a0 a1", {"a0": 1.0, "a1": 5.0})]
    game = Game(*steps, Says("", {"a0": 0.5, "a1": 0.5}, ALL), start="a0")
    rows = {}
    while not any(key[1] == 1 for key in rows):
        rows.update(game.rows(game.sample(num_timesteps=length)))
    assert sum(row.reward for key, row in rows.items() if key[1] == 0) == 14.0
    assert rows["a1", 0, 3].reward == 10.5


# --- case 5: contradicting answers ------------------------------------------------------------------------------------


def test_case_5_a_reward_of_zero_for_an_agent_that_has_ended():
    error_of(
        Says("a1", PAID, {"a0": True}),
        Says("a1", {"a0": 0.0, "a1": 1.0}),
        match=WHERE.format(2, "a0") + r" has ended and still got the reward 0.0; leave an agent out of all dicts",
    )


def test_case_5_an_observation_for_an_agent_that_has_ended():
    error_of(
        Says("a1", PAID, {"a0": True}),
        Says("a0 a1", {"a1": 1.0}),
        match=WHERE.format(2, "a0") + " has ended and still got an observation; leave an agent out",
    )


def test_case_5_an_agent_that_acts_and_is_not_paid():
    error_of(
        GOES_ON,
        Says("a0 a1", {"a0": 1.0}),
        match=WHERE.format(2, "a1") + " acted but got no reward; return a number for every agent that acted",
    )


def test_case_5_an_agent_that_is_not_paid_in_its_last_step():
    error_of(Says("", {"a0": 1.0}, ALL), match=WHERE.format(1, "a1") + " acted but got no reward")


def test_case_5_who_gets_no_observation_waits_and_its_step_is_completed_later():
    steps = [Says("a1", {"a0": 1.0, "a1": 1.0}), Says("a1", {"a0": 2.0, "a1": 1.0}), Says("a0 a1", {"a1": 1.0})]
    game = Game(*steps, Says("a0 a1", PAID, {}, ALL))
    rows = game.rows()
    assert sorted(rows) == [("a0", 0, 0), ("a0", 0, 3), *(("a1", 0, t) for t in range(4))]
    assert rows["a0", 0, 0].reward == 3.0 and rows["a0", 0, 0].target == 3.0 + 0.5 * saw(3, 0)
    assert rows["a0", 0, 3].truncated and rows["a0", 0, 3].target == 1.0 + 0.5 * saw(4, 0)
    assert [sorted(acted) for acted in game.envs[0].acted] == [["a0", "a1"], ["a1"], ["a1"], ["a0", "a1"]]


def test_case_5_the_episode_terminates_while_an_agent_waits():
    steps = [
        Says("a1", {"a0": 1.0, "a1": 1.0}),
        Says("a1", {"a0": 2.0, "a1": 1.0}),
        Says("", {"a0": 4.0, "a1": 1.0}, ALL),
    ]
    rows = Game(*steps).rows()
    assert rows["a0", 0, 0].terminated and rows["a0", 0, 0].reward == rows["a0", 0, 0].target == 7.0


@pytest.mark.parametrize("cut", [ALL, {"a0": True}], ids=str)
def test_case_5_truncated_while_it_waits(cut):
    error_of(
        Says("a1", PAID),
        Says("a1", {"a0": 0.0, "a1": 1.0}, {}, cut),
        match=WHERE.format(2, "a0") + " was truncated without a last observation.*return one, or let it terminate",
    )


# --- cases 6, 8, 9: use of rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", [4, 5, 6])
def test_case_6_fragments_of_5_steps_and_a_death_beside_their_ends(death, monkeypatch):
    game = Game(
        *lives(12, a0=11, a1=death - 1),
        iterate_all_minibatches=True,
        minibatch_size=4,
        runners={"rollout_fragment_length": 5},
    )
    seen = Minibatches(monkeypatch)
    for _ in range(2):
        game.envs[0].acts.clear()
        episodes = [fragment for _ in range(3) for fragment in game.sample(num_timesteps=5)]
        seen.all.clear()
        game.update(episodes)
        uses = seen.uses()
        # Two epochs, nothing left out.
        assert set(uses.values()) == {2} and sorted(uses) == sorted(game.envs[0].acts)
        assert sum(agent == "a0" for agent, *_ in uses) == 15


def test_case_6_by_a_whole_algorithm(monkeypatch, ray_session):
    config = episodes_config(
        Told,
        {"steps": lives(12, a0=11, a1=4)},
        num_envs=1,
        runners={"rollout_fragment_length": 5},
        iterate_all_minibatches=True,
        train_batch_size_per_learner=15,
        minibatch_size=4,
    )
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    seen = Minibatches(monkeypatch)
    algorithm = config.build_algo()
    try:
        env = algorithm.env_runner.env.envs[0]
        for _ in range(2):
            env.acts.clear()
            seen.all.clear()
            result = algorithm.train()
            uses = seen.uses()
            assert set(uses.values()) == {2} and sorted(uses) == sorted(env.acts)
            assert sum(agent == "a0" for agent, *_ in uses) == 15
    finally:
        algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 30
    assert result["env_runners"]["agent_episode_returns_mean"] == {"a0": 12.0, "a1": 5.0}


@pytest.mark.parametrize("options", [{}, {"iterate_all_minibatches": True}, {"shuffle_batch_per_epoch": True}], ids=str)
def test_case_8_no_row_is_used_more_often_than_there_are_epochs(options, monkeypatch):
    game = Game(*lives(20, a0=19, a1=1), minibatch_size=32, train_batch_size_per_learner=200, **options)
    seen = Minibatches(monkeypatch)
    episodes = game.sample(num_timesteps=200)
    game.update(episodes)
    uses = seen.uses()
    assert max(uses.values()) <= 2
    if "iterate_all_minibatches" in options:
        assert set(uses.values()) == {2}
        assert sum(key[0] == "a0" for key in uses) == 200 and sum(key[0] == "a1" for key in uses) == 20


@pytest.mark.parametrize("policies", [None, {"team": ["a0", "a1", "a2"]}], ids=["own modules", "one module"])
@pytest.mark.parametrize("sizes", [[48], [7, 5, 11, 1]], ids=str)
def test_case_9_the_agents_of_a_row_agree_in_every_minibatch(sizes, policies, monkeypatch):
    def answers(length: int, born: int, death: int) -> list[Says]:
        """a1 is born in step `born`; a2 dies in step `death`."""
        steps = []
        for t in range(length):
            acting = ["a0"] + ["a1"] * (t >= born) + ["a2"] * (t <= death)
            staying = ["a0"] + ["a1"] * (t + 1 >= born) + ["a2"] * (t < death)
            over = t == length - 1
            steps.append(
                Says("" if over else " ".join(staying), dict.fromkeys(acting, 1.0), {"a2": t == death, "__all__": over})
            )
        return steps

    game = Game(
        *answers(8, 3, 4),
        agents=("a0", "a1", "a2"),
        start="a0 a2",
        policies=policies,
        num_envs=2,
        iterate_all_minibatches=True,
        shuffle_batch_per_epoch=True,
        minibatch_size=5,
    )
    second = game.envs[1]
    second.steps, second.episode = answers(5, 1, 0), 99  # episodes of this one: 100, 101, …
    seen = Minibatches(monkeypatch)
    for size in sizes:
        for env in game.envs:
            env.acts.clear()
        episodes = game.sample(num_timesteps=2 * size)
        seen.all.clear()
        game.update(episodes)
        uses = seen.uses()
        assert set(uses.values()) == {2} and set(uses) == {act for env in game.envs for act in env.acts}


def test_case_9_rows_out_of_place_are_found(monkeypatch):
    game = Game(*lives(6, a0=5, a1=3))
    rows = game.learner._joint_rows([game.batch()])
    rows.modules["a0"].obs[:] = rows.modules["a0"].obs.roll(1, dims=1)
    assert any(len(set(row.values())) > 1 for row in joined(rows))


# --- case 7: turns ----------------------------------------------------------------------------------------------------


def turns(length: int) -> list[Says]:
    """a0 and a1 move in turn; the mover is paid 1."""
    steps = [Says(f"a{(t + 1) % 2}", {f"a{t % 2}": 1.0}) for t in range(length - 1)]
    return [*steps, Says("", {f"a{(length - 1) % 2}": 1.0}, ALL)]


@pytest.mark.parametrize("length", [19, 5, 4, 1])
def test_case_7_two_players_in_turn(length):
    game = Game(*turns(19), start="a0")
    found = {}
    for _ in range(-(-19 // length)):
        episodes = game.sample(num_timesteps=length)
        batch = game.batch(episodes)
        assert (sum(stream.present for stream in batch.streams()) <= 1).all()  # never two in one row
        rows = game.rows(episodes)
        assert not rows.keys() & found.keys()
        found.update(rows)
    first = {key: row for key, row in found.items() if key[1] == 0}
    assert set(first) == {(f"a{t % 2}", 0, t) for t in range(19)}
    for (agent, _, t), row in first.items():
        assert row.reward == 1.0
        assert row.target == (1.0 if t >= 17 else 1.0 + 0.5 * saw(t + 2, int(agent[1]))), (agent, t)
        assert row.terminated == (t >= 17)
    metrics = game.metrics()
    assert metrics["agent_episode_returns_mean"] == {"a0": 10.0, "a1": 9.0}
    assert metrics["episode_return_mean"] == 19.0 and metrics["episode_len_mean"] == 19.0


def test_case_7_in_training(monkeypatch):
    game = Game(*turns(19), start="a0", iterate_all_minibatches=True, minibatch_size=6)
    seen = Minibatches(monkeypatch)
    result = game.update(game.sample(num_episodes=3))
    uses = seen.uses()
    assert len(uses) == 57 and set(uses.values()) == {2}
    assert max(len(row) for minibatch in seen.all for row in minibatch) == 1
    assert np.isfinite([result[agent]["policy_loss"] for agent in ("a0", "a1")]).all()
