"""The mechanisms: ten violations by hand, and float64 references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.constraints import reference
from tests.functional.helpers import examples
from thrust_rllib.constraints import Constraint
from thrust_rllib.functional import lagrangian_multiplier, pid_multiplier, violation
from thrust_rllib.multipliers import Multipliers

LIMIT = 0.5
COSTS = [1.0, 0.75, 0.5, 0.25, 1.5, 0.5, 0.0, 0.75, 2.0, 0.5]
VIOLATIONS = [0.5, 0.25, 0.0, -0.25, 1.0, 0.0, -0.5, 0.25, 1.5, 0.0]
ONE_SIDED = [0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 0.0, 0.25, 1.5, 0.0]

LAGRANGIAN = {"mechanism": "lagrangian", "rate": 2.0, "initial": 0.5, "cap": 3.0}
PID = {"mechanism": "pid", "kp": 1.0, "ki": 0.5, "kd": 0.25, "cap": 3.0}
BY_HAND = [  # options, violations, multipliers after each of them
    ({"mechanism": "penalty", "coefficient": 0.75}, VIOLATIONS, [0.75] * 10),
    (LAGRANGIAN, VIOLATIONS, [1.5, 2.0, 2.0, 1.5, 3.0, 3.0, 2.0, 2.5, 3.0, 3.0]),
    ({**LAGRANGIAN, "signed": False}, ONE_SIDED, [1.5, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]),
    ({**LAGRANGIAN, "sense": "equal", "initial": -2.5}, VIOLATIONS,
     [-1.5, -1.0, -1.0, -1.5, 0.5, 0.5, -0.5, 0.0, 3.0, 3.0]),
    (PID, VIOLATIONS, [0.875, 0.5625, 0.3125, 0.0, 2.0625, 0.5, 0.0, 1.0625, 3.0, 1.0]),
    ({**PID, "signed": False}, ONE_SIDED, [0.875, 0.5625, 0.3125, 0.375, 2.125, 0.625, 0.875, 1.3125, 3.0, 1.375]),
    ({**PID, "sense": "equal"}, VIOLATIONS,
     [0.875, 0.5625, 0.3125, -0.0625, 2.0625, 0.5, -0.125, 1.0625, 3.0, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize("options, violations, multipliers", BY_HAND)
def test_ten_violations_by_hand(options, violations, multipliers):
    keeper = Multipliers([Constraint("c", LIMIT, **options)])
    held, found, seen = [], [], []
    for cost in COSTS:
        held.append(keeper.coefficients()["c"])
        keeper.update({"c": cost}, {})
        found.append(keeper.coefficients()["c"])
        seen.append(keeper.metrics()["constraints"]["c"])
    assert found == multipliers  # all are dyadic: exact
    assert [m["violation"] for m in seen] == violations and [m["cost"] for m in seen] == COSTS
    assert [m["multiplier"] for m in seen] == held and held[1:] == multipliers[:-1]
    assert [m["limit"] for m in seen] == [LIMIT] * 10
    capped = options["mechanism"] != "penalty"
    assert [m["saturated"] for m in seen] == [float(capped and abs(x) == 3.0) for x in held]


def test_a_cost_that_shall_be_large_is_the_mirror_image():
    for options in (LAGRANGIAN, PID):
        lower = Multipliers([Constraint("c", 1 - LIMIT, sense="at_least", **options)])
        upper = Multipliers([Constraint("c", LIMIT, **options)])
        for cost in COSTS:
            lower.update({"c": 1 - cost}, {})
            upper.update({"c": cost}, {})
            assert lower.coefficients() == upper.coefficients()


numbers = st.floats(-3, 3, allow_nan=False, width=32)
gains = st.floats(0, 2, allow_nan=False, width=32)
caps = st.sampled_from([0.25, 2.0, 100.0, math.inf])
senses = st.sampled_from(["at_most", "at_least", "equal"])


@examples
@given(cost=numbers, limit=numbers, sense=senses, signed=st.booleans())
def test_violation_is_the_reference(cost, limit, sense, signed):
    assert violation(cost, limit, sense, signed=signed) == reference.violation(cost, limit, sense, signed)


@examples
@given(violations=st.lists(numbers, max_size=30), rate=gains, high=caps, both=st.booleans())
def test_lagrangian_is_the_reference(violations, rate, high, both):
    low, current, found = -high if both else 0.0, 0.0, []
    for v in violations:
        current = lagrangian_multiplier(current, v, rate=rate, low=low, high=high)
        found.append(current)
    np.testing.assert_allclose(found, reference.lagrangian(violations, rate, 0.0, low, high), rtol=1e-12, atol=1e-12)
    assert all(low <= x <= high for x in found)


@examples
@given(violations=st.lists(numbers, max_size=30), kp=gains, ki=gains, kd=gains, high=caps, both=st.booleans())
def test_pid_is_the_reference(violations, kp, ki, kd, high, both):
    low, integral, previous, found = -high if both else 0.0, 0.0, 0.0, []
    for v in violations:
        value, integral = pid_multiplier(integral, previous, v, kp=kp, ki=ki, kd=kd, low=low, high=high)
        previous = v
        found.append(value)
    expected = reference.pid(violations, kp, ki, kd, low, high)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert all(low <= x <= high for x in found)


@examples
@given(violations=st.lists(st.floats(0, 3, width=32), max_size=30), kp=gains, ki=gains, kd=gains)
def test_without_a_cap_one_sided_pid_is_the_plain_formula(violations, kp, ki, kd):
    integral, previous, found = 0.0, 0.0, []
    for v in violations:
        value, integral = pid_multiplier(integral, previous, v, kp=kp, ki=ki, kd=kd, low=0.0, high=math.inf)
        previous = v
        found.append(value)
    plain = [
        max(kp * v + ki * math.fsum(violations[: k + 1]) + kd * (v - (violations[k - 1] if k else 0.0)), 0.0)
        for k, v in enumerate(violations)
    ]
    np.testing.assert_allclose(found, plain, rtol=1e-10, atol=1e-10)


def test_the_integral_does_not_wind_up():
    violations = [1.0] * 50 + [-1.0] * 5
    integral, found = 0.0, []
    for v in violations:
        value, integral = pid_multiplier(integral, v, v, kp=0.0, ki=0.5, kd=0.0, low=0.0, high=2.0)
        found.append(value)
    assert found[49:] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    wound_up = reference.pid(violations, ki=0.5, high=2.0, anti_windup=False)
    assert wound_up[49:] == [2.0] * 6  # what it would be: 46 more updates at the cap
