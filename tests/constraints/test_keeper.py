"""The multipliers of a learner: how they act, their order, state, warning, and closed loops."""

from __future__ import annotations

import json
import logging
import math
import pickle

import numpy as np
import pytest

from tests.constraints import reference
from tests.constraints.batches import batch_with_costs
from thrust_rllib.constraints import Constraint
from thrust_rllib.multipliers import Multipliers

THREE = (
    Constraint("team", 0.1, coefficient=0.5),
    Constraint("agent", -0.2, mechanism="lagrangian", rate=2.0, initial=1.0),
    Constraint("pair", 0.3, mechanism="pid", kp=1.0, ki=0.5, kd=0.25, sense="at_least"),
)


def one_update(keeper, batches):
    """As the learner does it; the rewards that are trained on."""
    costs = keeper.measure(batches)
    penalised = keeper.penalise(batches)
    keeper.update(costs, {})
    return penalised


def update_with(keeper, of, values):
    """Values of extras or of couplings."""
    keeper.update(*((values, {}) if of == "extra" else ({}, values)))


def test_several_updates_are_the_reference():
    keeper = Multipliers(THREE)
    held = {"team": 0.5, "agent": 1.0, "pair": 0.0}
    violations = {"agent": [], "pair": []}
    for k in range(6):
        batches = [batch_with_costs(10 * k), batch_with_costs(10 * k + 1, steps=3, envs=3)]
        assert keeper.coefficients() == pytest.approx(held, rel=1e-12)
        weights = {"team": held["team"], "agent": held["agent"], "pair": -held["pair"]}  # a lower bound pays
        for batch, after in zip(batches, one_update(keeper, batches), strict=True):
            found = np.concatenate([streams.rewards for streams in after.modules.values()], axis=1)
            np.testing.assert_allclose(found, reference.penalised_rewards(batch, weights), rtol=1e-5, atol=1e-5)
        violations["agent"].append(reference.violation(reference.mean_cost(batches, "agent"), -0.2))
        violations["pair"].append(reference.violation(reference.mean_cost(batches, "pair"), 0.3, "at_least"))
        metrics = keeper.metrics()["constraints"]
        assert {name: own["multiplier"] for name, own in metrics.items()} == pytest.approx(held, rel=1e-12)
        assert metrics["pair"]["violation"] == pytest.approx(violations["pair"][-1])
        held = {
            "team": 0.5,
            "agent": reference.lagrangian(violations["agent"], 2.0, 1.0, 0.0, 100.0)[-1],
            "pair": reference.pid(violations["pair"], 1.0, 0.5, 0.25, 0.0, 100.0)[-1],
        }
    assert held["agent"] != 1.0 and held["pair"] != 0.0


def test_without_constraints_nothing_happens():
    keeper, batches = Multipliers(()), [batch_with_costs(0)]
    assert keeper.penalise(batches)[0] is batches[0] and keeper.measure(batches) == {}
    keeper.update({}, {})
    assert keeper.metrics() == {} == keeper.get_state() and keeper.coupling_coeffs({"x": 0.5}) == {"x": 0.5}


def test_a_missing_cost_is_an_error_while_the_multiplier_is_still_0():
    keeper = Multipliers([Constraint("collisions", 0.1, mechanism="pid", kp=1.0)])
    with pytest.raises(ValueError, match="the constraint 'collisions' reads the extra 'collisions'"):
        keeper.measure([batch_with_costs(0)])


@pytest.mark.parametrize("of", ["extra", "coupling"])
def test_what_was_not_measured_stays(of):
    keeper = Multipliers([Constraint("c", 0.5, mechanism="lagrangian", rate=1.0, cap=2.0, of=of)])
    update_with(keeper, of, {"c": 2.5})
    known = {"limit": 0.5, "multiplier": 2.0, "saturated": 1.0}
    for nothing in ({}, {"c": math.nan}, {"c": math.inf}):
        update_with(keeper, of, nothing)
        metrics = keeper.metrics()["constraints"]["c"]
        assert keeper.coefficients() == {"c": 2.0} and known.items() <= metrics.items()
        assert math.isnan(metrics["cost"]) and math.isnan(metrics["violation"])


