"""How the multiplier λ of a constraint moves: numbers in, numbers out.

The cost c is measured over a rollout, ℓ is its limit; `violation` turns both into v, and a mechanism turns v into λ in
[low, high]. All in float64. With `low` = 0 a multiplier is never negative; a cost that is to be held at a value, from
above and from below, needs `low` = −`high`.
"""

from __future__ import annotations

from typing import Literal

Sense = Literal["at_most", "at_least", "equal"]


def violation(cost: float, limit: float, sense: Sense = "at_most", *, signed: bool = True) -> float:
    """By how much a cost is on the wrong side of its limit.

    v = c − ℓ for "at_most" and "equal"
    v = ℓ − c for "at_least"
    one-sided: max(v, 0)

    Args:
        cost: c, of a whole rollout.
        limit: ℓ.
        sense: what the cost shall be.
        signed: False is one-sided: a limit that is kept counts as 0, so that a multiplier that adds up violations
            never falls.

    Returns:
        v.
    """
    value = limit - cost if sense == "at_least" else cost - limit
    return value if signed else max(value, 0.0)


def lagrangian_multiplier(multiplier: float, violation: float, *, rate: float, low: float, high: float) -> float:
    """One step of dual ascent.

    λ ← clip(λ + η v, low, high)

    Args:
        multiplier: λ so far.
        violation: v.
        rate: η.
        low: least multiplier.
        high: largest multiplier.

    Returns:
        The next λ.
    """
    return _clip(multiplier + rate * violation, low, high)


def pid_multiplier(
    integral: float,
    previous: float,
    violation: float,
    *,
    kp: float,
    ki: float,
    kd: float,
    low: float,
    high: float,
) -> tuple[float, float]:
    """One step of a controller with a proportional, an integral and a derivative part.

    I ← clip(I + v, low / ki, high / ki), or 0 where ki is 0
    λ = clip(kp v + ki I + kd (v − v_prev), low, high)

    The clip of I is its anti-windup: the integral part alone stays inside the bounds of λ. Without it a violation of
    many updates, which λ could not answer any more, would hold λ at its bound for as long afterwards.

    Args:
        integral: I so far, 0 at first.
        previous: v_prev, the violation of the step before, 0 at first.
        violation: v.
        kp: weight of the violation.
        ki: weight of the sum of violations.
        kd: weight of the change of the violation.
        low: least multiplier, 0 or less.
        high: largest multiplier, more than 0.

    Returns:
        λ and the next I.

    Source: Stooke et al. 2020, "Responsive safety in reinforcement learning by PID Lagrangian methods", whose I is kept
    at 0 or more as with `low` = 0 here; there only a rising cost counts for the derivative part, here any change does.
    """
    integral = _clip(integral + violation, low / ki, high / ki) if ki > 0 else 0.0
    multiplier = kp * violation + ki * integral + kd * (violation - previous)
    return _clip(multiplier, low, high), integral


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
