"""Cases 10 to 20 of the collection of reported inputs, through the general door.

The numbers are those of the collection. Wrong answers (cases 21 and 22): see `test_general_answers`.
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
    ALL,
    EPISODES,
    PAID,
    Game,
    Herd,
    Says,
    Told,
    episodes_config,
    general_training,
    lives,
    order_and_numbers,
    value,
    valued,
)
from tests.inputs.test_reported_inputs import COUPLED, Half, Masked, OneLegal, TurnsNaN
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

# --- cases 10 to 15: as in the fast door ------------------------------------------------------------------------------


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


# --- case 19: PettingZoo ----------------------------------------------------------------------------------------------


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


# --- case 20: names ---------------------------------------------------------------------------------------------------


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
