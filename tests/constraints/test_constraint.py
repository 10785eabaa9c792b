"""What a constraint refuses, and in which forms it comes."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from thrust_rllib import JointPPOConfig
from thrust_rllib.constraints import Constraint, as_constraints, check_couplings

PID = {"mechanism": "pid", "kp": 1.0}
LAGRANGIAN = {"mechanism": "lagrangian", "rate": 0.1}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mechanism": "lagrange"}, "mechanism='lagrange'; needed: one of 'penalty', 'lagrangian', 'pid'; did you mean "
         "'lagrangian'"),
        ({"mechanism": ["pid"]}, "needed: one of 'penalty'"),
        ({"sense": "at_mots", **PID}, "did you mean 'at_most'"),
        ({"of": "couplings", **PID}, "did you mean 'coupling'"),
        ({"signed": "no", **PID}, "signed='no'; needed: one of True, False"),
        ({}, "mechanism='penalty' needs coefficient="),
        ({"mechanism": "lagrangian"}, "needs rate="),
        ({"mechanism": "pid"}, "needs kp=… or ki=…"),
        ({"mechanism": "pid", "kp": 0.0, "kd": 1.0}, "needs kp=… or ki=…"),
        ({"coefficient": 1.0, "rate": 0.1}, "mechanism='penalty' does not read rate=0.1; it reads coefficient"),
        ({"coefficient": 1.0, "cap": 5.0}, "does not read cap=5.0"),
        ({**LAGRANGIAN, "kp": 1.0}, "does not read kp=1.0; it reads rate, initial, cap"),
        ({**PID, "initial": 1.0}, "mechanism='pid' does not read initial=1.0"),
        ({"coefficient": -1.0}, "coefficient=-1.0; needed: 0 or more. For a cost that shall be large"),
        ({**LAGRANGIAN, "rate": 0.0}, "rate=0.0; needed: more than 0"),
        ({**LAGRANGIAN, "rate": math.inf}, "rate=inf; needed: a finite number"),
        ({**PID, "ki": math.nan}, "ki=nan; needed: a number"),
        ({**PID, "kd": True}, "kd=True; needed: a number"),
        ({**PID, "kp": "1"}, "kp='1'; needed: a number"),
        ({**PID, "cap": 0}, "cap=0; needed: more than 0"),
        ({**PID, "cap": -1}, "cap=-1; needed: 0 or more"),
        ({**LAGRANGIAN, "cap": math.nan}, "cap=nan; needed: a number"),
        ({**LAGRANGIAN, "initial": 7.0, "cap": 5.0}, "initial=7.0; needed: a multiplier from 0 to 5"),
        ({**LAGRANGIAN, "initial": -1.0}, "a multiplier from 0 to 100"),
        ({**PID, "limit": math.nan}, "limit=nan; needed: a number"),
        ({**PID, "limit": -math.inf}, "limit=-inf; needed: a finite number"),
        ({**PID, "limit": None}, "limit=None; needed: a number"),
        ({**PID, "limit": np.zeros(2)}, "needed: a number"),
        ({**PID, "name": ""}, "cannot be called ''"),
        ({**PID, "name": "a/b"}, "without '/'"),
        ({**PID, "name": 3}, "cannot be called 3"),
        ({**PID, "sense": "equal", "signed": False}, "needed: True with sense='equal'"),
        ({"coefficient": 1.0, "of": "coupling"}, "of='coupling'; needed: with it mechanism='lagrangian' or 'pid'"),
        ({"coefficient": 1.0, "sense": "equal"}, "sense='equal'; needed: with it mechanism"),
    ],
)  # fmt: skip
def test_wrong_constraints(options, message):
    options = {"name": "cost", "limit": 0.1, **options}
    with pytest.raises(ValueError) as error:
        Constraint(**options)
    assert message in str(error.value)


def test_the_numbers_become_plain_ones():
    constraint = Constraint("c", np.float32(0.5), mechanism="pid", kp=1, ki=np.int64(2), cap=math.inf)
    assert [type(x) for x in (constraint.limit, constraint.kp, constraint.ki)] == [float] * 3
    assert (constraint.low, constraint.high, constraint.sign) == (0.0, math.inf, 1.0)
    target = Constraint("c", 1, sense="equal", **LAGRANGIAN, initial=-100)
    assert (target.low, target.high) == (-100.0, 100.0)
    assert Constraint("c", 1, sense="at_least", **PID).sign == -1.0


def test_it_is_plain_data():
    constraint = Constraint("c", 0.5, **LAGRANGIAN)
    for other in (pickle.loads(pickle.dumps(constraint)), copy.deepcopy(constraint), dataclasses.replace(constraint)):
        assert other == constraint and hash(other) == hash(constraint)
    assert as_constraints([dataclasses.asdict(constraint), Constraint("d", 1, coefficient=0)]) == (
        constraint,
        Constraint("d", 1, coefficient=0),
    )
    assert as_constraints(()) == ()


@pytest.mark.parametrize(
    "value, message",
    [
        (Constraint("c", 1, **PID), r"needed: a tuple of Constraint\(name, limit, …\), or dicts of its"),
        ("cost", "needed: a tuple"),
        (None, "needed: a tuple"),
        ({"name": "c", "limit": 1}, "needed: a tuple"),
        (("cost",), "constraints has 'cost'"),
        (({"name": "c", "limit": 1, "mechansim": "pid"},), "has no 'mechansim'.*did you mean 'mechanism'"),
        (({"name": "c"},), r"lacks \['limit'\]"),
        ((Constraint("c", 1, **PID), Constraint("c", 2, **PID)), "constraints has 'c' more than once"),
    ],
)
def test_wrong_options(value, message):
    with pytest.raises(ValueError, match=message):
        as_constraints(value)


def test_couplings_that_are_driven():
    driven = [Constraint("spread", 0.3, of="coupling", **PID), Constraint("cost", 1, **PID)]
    check_couplings(driven, ["spread", "other"], ["other"])
    with pytest.raises(ValueError, match="cross_agent_losses has \\['spraed'\\]; did you mean 'spraed'"):
        check_couplings(driven, ["spraed"], [])
    with pytest.raises(ValueError, match="cross_agent_coeffs gives 'spread' a weight"):
        check_couplings(driven, ["spread"], ["spread"])


def resolved(constraints):
    """What the trials of a search have."""
    space = JointPPOConfig().environment("spread").training(constraints=constraints).to_dict()
    configs = [JointPPOConfig().update_from_dict(trial) for _, trial in generate_variants(space)]
    for config in configs:
        config.validate()
    return [config.constraints for config in configs]


@pytest.mark.parametrize("kind", [list, tuple])
def test_tune_searches_in_limits(kind):
    given = {"name": "collisions", "limit": tune.uniform(0.2, 0.3), "coefficient": 1.0}
    ((found,),) = resolved(kind([given]))
    assert isinstance(found, Constraint) and 0.2 < found.limit < 0.3
    with pytest.raises(ValueError, match="constraint 'collisions': limit=.*; needed: a number"):
        JointPPOConfig().environment("spread").training(constraints=kind([given])).validate()


def test_tune_searches_in_whole_constraints():
    constraint = Constraint("collisions", 0.5, **LAGRANGIAN)
    assert resolved(tune.grid_search([(constraint,), ()])) == [(constraint,), ()]
