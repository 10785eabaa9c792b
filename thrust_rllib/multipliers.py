"""What a learner keeps of its constraints: the multipliers, how they act, and how they move from update to update.

An update goes through it in this order; all of it is the same for every learner, since all have the same rollouts:

    costs = multipliers.measure(batches)
    batches = multipliers.penalise(batches)
    coupling_coeffs = multipliers.coupling_coeffs(coupling_coeffs)
    …  # the policy's update
    multipliers.update(costs, values_of_couplings)
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrust_rllib.constraints import Constraint
from thrust_rllib.functional import lagrangian_multiplier, pid_multiplier, violation
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_costs import mean_cost, penalised

logger = logging.getLogger(__name__)

CONSTRAINTS = "constraints"
"""Name of the metrics."""


class Multipliers:
    """The multipliers of a learner's constraints, from update to update.

    Several learners have the same rollouts and so compute the same multipliers.

    Args:
        constraints: of the configuration.
        quiet: says nothing: of several learners the first one speaks.
    """

    def __init__(self, constraints: Sequence[Constraint], quiet: bool = False) -> None:
        self._constraints = {constraint.name: constraint for constraint in constraints}
        self._states = {name: _State.of(constraint) for name, constraint in self._constraints.items()}
        self._metrics: dict[str, dict[str, float]] = {}
        self._told: set[str] = set()
        self._quiet = quiet

    def coefficients(self) -> dict[str, float]:
        """{constraint: λ} that holds for the rollout which comes next, or which is being trained on."""
        return {name: state.multiplier for name, state in self._states.items()}

    def coupling_coeffs(self, scheduled: Mapping[str, Any]) -> dict[str, Any]:
        """{coupling: weight}: the scheduled ones, with those in place that a constraint drives."""
        return {**scheduled, **self._weights("coupling")}

    def _weights(self, of: str) -> dict[str, float]:
        return {
            name: constraint.sign * self._states[name].multiplier
            for name, constraint in self._constraints.items()
            if constraint.of == of
        }

    def penalise(self, batches: Sequence[JointBatch], signals: Sequence[str] = ()) -> list[JointBatch]:
        """The batches with rewards r_i − Σ_k λ_k c_{k,i}; see `joint_costs.penalised`."""
        weights = self._weights("extra")
        return [penalised(batch, weights, signals) for batch in batches]

    def measure(self, batches: Sequence[JointBatch]) -> dict[str, float]:
        """{constraint on an extra: its mean cost per step}; see `joint_costs.mean_cost`."""
        costs = {name: mean_cost(batches, name) for name, own in self._constraints.items() if own.of == "extra"}
        return {name: cost for name, cost in costs.items() if cost is not None}

    def update(self, costs: Mapping[str, float], couplings: Mapping[str, float]) -> None:
        """Moves every multiplier whose cost was measured; called behind the policy's update.

        Where a cost is missing or not finite, as a coupling's in an update without a step is, λ stays.

        Args:
            costs: of `measure`.
            couplings: {coupling: its value in the update}; a coupling may be called like an extra.
        """
        for name, constraint in self._constraints.items():
            state = self._states[name]
            cost = float((couplings if constraint.of == "coupling" else costs).get(name, math.nan))
            measured = math.isfinite(cost)
            found = math.nan
            if measured:
                found = violation(cost, constraint.limit, constraint.sense, signed=constraint.signed)
            self._metrics[name] = {
                "cost": cost if measured else math.nan,
                "limit": constraint.limit,
                "violation": found,
                "multiplier": state.multiplier,
                "saturated": float(state.at_bound(constraint)),
            }
            if measured:
                state.move(constraint, found)
                if found * state.multiplier > 0 and state.at_bound(constraint):
                    self._tell_cap(constraint, cost, state.multiplier)

    def _tell_cap(self, constraint: Constraint, cost: float, multiplier: float) -> None:
        if self._quiet or constraint.name in self._told:
            return
        self._told.add(constraint.name)
        should = {"at_most": "at most", "at_least": "at least", "equal": ""}[constraint.sense]
        logger.warning(
            "constraint %r: its multiplier has reached its cap (%g), and its cost is %.4g where it should be %s. It "
            "cannot press harder from here on. Raise cap= if the reward outweighs the cost; if no policy of this team "
            "can keep the limit, set another limit=. (Told once; see the metrics %s/%s.)",
            constraint.name,
            multiplier,
            cost,
            f"{should} {constraint.limit:g}".strip(),
            CONSTRAINTS,
            constraint.name,
        )

    def metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """{"constraints": {name: {cost, limit, violation, multiplier, saturated}}} of the last update, for a log.

        All numbers of a constraint belong to one rollout: `multiplier` is the λ that held in it, `saturated` is 1 where
        that was the largest possible one; cost and violation are NaN where they were not measured. Empty without
        constraints.
        """
        return {CONSTRAINTS: {name: dict(own) for name, own in self._metrics.items()}} if self._metrics else {}

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Plain numbers, for a checkpoint."""
        return {name: {**dataclasses.asdict(state), "kind": self._kind(name)} for name, state in self._states.items()}

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from a checkpoint; limits and numbers are those of this configuration.

        A constraint that is not in the checkpoint, or is there with another mechanism, sense or object, keeps the
        multiplier that it has, which is told.
        """
        kept = {}
        for name, constraint in self._constraints.items():
            if name in state and state[name]["kind"] == self._kind(name):
                self._states[name].restore(constraint, state[name])
            elif constraint.mechanism != "penalty":
                kept[name] = self._states[name].multiplier
        if kept and not self._quiet:
            logger.warning(
                "the checkpoint has no multipliers for the constraints %s, or has them with another mechanism, sense "
                "or 'of': they stay as they are, %s",
                list(kept),
                ", ".join(f"{value:g}" for value in kept.values()),
            )

    def _kind(self, name: str) -> str:
        constraint = self._constraints[name]
        return f"{constraint.mechanism} {constraint.sense} {constraint.of}"


@dataclass
class _State:
    """What a multiplier remembers."""

    multiplier: float
    integral: float = 0.0
    previous: float = 0.0

    @classmethod
    def of(cls, constraint: Constraint) -> _State:
        """At the start."""
        return cls(constraint.coefficient or constraint.initial or 0.0)

    def at_bound(self, constraint: Constraint) -> bool:
        """Whether the multiplier stands at its cap; a fixed one never does."""
        return constraint.mechanism != "penalty" and abs(self.multiplier) >= constraint.high

    def move(self, constraint: Constraint, found: float) -> None:
        """By one violation."""
        low, high = constraint.low, constraint.high
        if constraint.mechanism == "lagrangian":
            assert constraint.rate is not None
            self.multiplier = lagrangian_multiplier(self.multiplier, found, rate=constraint.rate, low=low, high=high)
        elif constraint.mechanism == "pid":
            kp, ki, kd = (number or 0.0 for number in (constraint.kp, constraint.ki, constraint.kd))
            self.multiplier, self.integral = pid_multiplier(
                self.integral, self.previous, found, kp=kp, ki=ki, kd=kd, low=low, high=high
            )
        self.previous = found

    def restore(self, constraint: Constraint, state: Mapping[str, Any]) -> None:
        """From a checkpoint of the same kind of constraint."""
        if constraint.mechanism != "penalty":
            self.multiplier = min(max(float(state["multiplier"]), constraint.low), constraint.high)
        self.integral, self.previous = float(state["integral"]), float(state["previous"])
