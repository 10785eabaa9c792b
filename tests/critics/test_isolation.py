"""Who gets gradients of whom, who stops whom, and what is reported."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.critics.both import Both, Case, config_of
from tests.critics.data import EVERYTHING, RAGGED, STATE, team_rollout
from tests.critics.reference import CRITIC
from tests.critics.support import KINDS, package_batch
from tests.support import largest_difference, make_learner, optimizer_states, parameters, scramble, update
from thrust_rllib import RedundancyPenalty

STATE_VIEW = {"with_state": True, "observations": False, "columns": tuple(range(STATE))}


def learner_and_batch(case, seed=0):
    learner = make_learner(config_of(case))
    scramble(learner, seed)
    fixed = team_rollout(np.random.default_rng(seed), KINDS, case.lives[0])
    return learner, package_batch(fixed, case.agents, with_state=case.with_state)


@pytest.mark.parametrize("critic", ["central", "set"])
@pytest.mark.parametrize("credit", ["own", "shared", "agent", "difference"])
@pytest.mark.parametrize("clip_jointly", [False, True])
def test_with_a_critic_of_its_own_no_value_head_of_a_policy_moves(critic, credit, clip_jointly):
    case = Case(critic, credit, config={"clip_jointly": clip_jointly}, lives=(RAGGED,))
    both = Both(case)
    both.run(1)
    for m in set(case.agents.values()):
        assert both.movement(m, "value_head") == 0.0 and both.movement(m, "policy_head") > 1e-3
    assert both.movement(CRITIC) > 1e-3


@pytest.mark.parametrize("critic", ["independent", "mean"])
def test_without_one_they_do(critic):
    both = Both(Case(critic, lives=(RAGGED,)))
    both.run(1)
    assert all(both.movement(m, "value_head") > 1e-3 for m in both.first) and CRITIC not in both.first


@pytest.mark.parametrize("options", [{"vf_loss_coeff": 0.0}, {"critic_lr": 5e-3}, {"value_clip_range": 0.01}], ids=str)
def test_policies_do_not_depend_on_how_the_critic_is_trained(options):
    plain, other = Case(lives=(RAGGED,)), Case(lives=(RAGGED,), config=options)
    results = []
    for case in (plain, other):
        learner, batch = learner_and_batch(case)
        update(learner, batch)
        results.append(parameters(learner))
    assert largest_difference(results[0][CRITIC], results[1][CRITIC]) > 1e-4
    for m in set(plain.agents.values()):
        assert largest_difference(results[0][m], results[1][m]) == 0.0


def test_a_joint_clip_couples_them():
    results = []
    for coefficient in (0.5, 5.0):
        learner, batch = learner_and_batch(Case(config={"clip_jointly": True, "vf_loss_coeff": coefficient}))
        update(learner, batch, num_epochs=4)  # Adam's first step does not see the length of a gradient
        results.append(parameters(learner))
    assert largest_difference(results[0]["m0"], results[1]["m0"]) > 1e-6


def test_a_critics_gradient_is_not_that_of_its_policies():
    """The same parameters, another critic: only its own parameters differ where advantages are left out."""
    case = Case(config={"entropy_coeff": 0.0, "lr": 1e-2})
    learner, batch = learner_and_batch(case)
    for streams in batch.modules.values():
        streams.rewards[:] = 0.0
    with torch.no_grad():
        for p in learner.module[CRITIC].parameters():
            p.zero_()
    before = parameters(learner)
    update(learner, batch)
    assert all(largest_difference(before[m], parameters(learner)[m]) == 0.0 for m in set(case.agents.values()))


# --- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_a_row_of_the_critics_input_that_is_not_finite_stops_everybody(critic_lr, monkeypatch, caplog):
    case = Case(**STATE_VIEW, config={"num_epochs": 1, "minibatch_size": None, "critic_lr": critic_lr})
    learner, batch = learner_and_batch(case)
    before = parameters(learner)
    batch.global_state[3, 1, 2] = np.nan
    values = learner._values
    monkeypatch.setattr(learner, "_values", lambda *args: values(*args).nan_to_num(0.0))
    with caplog.at_level(logging.WARNING):
        results = update(learner, batch)
    assert results["__all_modules__"]["num_non_finite_minibatches"] == 1
    assert results["__all_modules__"]["num_minibatch_steps"] == 0
    assert largest_difference(before, parameters(learner)) == 0.0
    assert all((x == 0.0).all() for state in optimizer_states(learner).values() for x in state)
    assert "module 'team_critic': a loss or gradient was not finite in 1 of 1 minibatches" in caplog.text
    assert "module 'm0'" not in caplog.text
    batch.global_state[3, 1, 2] = 0.0
    assert update(learner, batch)["__all_modules__"]["num_minibatch_steps"] == 1
    assert largest_difference(before[CRITIC], parameters(learner)[CRITIC]) > 1e-4


def test_only_the_minibatch_with_that_row_is_left_out(monkeypatch):
    learner, batch = learner_and_batch(Case(**STATE_VIEW))
    batch.global_state[3, 1, 2] = np.nan
    values = learner._values
    monkeypatch.setattr(learner, "_values", lambda *args: values(*args).nan_to_num(0.0))
    results = update(learner, batch)["__all_modules__"]
    assert results["num_non_finite_minibatches"] == 2 and results["num_minibatch_steps"] == 2  # of two epochs
    assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())


def test_values_before_the_update_are_an_error_that_names_the_critic():
    learner, batch = learner_and_batch(Case(**STATE_VIEW))
    before = parameters(learner)
    batch.global_state[3, 1, 2] = np.nan
    with pytest.raises(ValueError, match="module 'team_critic' gives values that are not finite"):
        update(learner, batch)
    assert largest_difference(before, parameters(learner)) == 0.0


def test_a_policy_that_is_not_finite_stops_the_critic(caplog):
    learner, batch = learner_and_batch(Case())
    before = parameters(learner)
    batch.modules["m1"].action_logp[2, 0, 0] = np.nan
    with caplog.at_level(logging.WARNING):
        update(learner, batch, minibatch_size=None)
    assert largest_difference(before, parameters(learner)) == 0.0
    assert "module 'm1'" in caplog.text and "team_critic" not in caplog.text


# --- what is reported -------------------------------------------------------------------------------------------------

NORM = "gradients_default_optimizer_global_norm"
POLICY = {"policy_loss", "entropy", "clip_fraction", "approx_kl", "curr_entropy_coeff", "num_kl_stops"}
VALUE = {"vf_loss", "vf_loss_unclipped", "vf_explained_var", "value_target_mean", "value_target_std"}


@pytest.mark.parametrize("critic", ["independent", "mean", "central", "set"])
@pytest.mark.parametrize("lives", [RAGGED, EVERYTHING])
def test_what_is_reported_where(critic, lives):
    learner, batch = learner_and_batch(Case(critic, lives=(lives,)))
    results = update(learner, batch)
    for m in ("m0", "m1", "m2"):
        assert POLICY | {NORM, "total_loss"} <= set(results[m])
        assert bool(VALUE & set(results[m])) == (critic == "independent")
    assert (CRITIC in results) == (critic != "independent")
    if critic != "independent":
        assert VALUE | {"total_loss"} <= set(results[CRITIC]) and not POLICY & set(results[CRITIC])
        assert (NORM in results[CRITIC]) == (critic != "mean")
        rows = sum(any(batch.stream(a).present[t, e] for a in KINDS) for t, e in np.argwhere(batch.valid))
        assert results[CRITIC]["num_module_steps_trained"] == 2 * rows
    if critic in ("central", "set"):
        assert results[CRITIC][NORM] > 0
    numbers = [x for own in results.values() for x in own.values() if isinstance(x, float)]
    assert np.isfinite(numbers).all()


def test_losses_add_up():
    learner, batch = learner_and_batch(Case(lives=(RAGGED,)))
    results = update(learner, batch, minibatch_size=None, num_epochs=1)
    assert results[CRITIC]["total_loss"] == pytest.approx(0.5 * results[CRITIC]["vf_loss"], rel=1e-6)
    total = sum(results[m]["total_loss"] for m in ("m0", "m1", "m2", CRITIC))
    assert results["__all_modules__"]["total_loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("critic", ["independent", "mean", "central", "set"])
@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_couplings_are_compared_with_the_policies_gradients(critic, critic_lr):
    options = {
        "cross_agent_losses": {"redundancy": RedundancyPenalty()}, "coupling_gradient_interval": 1, "audit": True,
        "critic_lr": critic_lr,
    }  # fmt: skip
    learner, batch = learner_and_batch(Case(critic, config=options, lives=(RAGGED,)))
    results = update(learner, batch)
    for m in ("m0", "m1", "m2"):
        assert results[m]["coupling_gradient"]["redundancy"]["norm"] > 0
    assert "coupling_gradient" not in results.get(CRITIC, {})


@pytest.mark.parametrize("critic", ["mean", "central", "set"])
def test_a_critic_goes_on_where_a_policy_stops(critic):
    options = {"overrides": {"m0": {"target_kl": 1e-5}}, "target_kl_scope": "update", "num_epochs": 3, "lr": 1e-2}
    learner, batch = learner_and_batch(Case(critic, config=options))
    results = update(learner, batch)
    assert results["m0"]["num_kl_stops"] == 1
    trained = {m: results[m]["num_module_steps_trained"] for m in ("m0", "m1", CRITIC)}
    assert trained["m0"] < trained["m1"] == trained[CRITIC] == 3 * len(batch)
    assert "num_kl_stops" not in results[CRITIC]
