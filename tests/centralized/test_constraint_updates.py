"""Four updates with constraints equal the float64 loop: the multiplier of a rollout acts in it, and moves behind it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.centralized.both import TOLERANCE, Both, Case, batch_of
from tests.constraints import reference as multipliers
from tests.core import test_reference_update as coupled
from tests.core.reference_loop import AgentKind
from tests.critics.data import EVERYTHING, RAGGED
from tests.critics.support import INTERLEAVED
from tests.support import update
from thrust_rllib import Constraint

KINDS = {"a0": AgentKind(3), "b": AgentKind(2), "a1": AgentKind(3)}
EXTRAS = {"of_team": "team", "own": "agent", "between": "pair"}
PENALTY = Constraint("of_team", 0.1, coefficient=0.8)
LAGRANGIAN = Constraint("own", -0.4, "lagrangian", rate=2.0, initial=0.5)
PID = Constraint("between", 0.3, "pid", kp=1.0, ki=0.5, kd=0.25, sense="at_least")
UPDATES = 4


def case(*limits, **options):
    return Case(**{"kinds": KINDS, "limits": limits, "extras": EXTRAS, **options})


def on(name, own):
    return dataclasses.replace(own, name=name)


CASES = {
    **{
        f"{own.mechanism}, {name}": case(on(name, own)) for own in (PENALTY, LAGRANGIAN, PID) for name in EXTRAS
    },
    "all three": case(PENALTY, LAGRANGIAN, PID, lives=EVERYTHING),
    "all three, shared module": case(PENALTY, LAGRANGIAN, PID, agents=INTERLEAVED),
    "a cap": case(dataclasses.replace(LAGRANGIAN, cap=0.7)),
    **{
        f"{critic}, {credit}": case(PENALTY, LAGRANGIAN, PID, critic=critic, credit=credit)
        for critic, credit in (
            ("independent", "shared"), ("independent", "difference"), ("mean", "difference"), ("central", "shared"),
            ("central", "agent"), ("central", "difference"), ("central", "own"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_four_updates_equal_the_float64_loop(name):
    both = Both(CASES[name])
    told = {own.name: [] for own in both.case.limits}
    for _ in range(UPDATES):
        held = both.reference.multipliers()
        ((results, steps),) = both.run(1)
        both.check([(results, steps)])
        found = results["__all_modules__"]["constraints"]
        assert set(found) == set(held)
        for limit, own in found.items():
            assert own["multiplier"] == pytest.approx(held[limit], rel=1e-6)  # of this rollout, not the next one's
            assert own["violation"] == pytest.approx(both.reference.violations[limit][-1], rel=1e-5, abs=1e-6)
            told[limit].append(own["multiplier"])
    for own in both.case.limits:
        assert (len(set(told[own.name])) == 1) == (own.mechanism == "penalty")


MISTAKES = {
    "no limit": (CASES["all three"], {"limits": ()}),
    "a multiplier that stays": (
        CASES["lagrangian, own"], {"limits": (Constraint("own", -0.4, coefficient=0.5),)},
    ),
    "another rate": (CASES["lagrangian, own"], {"limits": (dataclasses.replace(LAGRANGIAN, rate=3.0),)}),
    "another cost": (CASES["central, difference"], {"limits": (on("own", PENALTY), on("of_team", LAGRANGIAN), PID)}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_another_setting(name):
    case, mistake = MISTAKES[name]
    both = Both(case, **mistake)
    both.run(2)
    assert max(both.differences().values()) > 3 * TOLERANCE


def test_the_comparison_sees_a_multiplier_that_moves_too_early():
    both = Both(CASES["lagrangian, own"])
    update_of = both.reference.update

    def early(batches):
        found = multipliers.violation(both.reference.cost(batches, "own"), -0.4)
        both.reference.violations.setdefault("own", []).append(found)
        return update_of(batches)

    both.reference.update = early
    both.run(2)
    assert max(both.differences().values()) > 3 * TOLERANCE


def test_a_driven_weight_of_a_coupling_equals_the_float64_loop():
    limit, rate, initial = 0.02, 4.0, 0.2
    driven = Constraint("redundancy", limit, "lagrangian", rate=rate, initial=initial, of="coupling", sense="equal")
    losses = {"cross_agent_losses": coupled.COUPLED["cross_agent_losses"], "constraints": (driven,)}
    for late in (0, 1):  # 1: the reference's weight moves one update later
        both = coupled.Both(coupled.Case(config=losses))
        trainer, weights, violations = both.reference.trainer, [initial], []
        for k in range(UPDATES):
            trainer.settings.redundancy_coeff = weights[max(k - late, 0)]
            fixed = both.data()
            results = update(both.learner, [coupled.joint_batch(x, both.agents) for x in fixed])["__all_modules__"]
            steps = both.reference.update(fixed)
            cost = sum(s["aux_loss"] for s in steps) / len(steps) / trainer.settings.redundancy_coeff
            violations.append(cost - limit)
            if not late:
                assert results["cross_agent_coeff"]["redundancy"] == pytest.approx(weights[k], rel=1e-4)
                found = results["constraints"]["redundancy"]
                assert found["cost"] == pytest.approx(cost, rel=1e-4)
                assert found["multiplier"] == pytest.approx(weights[k], rel=1e-4)
            weights.append(float(multipliers.lagrangian(violations, rate, initial, low=-100.0, high=100.0)[-1]))
        assert (both.difference() < TOLERANCE) == (not late)
    assert max(weights) > 1.2 * initial


def test_a_cost_that_the_environment_does_not_return_is_an_error_before_anything_moves():
    both = Both(case(LAGRANGIAN, lives=RAGGED))
    fixed = both.data()
    fixed.extras.pop("own")
    with pytest.raises(ValueError, match="the constraint 'own' reads the extra 'own', which the environment does not"):
        update(both.learner, batch_of(fixed, both.agents))
    assert max(both.movement(m) for m in both.first) == 0.0