def test_a_coupling_that_is_called_like_an_extra_is_not_its_cost():
    options = {"mechanism": "lagrangian", "rate": 1.0}
    extra, coupling = (Multipliers([Constraint("c", 0.0, of=of, **options)]) for of in ("extra", "coupling"))
    for keeper, expected in ((extra, 0.25), (coupling, 8.0)):
        keeper.update({"c": 0.25}, {"c": 8.0})
        assert keeper.coefficients() == {"c": expected}


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), lambda x: json.loads(json.dumps(x))])
def test_goes_on_from_a_checkpoint_as_if_nothing_had_been(through):
    straight, resumed = Multipliers(THREE), Multipliers(THREE)
    costs = [{"team": 0.5, "agent": 0.3 * k, "pair": 0.1 * (-1) ** k} for k in range(6)]
    for cost in costs[:3]:
        straight.update(cost, {})
    resumed.set_state(through(straight.get_state()))
    assert resumed.coefficients() == straight.coefficients() != Multipliers(THREE).coefficients()
    for cost in costs[3:]:
        straight.update(cost, {})
        resumed.update(cost, {})
    assert resumed.get_state() == straight.get_state() and resumed.metrics() == straight.metrics()


def test_the_numbers_of_a_new_configuration_count(caplog):
    old = Multipliers(
        [
            Constraint("fixed", 1.0, coefficient=0.5),
            Constraint("kept", 1.0, mechanism="lagrangian", rate=1.0),
            Constraint("turned", 1.0, mechanism="lagrangian", rate=1.0),
            Constraint("changed", 1.0, mechanism="lagrangian", rate=1.0),
            Constraint("gone", 1.0, mechanism="lagrangian", rate=1.0),
        ]
    )
    old.update(dict.fromkeys(["fixed", "kept", "turned", "changed", "gone"], 9.0), {})
    new = Multipliers(
        [
            Constraint("fixed", 1.0, coefficient=0.75),
            Constraint("kept", 2.0, mechanism="lagrangian", rate=0.5, cap=5.0),
            Constraint("turned", 1.0, mechanism="lagrangian", rate=1.0, sense="at_least", initial=0.25),
            Constraint("changed", 1.0, mechanism="pid", kp=1.0),
            Constraint("added", 1.0, mechanism="lagrangian", rate=1.0, initial=0.125),
        ]
    )
    with caplog.at_level(logging.WARNING, "thrust_rllib"):
        new.set_state(old.get_state())
        old.set_state(old.get_state())
        Multipliers(THREE[1:], quiet=True).set_state({})
    (record,) = caplog.records
    assert "['turned', 'changed', 'added']" in record.getMessage() and "0.25, 0, 0.125" in record.getMessage()
    assert new.coefficients() == {"fixed": 0.75, "kept": 5.0, "turned": 0.25, "changed": 0.0, "added": 0.125}
    new.update({"kept": 1.0}, {})
    assert new.coefficients()["kept"] == 4.5  # 5 + 0.5 · (1 − 2)


# --- a limit that cannot be met -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["extra", "coupling"])
def test_a_limit_that_cannot_be_met_is_told_once(caplog, of):
    options = {"mechanism": "lagrangian", "rate": 1.0, "cap": 2.0, "of": of}
    keeper, silent = (Multipliers([Constraint("c", 0.5, **options)], quiet=quiet) for quiet in (False, True))
    with caplog.at_level(logging.WARNING, "thrust_rllib"):
        for k in range(20):
            assert len(caplog.records) == (k > 1)  # λ = 1, then 2
            update_with(keeper, of, {"c": 1.5})
            update_with(silent, of, {"c": 1.5})
    (record,) = caplog.records
    assert record.name.startswith("thrust_rllib.")
    for part in ("constraint 'c'", "cap (2)", "1.5 where it should be at most 0.5", "cap=", "limit=", "constraints/c"):
        assert part in record.getMessage()
    assert keeper.metrics()["constraints"]["c"]["saturated"] == 1.0


