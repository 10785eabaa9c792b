"""Cases of the collection of reported inputs, through the general door: agents that die, join late and take turns.

The numbers are those of the collection. Cases that both doors have in common: see `test_reported_inputs`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.utils import flatten_dict

from tests.inputs.general_envs import (
    EPISODES,
    Game,
    Herd,
    Minibatches,
    Says,
    Told,
    episodes_config,
    general_training,
    joined,
    order_and_numbers,
    value,
    valued,
)
from tests.inputs.test_reported_inputs import COUPLED, Half, Masked, NoBase, OneLegal, TurnsNaN
from tests.support import (
    box,
    declared_config,
    discrete,
    largest_difference,
    optimizer_states,
    parameters,
    runner_metrics,
    update,
)
from thrust_rllib import MLPModule

ALL = {"__all__": True}
PAID = {"a0": 1.0, "a1": 1.0}
GOES_ON = Says("a0 a1", PAID)


def lives(length: int, **last_steps: int) -> list[Says]:
    """Agents that act from step 0 (a0, a1) to the given one, where they terminate; everybody is paid 1 a step."""
    steps = []
    for t in range(length):
        acting = [agent for agent, last in last_steps.items() if t <= last]
        staying = [agent for agent, last in last_steps.items() if t < last]
        ended = {agent: True for agent in acting if agent not in staying}
        steps.append(Says(" ".join(staying), dict.fromkeys(acting, 1.0), {**ended, "__all__": t == length - 1}))
    return steps


def saw(step: int, agent: int) -> float:
    """The value of what agent number `agent` saw in a step."""
    return float(value(np.array([0, step, agent], np.float64)))


# ------------------------------------------------------------------------------------------- cases 1 to 4: ends, births


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


# ------------------------------------------------------------------------------------- case 5: contradicting answers

WHERE = r"environment 'Told', environment index 1, step {} of its episode: agent '{}'"


def error_of(*steps: Says, match: str, **options) -> None:
    """The second of two environments answers these steps; the first one never ends."""
    game = Game(*steps, num_envs=2, **options)
    game.envs[0].steps = [GOES_ON] * 100
    game.envs[0].start = "a0 a1"
    with pytest.raises(ValueError, match=match):
        game.sample(num_timesteps=40)


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


# ----------------------------------------------------------------------------------------- cases 6, 8, 9: use of rows


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


# --------------------------------------------------------------------------------------------------- case 7: turns


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


# ------------------------------------------------------------------------- cases 10 to 15: as in the fast door


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "cut"])
def test_case_10_targets_of_three_kinds_of_end(ends, lambda_):
    last = Says("a0 a1", {"a0": 3, "a1": 3}, *(({}, ALL) if ends == "truncated" else (ALL, {})))
    game = Game(
        Says("a0 a1", {"a0": 1, "a1": 1}),
        Says("a0 a1", {"a0": 2, "a1": 2}),
        last,
        gamma=0.9,
        lambda_=lambda_,
        module=Half,
    )
    rows = game.rows(game.sample(num_timesteps=2 if ends == "cut" else 3))
    end = 3.0 if ends == "terminated" else 3.0 + 0.9 * 0.5
    if ends == "cut":
        expected = [1 + 0.9 * 0.5, 2 + 0.9 * 0.5] if lambda_ == 0 else [1 + 0.9 * (2 + 0.9 * 0.5), 2 + 0.9 * 0.5]
    elif lambda_ == 0:
        expected = [1 + 0.9 * 0.5, 2 + 0.9 * 0.5, end]
    else:
        expected = [1 + 0.9 * (2 + 0.9 * end), 2 + 0.9 * end, end]
    for agent in ("a0", "a1"):
        mine = [rows[agent, 0, t] for t in range(len(expected))]
        assert [row.target for row in mine] == pytest.approx(expected, abs=1e-6)
        assert [row.advantage for row in mine] == pytest.approx([x - 0.5 for x in expected], abs=1e-6)
    assert len(rows) == 2 * len(expected)


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "team", False])
def test_case_11_episodes_of_one_step(scope):
    config = episodes_config(Told, {"steps": [Says("", PAID, ALL)]}, standardize_advantages=scope)
    runner, learner, (result,) = general_training(config)
    (batch,) = learner._batches(runner.sample(num_timesteps=64))
    assert all(stream.terminated[stream.present].all() for stream in batch.streams()) and batch.bootstrap_rows.size == 0
    assert learner._joint_rows([batch]).advantages.isfinite().all()
    assert all(np.isfinite(v) for agent in ("a0", "a1") for v in flatten_dict(result[agent]).values())
    assert runner_metrics(runner)["episode_len_mean"] == 1.0


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "team"])
def test_case_11_one_row_for_one_agent(scope):
    """a1 acts once, in the first of 64 steps."""
    config = episodes_config(
        Told, {"steps": lives(64, a0=63, a1=0)}, num_envs=1, standardize_advantages=scope, iterate_all_minibatches=True,
        **COUPLED,
    )  # fmt: skip
    _, learner, (result,) = general_training(config)
    for agent in ("a0", "a1"):
        assert all(np.isfinite(v) for v in flatten_dict(result[agent]).values())
    if scope != "team":
        assert result["a1"]["policy_loss"] == 0.0
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())


@pytest.mark.parametrize("options", [{}, {"critic_lr": 1e-2}], ids=["one optimizer", "critic_lr"])
def test_case_12_a_nan_in_minibatch_3(caplog, options):
    config = episodes_config(
        Told, {"steps": lives(20, a0=19, a1=15)}, iterate_all_minibatches=True, shuffle_batch_per_epoch=True,
        **options, **COUPLED,
    )  # fmt: skip
    model = {"fcnet_hiddens": [8]}
    kinds = {"a0": TurnsNaN, "a1": MLPModule}
    config.rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={m: RLModuleSpec(module_class=k, model_config=model) for m, k in kinds.items()}
        )
    )
    with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
        _, learner, (first, second) = general_training(config, updates=2)
    assert first["__all_modules__"]["num_non_finite_minibatches"] == 1
    assert first["__all_modules__"]["num_minibatch_steps"] == 7 == second["__all_modules__"]["num_minibatch_steps"] - 1
    assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())
    assert all(np.isfinite(x).all() for state in optimizer_states(learner).values() for x in state)
    for name, optimizer in learner._named_optimizers.items():  # nobody stepped, on either optimizer
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {15}, name
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(told) == 1 and "module 'a0'" in told[0]


def test_case_13_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="policies_to_train is empty.*at least one module, or leave it None"):
        episodes_config("debug/random_observations", trained=[]).validate()


class Switch:
    """Freezes a1 while `frozen`."""

    frozen = True

    def __call__(self, module_id, batch=None):
        return not (self.frozen and module_id == "a1")


@pytest.mark.parametrize("chosen", [["a0"], Switch()], ids=["list", "callable"])
def test_case_13_freeze_then_unfreeze(chosen):
    config = episodes_config(Told, {"steps": lives(20, a0=19, a1=15)}, trained=chosen, **COUPLED)
    runner, learner, _ = general_training(config, updates=0)
    before, moments = parameters(learner), optimizer_states(learner)
    for _ in range(2):
        update(learner, runner.sample(num_timesteps=64))
    assert largest_difference(before["a1"], parameters(learner)["a1"]) == 0.0
    assert largest_difference(before["a0"], parameters(learner)["a0"]) > 1e-4
    frozen = {name: x for name, x in optimizer_states(learner).items() if name.startswith("a1")}
    assert frozen == {name: moments[name] for name in frozen}
    if callable(chosen):
        learner.config.policies_to_train.frozen = False
        update(learner, runner.sample(num_timesteps=64))
        assert largest_difference(before["a1"], parameters(learner)["a1"]) > 1e-4


@pytest.mark.parametrize("coupled", [{}, COUPLED], ids=["plain", "coupled"])
@pytest.mark.parametrize("explore", [True, False])
def test_case_14_a_different_space_for_every_agent(coupled, explore):
    actions = [discrete(2), gym.spaces.Discrete(3, start=1), gym.spaces.MultiDiscrete([2, 3]), box(2, 1.0)]
    config = declared_config(
        [box(3), box(4), box(5), box(3)], actions, runners={**EPISODES, "explore": explore}, **coupled
    )
    _, learner, (result,) = general_training(config)  # `Declared` asserts that each action is in its space
    for agent in ("a0", "a1", "a2", "a3"):
        assert all(np.isfinite(v) for v in flatten_dict(result[agent]).values())


def test_case_14_multi_binary_is_an_early_error_that_names_the_agent():
    config = declared_config([box()] * 2, [discrete(), gym.spaces.MultiBinary(3)], runners=EPISODES)
    with pytest.raises(ValueError, match="agent 'a1': action space MultiBinary.* needed: Discrete"):
        config.validate()


@pytest.mark.parametrize("explore", [True, False])
def test_case_15_one_legal_action_for_one_agent_only(explore):
    config = episodes_config(OneLegal, iterate_all_minibatches=True, runners={"explore": explore}, **COUPLED)
    runner, _, results = general_training(config, updates=2)
    for result in results:
        assert all(np.isfinite(v) for agent in ("a0", "a1") for v in flatten_dict(result[agent]).values())
        assert result["a0"]["entropy"] == 0.0 and result["a0"]["approx_kl"] == 0.0
        assert result["a1"]["entropy"] > 0.5
    runner.sample(num_episodes=3)  # `OneLegal` asserts that the action is the legal one


@pytest.mark.parametrize("keys, width", [(("observations",), 2), (("goal", "observation"), 4)], ids=str)
def test_case_15_a_mask_is_honoured_whatever_lies_beside_it(keys, width):
    config = episodes_config(Masked, {"legal": [0, 1, 0, 1], "keys": keys})
    runner, learner, _ = general_training(config)
    (batch,) = learner._batches(runner.sample(num_timesteps=60))
    assert batch.stream("a1").obs.shape[2:] == (width,)
    taken = {agent: np.unique(batch.stream(agent).actions[batch.stream(agent).present]) for agent in ("a0", "a1")}
    assert taken["a1"].tolist() == [1, 3] and taken["a0"].tolist() == [0, 1, 2, 3]


def test_case_15_nobody_acts_on_the_mask_of_a_last_observation():
    runner, learner, _ = general_training(episodes_config(Masked, {"legal": [0, 1, 1], "stuck": 5}))
    learner._batches(runner.sample(num_timesteps=40))
    assert sum(env.unwrapped.env.illegal for env in runner.env.envs) == 0


# ------------------------------------------------------------------------------------- case 19: PettingZoo


def herd(seed=3, **env_config):
    """(runner, learner) of `Herd`."""
    config = valued(episodes_config(Herd, env_config, seed=seed, num_envs=1, gamma=0.5, lambda_=0.0))
    runner, learner, _ = general_training(config, updates=0)
    return runner, learner


def test_case_19_a_mixed_end_is_one_end_and_a_late_agent_has_its_space():
    runner, learner = herd()
    assert runner.env.possible_agents == ["wolf", "dog", "cat"]
    assert runner.env.observation_spaces["cat"] == box(3) and runner.env.action_spaces["cat"] == discrete()
    episodes = runner.sample(num_episodes=2)
    assert [(len(episode), episode.is_done) for episode in episodes] == [(4, True)] * 2
    (batch,) = learner._batches(episodes)
    rows = learner._joint_rows([batch])
    streams = {agent: batch.stream(agent) for agent in ("wolf", "dog", "cat")}
    assert {agent: stream.present[:, 0].tolist() for agent, stream in streams.items()} == {
        "wolf": [True] * 8,
        "dog": [True] * 8,
        "cat": [False, False, True, True] * 2,
    }
    ends = [False, False, False, True] * 2
    assert streams["wolf"].terminated[:, 0].tolist() == ends and not streams["wolf"].truncated.any()
    assert streams["dog"].truncated[:, 0].tolist() == ends and not streams["dog"].terminated.any()
    targets = dict(zip(batch.agents, rows.value_targets, strict=True))
    for last in (3, 7):
        (number,) = np.flatnonzero(batch.bootstrap_rows == last)
        following = streams["dog"].bootstrap_obs[number]
        assert following[1] == 4.0
        assert targets["wolf"][last] == 1.0
        assert float(targets["dog"][last]) == pytest.approx(2.0 + 0.5 * value(following.astype(float)), abs=1e-6)


def test_case_19_equal_seeds_give_equal_first_observations():
    seen = [herd(seed)[0].sample(num_episodes=1)[0].agent_episodes["wolf"].observations[0] for seed in (3, 3, 4)]
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()


def test_case_19_an_image():
    runner, _ = herd(render_mode="rgb_array")
    runner.sample(num_timesteps=1)
    (image,) = runner.env.render()
    assert image.dtype == np.uint8 and image.shape == (4, 4, 3) and image.max() == 1  # one step played


def test_case_19_order_and_numbers_do_not_depend_on_the_hash_seed():
    """Two seeds beside the one of this process."""
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from tests.inputs.general_envs import order_and_numbers as x; print(*x(), sep='|')",
            ],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    zoo, rllib = order_and_numbers()
    seen = {process.communicate(timeout=120)[0] for process in runs}
    assert [process.returncode for process in runs] == [0, 0] and seen == {f"{zoo}|{rllib}\n"}
    agents = "('cat', 'dog', 'wolf') ['cat', 'dog', 'wolf']"  # a joint batch goes module by module, by name
    assert zoo.startswith(agents) and rllib.startswith(agents) and zoo != rllib


# ------------------------------------------------------------------------------------- cases 20 to 22


def test_case_20_agents_named_by_numbers():
    steps = [Says("1", {0: 1.0, 1: 1.0}, {0: True}), Says("", {1: 2.0}, ALL)]
    config = episodes_config(Told, {"steps": steps, "agents": [0, 1]}, **COUPLED)
    runner, learner, (result,) = general_training(config)
    assert sorted(learner.module.keys()) == ["0", "1"]
    (batch,) = learner._batches(runner.sample(num_timesteps=10))
    assert batch.agents == (0, 1) and batch.stream(1).module_id == "1"
    metrics = runner_metrics(runner)
    assert metrics["agent_episode_returns_mean"] == {"0": 1.0, "1": 3.0}
    assert set(metrics["num_agent_steps_sampled"]) == {"0", "1"} <= set(result)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("nan observation", "environment 'Spoiled', environment index 1 .*agent 'a1' got an observation.*step 3 .*nan"),
        ("outside", "environment 'Spoiled', environment index 1 .*agent 'a1' got an observation.*step 3 .*2000"),
        ("nan reward", "environment 'Spoiled', environment index 1 .*agent 'a1' got the reward nan.*step 2 "),
    ],
)
def test_case_21_bad_numbers_name_agent_environment_and_step(fault, message):
    game = Game(*lives(6, a0=5, a1=5), num_envs=2, env=Spoiled)
    game.envs[1].fault = fault
    before = parameters(game.learner)
    with pytest.raises(ValueError, match=message):
        game.update(game.sample(num_timesteps=16))
    assert largest_difference(before, parameters(game.learner)) == 0.0
    game.envs[1].fault = None
    game.update(game.sample(num_timesteps=40, force_reset=True))


class Spoiled(Told):
    """What a1 is shown or paid in step 3 is wrong."""

    fault = None

    def step(self, action_dict):
        seen, rewards, *rest = super().step(action_dict)
        if self.t == 3 and self.fault == "nan reward":
            rewards = {**rewards, "a1": float("nan")}
        if self.t == 3 and self.fault in ("nan observation", "outside"):
            seen["a1"][1] = np.nan if self.fault == "nan observation" else 2000.0
        return seen, rewards, *rest


def test_case_22_a_forgotten_base_class():
    with pytest.raises(TypeError, match="NoBase, which is no known environment; needed: a class derived from JointEnv"):
        episodes_config(NoBase).validate()


class Wrong(Told):
    """Answers in a wrong form."""

    def __init__(self, config):
        self.form = config["form"]
        super().__init__({"steps": [GOES_ON] * 10})

    def step(self, action_dict):
        seen, rewards, terminateds, truncateds, infos = super().step(action_dict)
        return {
            "lists": (list(seen.values()), rewards, terminateds, truncateds, infos),
            "four": (seen, rewards, terminateds, infos),
            "none": None,
            "bool": (seen, rewards, False, False, infos),
            "number": (seen, 1.0, terminateds, truncateds, infos),
            "unknown": ({**seen, "a7": seen["a0"]}, rewards, terminateds, truncateds, infos),
        }[self.form]


@pytest.mark.parametrize(
    "form, message",
    [
        ("lists", "'Wrong', environment index 0, step 1 .*returned observations as a list; return a dict agent -> val"),
        ("four", "'Wrong', environment index 0, step 1 .*step returned 4 values; return .observations, rewards, ter"),
        ("none", "'Wrong', environment index 0, step 1 .*step returned a NoneType; return .observations, rewards, te"),
        ("bool", "'Wrong', environment index 0, step 1 .*returned terminateds as a bool; return a dict agent -> val"),
        ("number", "'Wrong', environment index 0, step 1 .*returned rewards as a float; return a dict agent -> value"),
        ("unknown", "'Wrong', environment index 0, step 1 .*agent 'a7' is not in possible_agents .*'a0', 'a1'"),
    ],
)
def test_case_22_wrong_answers_say_what_to_return(form, message):
    config = episodes_config(Wrong, {"form": form})
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        general_training(config)


# --------------------------------------------------------------------------------- variations of the same kinds


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


@pytest.mark.parametrize("what", ["rewards", "observations"])
def test_an_unknown_agent(what):
    class Stranger(Told):
        def step(self, action_dict):
            seen, rewards, *rest = super().step(action_dict)
            (rewards if what == "rewards" else seen)["a7"] = 1.0 if what == "rewards" else seen["a0"]
            return seen, rewards, *rest

    game = Game(Says("a0 a1", dict(PAID)), env=Stranger)
    with pytest.raises(ValueError, match=r"'Stranger', environment index 0, step 1 .*agent 'a7' is not in possible_ag"):
        game.sample()


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


def test_a_reward_that_is_infinite():
    game = Game(Says("a0 a1", {"a0": float("inf"), "a1": 1.0}), Says("", PAID, ALL))
    with pytest.raises(ValueError, match="agent 'a0' got the reward inf for what it did at step 0 of its episode"):
        game.rows()


def test_nobody_in_the_first_step():
    with pytest.raises(ValueError, match="'Told', environment index 0.*reset showed no agent anything"):
        Game(GOES_ON, start="").sample()


def test_dicts_that_the_environment_uses_again():
    class SameDicts(Told):
        def __init__(self, config):
            super().__init__(config)
            self.same = [{} for _ in range(5)]

        def step(self, action_dict):
            for mine, new in zip(self.same, super().step(action_dict), strict=True):
                mine.clear()
                mine.update(new)
            action_dict.clear()
            return tuple(self.same)

    steps = [GOES_ON, Says("a1", PAID, {"a0": True}), Says("", {"a1": 1.0}, ALL)]
    assert Game(*steps, env=SameDicts).rows() == Game(*steps).rows()
