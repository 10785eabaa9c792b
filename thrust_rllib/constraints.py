"""Constraints on what a team costs, each with a multiplier λ that presses until its limit is kept.

A cost that the environment returns as an extra makes rewards smaller; a coupling's weight is such a multiplier, too:

    JointPPOConfig().training(constraints=(
        Constraint("collisions", limit=0.1, mechanism="pid", kp=1.0, ki=0.1),
        Constraint("connectivity", limit=0.5, mechanism="lagrangian", rate=0.05, sense="at_least"),
        Constraint("redundancy", limit=0.3, mechanism="lagrangian", rate=0.5, of="coupling", sense="equal")))
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from thrust_rllib.envs.names import nearest
from thrust_rllib.functional.multipliers import Sense
from thrust_rllib.options import named_objects

DEFAULT_CAP = 100.0

READS: dict[str, tuple[str, ...]] = {
    "penalty": ("coefficient",),
    "lagrangian": ("rate", "initial", "cap"),
    "pid": ("kp", "ki", "kd", "cap"),
}
"""{mechanism: the numbers it reads}."""

NUMBERS = tuple(dict.fromkeys(name for names in READS.values() for name in names))


@dataclass(frozen=True)
class Constraint:
    """One limit and how it is enforced.

    A cost acts in the reward, r_i − λ c_i, with the λ that held while the rollout was sampled ("at_least": r_i + λ c_i,
    since the cost is then what there shall be more of). Returns that are reported are those of the environment. After
    the policy's update λ moves by the violation of that rollout, v = cost − limit ("at_least": limit − cost).

    | mechanism    | λ of the next rollout                             | reads                                       |
    |--------------|---------------------------------------------------|---------------------------------------------|
    | "penalty"    | `coefficient`, whatever the cost                  | coefficient                                 |
    | "lagrangian" | clip(λ + rate · v, 0, cap)                        | rate, initial (0), cap                      |
    | "pid"        | clip(kp · v + ki · Σv + kd · (v − v_prev), 0, cap)| kp (0), ki (0), kd (0), cap                 |

    The sum Σv is kept where ki · Σv is a possible λ, so that it does not wind up. v_prev is 0 at first. With "equal"
    the bounds are −cap and cap, since a cost is then also to be raised.

    "lagrangian" is a sum of violations alone: a policy that answers late makes it swing around the limit, the more the
    larger its rate. The proportional part of "pid" damps that.

    Args:
        name: the extra that holds the cost (`joint_costs`: of the team, each agent or each pair), or the coupling.
        limit: in the units of the mean per step: of a team's cost over all rows in which anybody acted, of an agent's
            over all steps in which an agent acted. A limit per episode is that number divided by the steps of an
            episode.
        mechanism: see the table.
        coefficient: λ of a penalty, 0 or more.
        rate: step of λ per unit of violation and update, more than 0.
        initial: λ of the first rollout.
        cap: largest λ, more than 0; 100 if not given. A limit that no policy can keep drives λ there, which is told
            once. `math.inf` for none.
        kp: weight of the violation.
        ki: weight of the sum of violations.
        kd: weight of the change of the violation.
        sense: what the cost shall be: "at_most", "at_least" or "equal" to the limit.
        signed: False counts a kept limit as v = 0 (the seed's): "lagrangian" then never falls.
        of: "extra"; or "coupling": the weight of the cross-agent loss `name` is λ ("at_least": −λ), and its cost is
            the coupling's value, mean over the update's minibatches.

    Raises:
        ValueError: a mechanism that does not exist, a number that it does not read or lacks, or one out of range.
    """

    name: str
    limit: float
    mechanism: Literal["penalty", "lagrangian", "pid"] = "penalty"
    _: KW_ONLY
    coefficient: float | None = None
    rate: float | None = None
    initial: float | None = None
    cap: float | None = None
    kp: float | None = None
    ki: float | None = None
    kd: float | None = None
    sense: Sense = "at_most"
    signed: bool = True
    of: Literal["extra", "coupling"] = "extra"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(
                f"a constraint cannot be called {self.name!r}; needed: the name of an extra or a coupling, without '/' "
                "(it is part of a metric's name)"
            )
        choices = {
            "mechanism": tuple(READS),
            "sense": get_args(Sense),
            "of": ("extra", "coupling"),
            "signed": (True, False),
        }
        for field, known in choices.items():
            if (value := getattr(self, field)) not in known:
                raise self._error(field, f"one of {', '.join(map(repr, known))}{nearest(value, map(str, known))}")
        self._check_numbers()
        self._check_needed()
        if self.sense == "equal" and not self.signed:
            raise self._error("signed", "True with sense='equal', which reads violations of both signs")
        if self.mechanism == "penalty" and (self.of == "coupling" or self.sense == "equal"):
            option = "of" if self.of == "coupling" else "sense"
            raise self._error(option, "with it mechanism='lagrangian' or 'pid': a penalty's weight does not move")

    def _error(self, field: str, needed: str) -> ValueError:
        return ValueError(f"constraint {self.name!r}: {field}={getattr(self, field)!r}; needed: {needed}")

    def _check_numbers(self) -> None:
        reads = READS[self.mechanism]
        for field in ("limit", *NUMBERS):
            value = getattr(self, field)
            if value is None and field != "limit":
                continue
            if field != "limit" and field not in reads:
                raise ValueError(
                    f"constraint {self.name!r}: mechanism={self.mechanism!r} does not read {field}={value!r}; it reads "
                    f"{', '.join(reads)}. Leave it out, or choose another mechanism."
                )
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
                raise self._error(field, "a number")
            if math.isinf(value) and field != "cap":
                raise self._error(field, "a finite number")
            if value < 0 and field not in ("limit", "initial"):
                raise self._error(field, "0 or more. For a cost that shall be large set sense='at_least'")
            if value == 0 and field in ("rate", "cap"):
                raise self._error(field, "more than 0; else the multiplier would never move")
            object.__setattr__(self, field, float(value))
        if self.initial is not None and not self.low <= self.initial <= self.high:
            raise self._error("initial", f"a multiplier from {self.low:g} to {self.high:g}, as sense and cap say")

    def _check_needed(self) -> None:
        if self.mechanism == "penalty" and self.coefficient is None:
            needed = "coefficient=…, the reward that one unit of cost takes away"
        elif self.mechanism == "lagrangian" and self.rate is None:
            needed = "rate=…, by which the multiplier moves per unit of violation and update"
        elif self.mechanism == "pid" and not (self.kp or self.ki):
            needed = "kp=… or ki=… more than 0; else the multiplier would follow changes of the cost only"
        else:
            return
        raise ValueError(f"constraint {self.name!r}: mechanism={self.mechanism!r} needs {needed}")

    @property
    def high(self) -> float:
        """Largest multiplier."""
        return DEFAULT_CAP if self.cap is None else self.cap

    @property
    def low(self) -> float:
        """Least multiplier."""
        return -self.high if self.sense == "equal" else 0.0

    @property
    def sign(self) -> float:
        """Of the cost in what is minimised."""
        return -1.0 if self.sense == "at_least" else 1.0


def as_constraints(value: Any) -> tuple[Constraint, ...]:
    """The option `constraints`: objects, or dicts of their arguments, in which Tune can search.

        config.training(constraints=[{"name": "collisions", "limit": tune.uniform(0, 1), "coefficient": 1.0}])

    Raises:
        ValueError: something else, an argument that does not exist, or two constraints of one name.
    """
    return named_objects("constraints", value, Constraint)


def check_couplings(
    constraints: Sequence[Constraint], couplings: Iterable[str], coupling_coeffs: Iterable[str]
) -> None:
    """Checks the constraints that drive the weight of a coupling.

    Args:
        constraints: of the configuration.
        couplings: names in `cross_agent_losses`.
        coupling_coeffs: names in `cross_agent_coeffs`.

    Raises:
        ValueError: there is no such coupling, or its weight is given as well.
    """
    couplings = sorted(couplings)
    for constraint in constraints:
        if constraint.of != "coupling":
            continue
        if constraint.name not in couplings:
            raise ValueError(
                f"constraint {constraint.name!r} drives the weight of a coupling; cross_agent_losses has {couplings}"
                f"{nearest(constraint.name, couplings)}"
            )
        if constraint.name in coupling_coeffs:
            raise ValueError(
                f"cross_agent_coeffs gives {constraint.name!r} a weight, which a constraint drives as well; leave it "
                "out there, or leave out the constraint"
            )
