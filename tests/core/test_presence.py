"""Agents that are absent in some joint rows: what their modules learn, and what is reported of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.ragged import AGENTS, COUPLINGS, ENVS, SCHEDULES, STEPS, ragged_batch
from tests.core.test_gradients import copy_scrambled, team_learner
from tests.core.test_optimizer_pass import MAKERS, Team, equal, joint_steps, own_steps
from tests.core.test_reference_update import LR
from tests.support import (
    box,
    declared_config,
    discrete,
    largest_difference,
    make_learner,
    optimizer_states,
    parameters,
    update,
)
from thrust_rllib import CrossAgentLoss, RedundancyPenalty

# --- gradient isolation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
@pytest.mark.parametrize("standardize", ["rollout", "minibatch", False])
def test_without_a_coupling_each_module_learns_what_it_learns_alone(standardize, critic_lr):
    options = dict(num_epochs=3, iterate_all_minibatches=True, standardize_advantages=standardize, critic_lr=critic_lr)
    together, start = team_learner(**options), parameters(team_learner(**options))
    results = [update(together, ragged_batch(seed=k)) for k in range(2)]
    for agent in AGENTS:
        alone = team_learner([agent], **options)
        own = [update(alone, ragged_batch([agent], seed=k)) for k in range(2)]
        assert largest_difference(parameters(together)[agent], parameters(alone)[agent]) < 1e-7
        assert largest_difference(start[agent], parameters(alone)[agent]) > 1e-4
        for name in ("policy_loss", "vf_loss", "entropy", "approx_kl", "clip_fraction", "vf_explained_var"):
            for ours, theirs in zip(results, own, strict=True):
                assert ours[agent][name] == pytest.approx(theirs[agent][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("agent", AGENTS)
def test_absent_rows_are_as_if_cut_out(agent):
    """One minibatch of all rows: the team's module equals one that was only ever given its own rows."""
    options = dict(num_epochs=4, minibatch_size=None)
    together, alone = team_learner(**options), team_learner([agent], **options)
    results = update(together, ragged_batch(garbage=np.nan))
    own = update(alone, ragged_batch([agent], cut=True))
    rows = own[agent]["num_module_steps_trained"]
    assert results[agent]["num_module_steps_trained"] == rows == own["__all_modules__"]["num_env_steps_trained"]
    assert largest_difference(parameters(together)[agent], parameters(alone)[agent]) < 1e-6
    for name in ("policy_loss", "vf_loss", "entropy", "vf_explained_var", "gradients_default_optimizer_global_norm"):
        assert results[agent][name] == pytest.approx(own[agent][name], abs=1e-5), name


# --- no row, no step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
@pytest.mark.parametrize("coupling", [None, *COUPLINGS])
def test_a_module_without_a_row_does_not_move_by_one_bit(coupling, critic_lr):
    coupled = {} if coupling is None else {"cross_agent_losses": {"c": COUPLINGS[coupling][0]}}
    learner = team_learner(critic_lr=critic_lr, iterate_all_minibatches=True, **coupled)
    update(learner, ragged_batch(schedules=dict.fromkeys(AGENTS, "always")))  # moments that would move it
    before, moments = parameters(learner), optimizer_states(learner)
    results = update(learner, ragged_batch(schedules={"a0": "always", "a1": "never", "a2": "odd steps"}))
    assert results["__all_modules__"]["num_minibatch_steps"] == 4
    assert largest_difference(before["a1"], parameters(learner)["a1"]) == 0.0
    for name, state in optimizer_states(learner).items():
        difference = largest_difference(moments[name], state)
        assert difference == 0.0 if name.startswith("a1") else difference > 0.0
    for agent in ("a0", "a2"):
        assert largest_difference(before[agent], parameters(learner)[agent]) > 1e-4


def test_a_coupling_that_reads_absent_rows_moves_no_absent_module():
    class Careless(CrossAgentLoss):
        def __call__(self, features, logits, actions, present):
            return (
                sum(x.square().mean() for x in features.values()) / torch.stack([p.sum() for p in present.values()])[1]
            )

    learner = team_learner(cross_agent_losses={"careless": Careless()}, num_epochs=1, minibatch_size=None)
    before = parameters(learner)
    results = update(learner, ragged_batch(schedules={"a0": "always", "a1": "odd steps", "a2": "never"}))
    assert results["__all_modules__"]["cross_agent_loss"]["total"] > 0.0
    assert largest_difference(before["a2"], parameters(learner)["a2"]) == 0.0
    assert largest_difference(before["a1"], parameters(learner)["a1"]) > 1e-4


