"""The entropy guard: what is counted, how the training ends, and how it goes on from a checkpoint."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune

from tests.support import make_learner, make_runner, parameters, tiny_config, update
from thrust_rllib import JointPPO
from thrust_rllib.entropy_guard import EntropyGuard, stop_reason

ALWAYS_LOW = 10.0  # nats; three actions have at most ln 3
MODULES = ("agent_0", "agent_1")


def team(**options):
    """Two agents in short episodes."""
    return tiny_config("debug/match_observation", **options)


# --- what is counted ----------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.5])))
def test_the_count_is_the_length_of_the_last_run_below_the_limit(entropies):
    guard = EntropyGuard({"a": 1.0}, 3)
    for k in range(len(entropies)):
        guard.count({"a": entropies[k]}, {"a": True})
        known = [e for e in entropies[: k + 1] if e is not None]  # an update without a step says nothing
        run = next((i for i, e in enumerate(reversed(known)) if e >= 1.0), len(known))
        assert guard.low_updates == {"a": run}


def test_who_is_frozen_or_has_no_limit_is_not_counted():
    guard = EntropyGuard({"a": 1.0, "b": None, "c": 1.0}, 3)
    everyone = dict.fromkeys("abc", 0.1)
    guard.count(everyone, dict.fromkeys("abc", True))
    assert guard.low_updates == {"a": 1, "b": 0, "c": 1}
    guard.count(everyone, {"a": True, "b": True, "c": False})
    assert guard.low_updates == {"a": 2, "b": 0, "c": 0}


def test_a_count_that_ended_a_training_starts_again_behind_a_checkpoint():
    guard = EntropyGuard(dict.fromkeys("abcd", 1.0), 3)
    guard.restore({"a": 2, "b": 3, "c": 5, "gone": 1})
    assert guard.low_updates == {"a": 2, "b": 0, "c": 0, "d": 0}


def test_the_reason_names_modules_numbers_and_remedies():
    low, entropies = {"a": 3, "b": 2, "c": 7, "d": 9}, {"a": 0.01234567, "b": 0.1, "c": -2.0, "d": 0.0}
    limits = {"a": 0.05, "b": 0.05, "c": -1.0, "d": None}
    text = stop_reason(low, entropies, limits, 3)
    assert "module 'a' (entropy 0.01235, min_entropy=0.05, 3 updates running)" in text
    assert "module 'c' (entropy -2, min_entropy=-1, 7 updates running)" in text
    assert "'b'" not in text and "'d'" not in text
    for remedy in ("entropy_coeff", "lr", "min_entropy=None"):
        assert remedy in text
    assert stop_reason({**low, "a": 2, "c": 0}, entropies, limits, 3) is None


def entropies_of(config, updates=6):
    """(learner, results of some updates on the same rows)."""
    learner, runner = make_learner(config), make_runner(config)
    return learner, [update(learner, runner.sample(num_timesteps=64)) for _ in range(updates)]


def test_the_learner_counts_by_the_mean_entropy_of_each_update():
    options = {"lr": 0.05, "entropy_coeff": 0.0, "iterate_all_minibatches": True}
    plain, results = entropies_of(team(**options))
    assert all(result[m]["low_entropy_updates"] == 0 for result in results for m in MODULES)
    found = [result["agent_0"]["entropy"] for result in results]
    limit = sorted(found)[2]  # two updates are below it
    guarded, counted = entropies_of(team(overrides={"agent_0": {"min_entropy": limit}}, **options))
    expected, run = [], 0
    for entropy in found:
        run = run + 1 if entropy < limit else 0
        expected.append(run)
    assert [result["agent_0"]["low_entropy_updates"] for result in counted] == expected and max(expected) > 0
    assert all(result["agent_1"]["low_entropy_updates"] == 0 for result in counted)
    for module_id, named in parameters(plain).items():  # counting changes nothing
        assert all((named[name] == value).all() for name, value in parameters(guarded)[module_id].items())


def test_a_learners_state_has_the_counts_and_an_older_one_does_without():
    config = team(min_entropy=ALWAYS_LOW, trained=["agent_0"])
    learner, _ = entropies_of(config, updates=2)
    state = learner.get_state()
    other = make_learner(config)
    other.set_state(state)
    (batch,) = make_runner(config).sample(num_timesteps=64)
    result = update(other, batch)
    assert [result[m]["low_entropy_updates"] for m in MODULES] == [3, 0]
    del state["joint"]["low_entropy_updates"]
    other.set_state(state)
    assert update(other, batch)["agent_0"]["low_entropy_updates"] == 1


def test_a_copied_module_has_the_count_of_its_source():
    learner, _ = entropies_of(team(overrides={"agent_0": {"min_entropy": ALWAYS_LOW}}), updates=2)
    learner.copy_module("agent_0", "agent_1")
    assert learner.get_state()["joint"]["low_entropy_updates"] == {"agent_0": 2, "agent_1": 2}


# --- how the training ends ----------------------------------------------------------------------------------------


def test_training_ends_with_a_reason_and_goes_on_from_a_checkpoint(build, tmp_path):
    config = team(min_entropy=ALWAYS_LOW, min_entropy_updates=2)
    algo = build(config)
    first = algo.train()
    assert not first["done"] and "stop_reason" not in first
    halfway, end = str(tmp_path / "halfway"), str(tmp_path / "end")
    algo.save_to_path(halfway)
    second = algo.train()
    assert second["done"] and second["should_checkpoint"]
    assert "module 'agent_0'" in second["stop_reason"] and "min_entropy=10, 2 updates" in second["stop_reason"]
    with pytest.raises(RuntimeError) as raised:
        algo.train()
    assert str(raised.value) == second["stop_reason"] and algo.iteration == 2
    algo.save_to_path(end)

    again = JointPPO.from_checkpoint(halfway)
    try:
        assert again.train()["done"]  # the count goes on
        again.restore_from_path(end)  # one that ended the training starts again
        counts = [again.train() for _ in range(2)]
    finally:
        again.stop()
    assert [r["learners"]["agent_0"]["low_entropy_updates"] for r in counts] == [1, 2]
    assert [r["done"] for r in counts] == [False, True]

    changed = build(team(min_entropy=0.01, min_entropy_updates=2))
    changed.restore_from_path(end)
    results = [changed.train() for _ in range(3)]
    assert not any(r["done"] for r in results) and results[-1]["training_iteration"] == 5


def test_the_end_comes_in_the_middle_of_an_iteration(build):
    config = team(min_entropy=ALWAYS_LOW, min_entropy_updates=2).reporting(min_sample_timesteps_per_iteration=192)
    result = build(config).train()
    assert result["done"] and "2 updates running" in result["stop_reason"]
    assert result["learners"]["agent_0"]["low_entropy_updates"] == 3


def test_a_learner_in_another_process_ends_it_too(build):
    config = team(overrides={"agent_1": {"min_entropy": ALWAYS_LOW}}, min_entropy_updates=1).learners(num_learners=1)
    result = build(config).train()
    assert result["done"] and "'agent_1'" in result["stop_reason"] and "'agent_0'" not in result["stop_reason"]


def test_tune_ends_the_trial_with_a_checkpoint(ray_session, tmp_path):
    run = tune.RunConfig(stop={"training_iteration": 5}, storage_path=str(tmp_path), verbose=0)
    space = team(min_entropy=ALWAYS_LOW, min_entropy_updates=2)
    results = tune.Tuner(JointPPO, param_space=space, run_config=run).fit()
    assert not results.errors
    (ended,) = results
    assert ended.metrics["training_iteration"] == 2 and "entropy guard" in ended.metrics["stop_reason"]
    assert ended.checkpoint is not None


# --- settings -----------------------------------------------------------------------------------------------------

BAD = {"min_entropy": ("low", True, math.nan, math.inf), "min_entropy_updates": (0, -1, 2.0, True, None)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_an_early_error(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        team(**{name: value}).validate()


def test_a_limit_may_be_negative_and_the_number_of_updates_is_the_teams():
    team(min_entropy=-3.5, overrides={"agent_0": {"min_entropy": None}}).validate()
    with pytest.raises(ValueError, match="min_entropy_updates.*whole team"):
        team(overrides={"agent_0": {"min_entropy_updates": 2}}).validate()
