"""`target_kl`: who rests after which minibatch, against the float64 loop; each module on its own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.core.reference_loop import FixedRollout
from tests.core.test_reference_update import COUPLED, PLAIN, TOLERANCE, AgentKind, Both, Case, joint_batch, space_of
from tests.support import (
    declared_config,
    largest_difference,
    make_learner,
    make_runner,
    parameters,
    tiny_config,
    update,
)
from thrust_rllib import CrossAgentLoss
from thrust_rllib.target_kl import KLStops

TARGET = 0.04  # sampled log-probabilities scatter by .25 around the policy's: some minibatches of 16 rows are over it
SHARED = Case(
    kinds={"a0": AgentKind(3), "a1": AgentKind(3), "b": AgentKind(4)},
    agents={"a0": "m0", "a1": "m0", "b": "m1"},
    config={"policies": {"m0": ["a0", "a1"], "m1": ["b"]}, **COUPLED},
    step={"redundancy_coeff": 0.5},
    data={"present": 0.8},
)
# name: (case, {module: target}; modules that are not named have TARGET)
CASES = {
    "plain": (Case(), {}),
    "coupling and two optimizers": (
        Case(config={"critic_lr": 1e-3, **COUPLED}, step={"critic_lr": 1e-3, "redundancy_coeff": 0.5}),
        {},
    ),
    "targets per module": (
        Case(config={"overrides": {"a0": {"target_kl": None}, "a1": {"target_kl": 0.1}}}),
        {"a1": 0.1, "a0": math.inf},
    ),
    "frozen module": (
        Case(
            config={"trained": ["a0", "a2"], **COUPLED},
            step={"frozen": frozenset({"a1"}), "redundancy_coeff": 0.5},
        ),
        {},
    ),
    "absent agents": (Case(data={"present": 0.3}), {}),
    "shared module": (SHARED, {}),
    "team standardisation": (Case(config={"standardize_advantages": "team"}, loop={"standardize": "team"}), {}),
}


def stopping_update(both: Both, batches: list[FixedRollout], targets: dict, scope: str):
    """One update of the reference with stops: [(statistics, who rested)] of each step, {module: number of stops}."""
    loop = both.reference
    trainer, rollouts = loop.trainer, loop.rollouts(batches)
    minibatches = loop.minibatches(len(next(iter(rollouts.values())).obs))
    per_epoch = len(minibatches) // loop.settings.num_epochs
    trained = set(trainer.modules) - set(trainer.settings.frozen)
    steps, stops = [], dict.fromkeys(trainer.modules, 0)
    trainer.stopped.clear()
    for k, rows in enumerate(minibatches):
        if scope == "epoch" and k % per_epoch == 0:
            trainer.stopped.clear()
        if trainer.stopped == trained:
            continue
        resting = set(trainer.stopped)
        found = trainer.step(rollouts, rows)
        steps.append((found, resting))
        for module_id in trained - resting:
            if found["rows"][module_id] and found["kl"][module_id] > targets[module_id]:
                trainer.stopped.add(module_id)
                stops[module_id] += 1
    trainer.stopped.clear()
    return steps, stops


def make_both(case: Case, scope: str, epochs: int = 3, **config) -> Both:
    stop = {"target_kl": TARGET, "target_kl_scope": scope, "num_epochs": epochs, "minibatch_size": 8}
    loop = {**case.loop, "num_epochs": epochs, "minibatch_size": 8}
    return Both(dataclasses.replace(case, config={**stop, **case.config, **config}, loop=loop))


@pytest.mark.parametrize("scope", ["epoch", "update"])
@pytest.mark.parametrize("name", CASES)
def test_a_module_rests_as_in_the_float64_loop(name, scope):
    case, own = CASES[name]
    both = make_both(case, scope)
    targets = {m: own.get(m, TARGET) for m in both.first}
    all_stops = dict.fromkeys(both.first, 0)
    for _ in range(2):
        data = both.data()
        results = update(both.learner, [joint_batch(fixed, both.agents) for fixed in data])
        steps, stops = stopping_update(both, data, targets, scope)
        assert results["__all_modules__"]["num_minibatch_steps"] == len(steps)
        for module_id, count in stops.items():
            mine = [found for found, resting in steps if module_id not in resting and found["rows"][module_id]]
            assert results[module_id]["num_kl_stops"] == count
            assert results[module_id]["num_module_steps_trained"] == sum(found["rows"][module_id] for found in mine)
            for ours, theirs in (("approx_kl", "kl"), ("entropy", "entropy"), ("vf_loss", "value_loss")):
                expected = np.mean([found[theirs][module_id] for found in mine])
                assert results[module_id][ours] == pytest.approx(expected, rel=1e-4, abs=1e-4)
            all_stops[module_id] += count
    assert both.difference() < TOLERANCE
    for module_id, target in targets.items():
        moves = module_id not in case.step.get("frozen", ())
        assert (all_stops[module_id] > 0) == (moves and target < math.inf), module_id


@pytest.mark.parametrize("scope, other", [("epoch", "update"), ("update", "epoch"), ("epoch", None), ("update", None)])
def test_the_comparison_sees_another_rule(scope, other):
    both = make_both(Case(), scope)
    targets = dict.fromkeys(both.first, TARGET if other else math.inf)
    for _ in range(2):
        data = both.data()
        update(both.learner, [joint_batch(fixed, both.agents) for fixed in data])
        stopping_update(both, data, targets, other or scope)
    assert both.difference() > 3 * TOLERANCE


@pytest.mark.parametrize("scope", ["epoch", "update"])
def test_in_a_team_a_module_is_trained_as_if_it_were_alone(scope):
    both = make_both(Case(), scope)
    data = [both.data() for _ in range(3)]
    alone = {}
    for agent, kind in PLAIN.items():
        spaces = [[space] for space in space_of(kind)]
        config = {"lr": 2e-3, "iterate_all_minibatches": True, **both.case.config}
        alone[agent] = make_learner(declared_config(*spaces, [agent], **config))
        alone[agent].module[agent].load_state_dict(both.learner.module[agent].state_dict())
    rows = dict.fromkeys(PLAIN, 0)
    for batches in data:
        team = update(both.learner, [joint_batch(fixed, both.agents) for fixed in batches])
        for agent, learner in alone.items():
            single = [FixedRollout({agent: fixed.streams[agent]}, fixed.valid) for fixed in batches]
            own = update(learner, [joint_batch(fixed, {agent: agent}) for fixed in single])
            assert own[agent]["num_kl_stops"] == team[agent]["num_kl_stops"]
            assert own[agent]["approx_kl"] == pytest.approx(team[agent]["approx_kl"], abs=1e-6)
            rows[agent] += own[agent]["num_module_steps_trained"]
            # Whoever is alone ends an epoch earlier, which moves no generator.
            assert torch.equal(learner._generator.get_state(), both.learner._generator.get_state())
    assert len(set(rows.values())) > 1  # they stopped at different minibatches
    for agent, learner in alone.items():
        assert largest_difference(parameters(learner)[agent], parameters(both.learner)[agent]) < 1e-6
        assert both.movement(agent) > 1e-3


def far_away(learner_config, shift=1.0):
    """A learner and a batch whose every row has an approx_kl near `shift`."""
    (batch,) = make_runner(learner_config).sample(num_timesteps=64)
    for streams in batch.modules.values():
        streams.action_logp += shift
    return make_learner(learner_config), batch


@pytest.mark.parametrize("scope, epochs", [("epoch", 2), ("update", 1)])
def test_the_order_of_rows_does_not_depend_on_stops(scope, epochs):
    options = {"iterate_all_minibatches": True, "target_kl_scope": scope}
    stopping, batch = far_away(tiny_config(target_kl=0.01, **options))
    through, _ = far_away(tiny_config(**options))
    found, whole = update(stopping, batch), update(through, batch)
    assert found["__all_modules__"]["num_minibatch_steps"] == epochs  # the first minibatch of each
    assert {found[m]["num_kl_stops"] for m in stopping.module.keys()} == {epochs}
    assert whole["__all_modules__"]["num_minibatch_steps"] == 8
    assert {whole[m]["num_kl_stops"] for m in through.module.keys()} == {0}
    assert torch.equal(stopping._generator.get_state(), through._generator.get_state())


class NaNAtFirst(CrossAgentLoss):
    """Not finite when it is called for the first time."""

    needs_features = False

    def __init__(self):
        self.calls = 0

    def __call__(self, features, logits, actions, present):
        self.calls += 1
        total = sum(x.sum() for x in logits.values())
        return total * (math.nan if self.calls == 1 else 0.0)


def test_a_minibatch_that_was_skipped_stops_nobody():
    options = {"iterate_all_minibatches": True, "num_epochs": 1, "target_kl": 0.01}
    learner, batch = far_away(tiny_config(cross_agent_losses={"nan": NaNAtFirst()}, **options))
    before = parameters(learner)
    shared = update(learner, batch)["__all_modules__"]
    assert shared["num_non_finite_minibatches"] == 1
    assert shared["num_minibatch_steps"] == 1  # the second minibatch, after which all rest
    assert largest_difference(parameters(learner), before) > 1e-4


@pytest.mark.parametrize("target, skipped", [(0.01, 0), (None, 3)])
def test_a_module_that_rests_does_not_hold_up_the_others(target, skipped, monkeypatch):
    own = {"agent_0": {"target_kl": target}}
    learner, batch = far_away(tiny_config(iterate_all_minibatches=True, num_epochs=1, overrides=own))
    module = learner.module["agent_0"].unwrapped()
    forward, calls = module.forward_train, []

    def broken(*args, **kwargs):
        calls.append(1)
        outputs = forward(*args, **kwargs)
        logits = outputs["action_dist_inputs"]
        outputs["action_dist_inputs"] = logits * (1.0 if len(calls) == 1 else math.nan)
        return outputs

    monkeypatch.setattr(module, "forward_train", broken)
    shared = update(learner, batch)["__all_modules__"]
    assert (shared["num_minibatch_steps"], shared["num_non_finite_minibatches"]) == (4 - skipped, skipped)


def test_what_stops_whom():
    targets = {"over": 0.1, "below": 0.1, "absent": 0.1, "frozen": 0.1, "free": None}
    stops = KLStops(targets, {m: m != "frozen" for m in targets}, "epoch", "cpu")
    found = torch.tensor([0.2, 0.05, 9.0, 9.0, 9.0]), torch.tensor([3.0, 3.0, 0.0, 3.0, 3.0])
    stops.observe(*found, torch.tensor(False))  # nobody stepped
    assert stops.stepping(None) is None and not stops.stopped.any()
    stops.observe(*found, torch.tensor(True))
    assert stops.stepping(None) == {m: m != "over" for m in targets}
    assert stops.stepping([True, False, True, True, True]) == {
        "over": False, "below": False, "absent": True, "frozen": True, "free": True,
    }  # fmt: skip
    assert stops.stopped.tolist() == [True, False, False, False, False] and not stops.all_stopped
    stops.observe(*found, torch.tensor(True))  # once in an epoch
    stops.begin_epoch()
    assert stops.stepping(None) is None and not stops.stopped.any()
    stops.observe(*found, torch.tensor(True))
    assert stops.num_stops == {"over": 2, "below": 0, "absent": 0, "frozen": 0, "free": 0}


def test_nobody_left_to_step_is_not_all_stopped_where_nobody_is_trained():
    stops = KLStops({"a": 0.1}, {"a": False}, "update", "cpu")
    stops.observe(torch.tensor([9.0]), torch.tensor([3.0]), torch.tensor(True))
    assert not stops.all_stopped


BAD = {
    "target_kl": (0, -0.1, "0.01", True, math.nan),
    "target_kl_scope": ("minibatch", None, "epcoh"),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_an_early_error(name, value):
    config = tiny_config(iterate_all_minibatches=True, **{"target_kl": 0.01, name: value})
    with pytest.raises(ValueError, match=name):
        config.validate()


def test_a_target_that_could_stop_nothing_is_an_early_error():
    with pytest.raises(ValueError, match="would change nothing"):
        tiny_config(target_kl=0.01).validate()
    tiny_config(target_kl=0.01, target_kl_scope="update").validate()
    with pytest.raises(ValueError, match="agent_1.*target_kl=-1"):
        tiny_config(iterate_all_minibatches=True, overrides={"agent_1": {"target_kl": -1}}).validate()