def test_nothing_is_told_of_what_is_kept(caplog):
    keeper = Multipliers(
        [
            Constraint("penalty", 0.5, coefficient=200.0),
            Constraint("kept", 0.5, mechanism="lagrangian", rate=1.0, cap=2.0, initial=2.0),
            Constraint("free", 0.5, mechanism="lagrangian", rate=1e9, cap=math.inf),
        ]
    )
    with caplog.at_level(logging.WARNING, "thrust_rllib"):
        for _ in range(5):
            keeper.update({"penalty": 9.0, "kept": 0.5, "free": 9.0}, {})
    assert not caplog.records and keeper.metrics()["constraints"]["kept"]["saturated"] == 1.0


def test_the_lower_bound_of_a_target_is_told_too(caplog):
    keeper = Multipliers([Constraint("c", 0.5, mechanism="pid", ki=1.0, cap=2.0, sense="equal")])
    with caplog.at_level(logging.WARNING, "thrust_rllib"):
        for _ in range(9):
            keeper.update({"c": 0.0}, {})
    assert keeper.coefficients() == {"c": -2.0} and "cap (-2), and its cost is 0 where it should be 0.5" in caplog.text


# --- closed loops -------------------------------------------------------------------------------------------------


def trained_toy(keeper, pull, updates):
    """Gradient descent on (θ − 1)² + w · θ², the coupling θ² with the weight w that the keeper gives; last values."""
    theta, values = 1.0, []
    for _ in range(updates):
        weight = keeper.coupling_coeffs({"spread": 5.0, "other": 0.25})
        assert weight["other"] == 0.25
        for _ in range(10):
            theta -= pull * (2 * (theta - 1) + 2 * weight["spread"] * theta)
        keeper.update({}, {"spread": theta**2, "other": 7.0})
        values.append(theta**2)
    return values


@pytest.mark.parametrize("mechanism", [
    {"mechanism": "lagrangian", "rate": 0.1}, {"mechanism": "pid", "kp": 0.05, "ki": 0.05, "kd": 0.02},
])  # fmt: skip
@pytest.mark.parametrize("target, sign", [(0.25, 1), (2.25, -1)])
def test_a_couplings_weight_is_driven_to_a_target_value(mechanism, target, sign):
    keeper = Multipliers([Constraint("spread", target, of="coupling", sense="equal", **mechanism)])
    values = trained_toy(keeper, 0.05, 400)
    assert abs(values[0] / target - 1) > 0.2  # the weight 0 does not give it
    np.testing.assert_allclose(values[-50:], target, rtol=0.02)
    assert keeper.coefficients()["spread"] == pytest.approx(sign * abs(1 / math.sqrt(target) - 1), rel=0.05)


def test_a_bound_of_a_coupling_presses_one_way_only():
    kept = Multipliers([Constraint("spread", 2.0, of="coupling", mechanism="lagrangian", rate=0.1)])
    assert trained_toy(kept, 0.05, 50)[-1] == 1.0 and kept.coupling_coeffs({}) == {"spread": 0.0}
    least = Multipliers([Constraint("spread", 2.0, of="coupling", mechanism="lagrangian", rate=0.1, sense="at_least")])
    assert trained_toy(least, 0.05, 400)[-1] == pytest.approx(2.0, rel=0.02)
    assert least.coefficients()["spread"] > 0 > least.coupling_coeffs({})["spread"]


@pytest.mark.parametrize("sense, limit, answer", [("at_most", 0.2, 0.2), ("at_most", 0.9, 0.8), ("at_least", 0.9, 0.9)])
def test_a_cost_comes_to_its_limit_or_stays_free(sense, limit, answer):
    """A policy that takes a risk with probability p: reward 1.6 p − p², cost p. Free it takes 0.8."""
    keeper = Multipliers([Constraint("risk", limit, mechanism="lagrangian", rate=0.2, sense=sense)])
    p = 0.5
    for _ in range(500):
        weight = keeper.coefficients()["risk"] * (1 if sense == "at_most" else -1)
        for _ in range(5):
            p = min(max(p + 0.05 * (1.6 - 2 * p - weight), 0.0), 1.0)
        keeper.update({"risk": p}, {})
    assert p == pytest.approx(answer, rel=0.02)
