"""The few numbers of an RLlib result that a person follows while a run goes on, and when the run ends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

SECONDS_PER_MINUTE = 60.0
Value = TypeVar("Value")


@dataclass(frozen=True)
class Progress:
    """State of a run after an iteration.

    Args:
        iteration: counted from 1.
        env_steps: sampled so far.
        seconds: since training started.
        steps_per_second: environment steps of this iteration / its duration.
        return_mean: sum over agents, mean of the latest episodes; None before the first episode has ended.
        agent_returns: {agent: mean of the latest episodes}.
        couplings: {name of the cross-agent loss: value before its coefficient}.
        constraints: {name: {cost, limit, multiplier, …}}, as the learner reports them.
        modules: {module: {statistic: value}}, as the learner reports them.
    """

    iteration: int
    env_steps: int
    seconds: float
    steps_per_second: float
    return_mean: float | None = None
    agent_returns: dict[str, float] = field(default_factory=dict)
    couplings: dict[str, float] = field(default_factory=dict)
    constraints: dict[str, dict[str, float]] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Mapping[str, Any], seconds: float) -> Progress:
        """Reads what `JointPPO.train()` returned."""
        sampled = result.get("env_runners", {})
        learners = result.get("learners", {})
        shared = learners.get("__all_modules__", {})
        couplings = shared.get("cross_agent_loss", {})
        return_mean = sampled.get("episode_return_mean")
        return cls(
            iteration=int(result["training_iteration"]),
            env_steps=int(sampled.get("num_env_steps_sampled_lifetime", 0)),
            seconds=seconds,
            steps_per_second=float(sampled.get("num_env_steps_sampled", 0)) / max(result["time_this_iter_s"], 1e-9),
            return_mean=None if return_mean is None else float(return_mean),
            agent_returns=in_order(
                {str(a): float(r) for a, r in sampled.get("agent_episode_returns_mean", {}).items()}
            ),
            couplings={str(name): float(v) for name, v in couplings.items() if name != "total"},
            constraints=in_order(
                {
                    str(name): {key: float(v) for key, v in own.items()}
                    for name, own in shared.get("constraints", {}).items()
                }
            ),
            modules={
                str(m): {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}
                for m, values in learners.items()
                if m != "__all_modules__"
            },
        )

    def module_mean(self, statistic: str) -> float | None:
        """Mean over the modules that report `statistic`, or None."""
        values = [m[statistic] for m in self.modules.values() if math.isfinite(m.get(statistic, math.nan))]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Limit:
    """When a run ends: after so many "iterations", environment "steps" or "minutes"; exactly one kind.

    A run always ends with a whole iteration.
    """

    kind: str
    amount: float

    def done(self, progress: Progress) -> float:
        """How much of the amount has been used, in its unit."""
        used = {
            "iterations": progress.iteration,
            "steps": progress.env_steps,
            "minutes": progress.seconds / SECONDS_PER_MINUTE,
        }
        return float(used[self.kind])

    def fraction(self, progress: Progress) -> float:
        """Share of the run that lies behind, in [0, 1]."""
        return min(1.0, self.done(progress) / self.amount)

    def reached(self, progress: Progress) -> bool:
        """Whether the run is to end."""
        return self.done(progress) >= self.amount

    def seconds_left(self, progress: Progress) -> float:
        """Estimated from the mean speed so far."""
        fraction = self.fraction(progress)
        return progress.seconds * (1 - fraction) / fraction if fraction > 0 else math.inf

    def __str__(self) -> str:
        return f"{self.amount:,g} {self.kind}" if self.kind == "minutes" else f"{int(self.amount):,} {self.kind}"


def in_order(named: Mapping[str, Value]) -> dict[str, Value]:
    """Sorted by name as people count: agent_2 before agent_10. RLlib's own order changes from run to run."""

    def key(item: tuple[str, Value]) -> list[tuple[bool, int, str]]:
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", item[0])]

    return dict(sorted(named.items(), key=key))


def number(value: float | None) -> str:
    """A number for people: four significant digits, thousands separated; a dash for none."""
    if value is None or math.isnan(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def against_limit(constraint: Mapping[str, float]) -> str:
    """A constraint's cost and limit, as 0.12 / 0.1, or 0.6 / at least 0.5."""
    least = "at least " if is_at_least(*(constraint[key] for key in ("cost", "limit", "violation"))) else ""
    return f"{number(constraint['cost'])} / {least}{number(constraint['limit'])}"


def is_at_least(cost: float, limit: float, violation: float) -> bool:
    """Whether a cost shall not be below its limit, told by what counts as a violation; False where that cannot tell."""
    return (cost > limit and violation <= 0) or (cost < limit and violation > 0)


def multiplier(constraint: Mapping[str, float]) -> str:
    """A constraint's multiplier, as 3.4, or 100 (at its cap)."""
    return number(constraint["multiplier"]) + (" (at its cap)" if constraint["saturated"] == 1 else "")


def duration(seconds: float) -> str:
    """As 0:05, 12:34 or 1:02:03."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