@pytest.mark.parametrize("name", ["fused", "decay", "AdamW", "SGD", "amsgrad"])
def test_a_pass_leaves_out_the_modules_without_rows(name):
    team, own = Team(MAKERS[name]), Team(MAKERS[name])
    joint_steps(team, 2)
    own_steps(own, 2)
    joint = team.joint_pass()
    joint.compute_gradients(team.objective(2), retain_graph=False, steps={"a": True, "b": False, "c": True})
    norms = joint.clip()
    joint.step(torch.tensor(True))
    own_steps(own, 1, first=2, trained=("a", "c"))
    assert equal(team.everything(), own.everything()) and norms[1] == 0.0 < norms[0]
    joint_steps(team, 1, first=3)
    own_steps(own, 1, first=3)
    assert equal(team.everything(), own.everything())


def test_a_state_with_a_module_that_never_acted_is_restored():
    schedules = {"a0": "always", "a1": "never", "a2": "odd steps"}
    straight = team_learner()
    update(straight, ragged_batch(schedules=schedules))
    resumed = team_learner()
    resumed.set_state(straight.get_state())
    for learner in (straight, resumed):
        update(learner, ragged_batch(seed=1))
    assert largest_difference(parameters(straight), parameters(resumed)) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.3, 0.9]))
def test_whoever_acts_in_a_random_rollout_moves_and_nobody_else(seed, share):
    rng = np.random.default_rng(seed)
    acted = rng.random((STEPS, 3, ENVS)) < share
    batch = ragged_batch(schedules=dict.fromkeys(AGENTS, "always"), seed=seed % 1000)
    for k, agent in enumerate(AGENTS):
        batch.modules[agent].present = acted[:, k : k + 1]
    learner = cached_team_learner()
    copy_scrambled(learner)
    before = parameters(learner)
    results = update(learner, batch)
    assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
    for k, agent in enumerate(AGENTS):
        assert results[agent]["num_module_steps_trained"] == 2 * acted[:, k].sum()
        assert (largest_difference(before[agent], parameters(learner)[agent]) > 0.0) == acted[:, k].any()


@functools.cache
def cached_team_learner():
    coupled = {name: loss for name, (loss, _) in COUPLINGS.items()}
    return team_learner(iterate_all_minibatches=True, cross_agent_losses=coupled)


# --- what is reported -------------------------------------------------------------------------------------------------


def test_a_module_without_rows_reports_no_value_and_spoils_no_other():
    schedules = dict.fromkeys(AGENTS, "always")
    learner = team_learner(cross_agent_losses={"c": RedundancyPenalty()})
    (never, first, absent, again) = (
        update(learner, ragged_batch(schedules={**schedules, "a1": pattern}))
        for pattern in ("never", "always", "never", "two rows")
    )
    assert "policy_loss" not in never["a1"] and never["a1"]["value_target_std"] == 1.0
    assert np.isnan(absent["a1"]["policy_loss"])
    for results in (never, absent):
        assert results["a1"]["num_module_steps_trained"] == results["a1"]["module_train_batch_size_mean"] == 0
        assert results["a1"]["curr_entropy_coeff"] == pytest.approx(0.01)
    for results in (never, first, absent, again):
        for module_id in ("a0", "a2", "__all_modules__"):
            assert all(np.isfinite(x) for x in numbers(results[module_id])), module_id
    assert absent["a1"]["value_target_mean"] == first["a1"]["value_target_mean"] != again["a1"]["value_target_mean"]
    assert np.isfinite(first["a1"]["policy_loss"]) and np.isfinite(again["a1"]["policy_loss"])


def numbers(result):
    for value in result.values():
        if isinstance(value, dict):
            yield from numbers(value)
        else:
            yield value


# --- compiled ---------------------------------------------------------------------------------------------------------


# Torch's compiler looks at .grad of intermediate tensors where it breaks a graph, and looks through caches.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_update_with_absences_equals_the_plain_one():
    def learner(**options):
        config = declared_config(
            [box()] * 3,
            [discrete(3)] * 3,
            AGENTS,
            cross_agent_losses={"redundancy": RedundancyPenalty()},
            critic_lr=LR,
        )
        made = make_learner(config.framework(**options))
        copy_scrambled(made)
        return made

    plain = learner()
    compiled = learner(torch_compile_learner=True, torch_compile_learner_dynamo_backend="aot_eager")
    for schedules in (SCHEDULES, dict.fromkeys(AGENTS, "always"), SCHEDULES):
        results = [update(x, ragged_batch(schedules=schedules, garbage=np.nan)) for x in (plain, compiled)]
        assert results[0]["a2"]["policy_loss"] == pytest.approx(results[1]["a2"]["policy_loss"], abs=1e-5)
    assert largest_difference(parameters(plain), parameters(compiled)) < 1e-6
    assert largest_difference(parameters(plain), parameters(learner())) > 1e-4
