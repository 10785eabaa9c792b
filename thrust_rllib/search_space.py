"""What a sweep varies: one option of the configuration each, over a range of numbers or a list of values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune

MAX_CORNERS = 64


@dataclass(frozen=True)
class Parameter:
    """One option that differs between trials.

    Args:
        name: for people.
        path: where it stands in a configuration's dict: ("lr",), or ("cross_agent_coeffs", "redundancy").
        choices: the values of a list; empty for a range.
        low: lower end of a range.
        high: upper end.
        log: the logarithm is uniform, not the number.

    Raises:
        ValueError: a list with less than two values or one value twice, or ends that are no range.
    """

    name: str
    path: tuple[str, ...]
    choices: tuple[Any, ...] = ()
    low: float = math.nan
    high: float = math.nan
    log: bool = False

    def __post_init__(self) -> None:
        if self.choices:
            twice = [value for i, value in enumerate(self.choices) if value in self.choices[:i]]
            if len(self.choices) < 2 or twice:
                raise ValueError(f"{self.name} has the values {list(self.choices)}; needed: two or more different ones")
            return
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"{self.name} ranges from {self.low:g} to {self.high:g}; needed: finite, the smaller first"
            )
        if self.log and self.low <= 0:
            raise ValueError(
                f"{self.name} ranges from {self.low:g} on a logarithmic scale; needed: more than 0, or a uniform "
                f"range: {self.low:g}:{self.high:g}:linear"
            )

    @property
    def ends(self) -> list[Any]:
        """All values of a list, both ends of a range: what is tried before a sweep begins."""
        return list(self.choices) or [self.low, self.high]

    def domain(self, grid: bool = False) -> Any:
        """As Tune draws it; `grid`: as Tune goes through a list.

        Raises:
            ValueError: a range cannot be gone through.
        """
        if self.choices:
            return tune.grid_search(list(self.choices)) if grid else tune.choice(list(self.choices))
        if grid:
            raise ValueError(
                f"{self.name} is the range {self}, and a grid needs lists: give the values, such as {self.low:g},"
                f"{self.high:g}, or draw them at random (--search random)"
            )
        return tune.loguniform(self.low, self.high) if self.log else tune.uniform(self.low, self.high)

    def mutations(self) -> Any:
        """As `PopulationBasedTraining` takes it, which goes to neighbours in a list."""
        numbers = all(isinstance(value, (int, float)) for value in self.choices)
        return (sorted(self.choices) if numbers else list(self.choices)) if self.choices else self.domain()

    def clip(self, value: float) -> float:
        """`value`, or the nearer end of the range."""
        return value if self.choices else min(max(value, self.low), self.high)

    def of(self, config: Any) -> Any:
        """The value in a configuration's dict; None where it is not there."""
        for key in self.path:
            names = (key, *other_names(key))
            config = next((config[name] for name in names if isinstance(config, dict) and name in config), None)
        return config

    def __str__(self) -> str:
        if self.choices:
            return ",".join(str(value) for value in self.choices)
        return f"{self.low:g}:{self.high:g}" + ("" if self.log else ":linear")


def parse_parameter(
    option: str,
    text: str,
    path: Sequence[str],
    parse: Callable[[str], Any] = float,
    *,
    log: bool = True,
    ranges: bool = True,
) -> Parameter | Any:
    """A `Parameter` from "1e-4:1e-2", "0:1:linear", "1:9:log" or "64,128"; a single value as it is.

    Args:
        option: that it was given to.
        text: what was given.
        path: see `Parameter`.
        parse: from the text of one value to it; raises ValueError.
        log: the scale of a range that does not name one.
        ranges: False refuses them.

    Raises:
        ValueError: what was given, what is needed.
    """
    name = option.removeprefix("--")
    if ":" in text:
        ends, scale = text.split(":")[:2], text.split(":")[2:] or ["log" if log else "linear"]
        if not ranges:
            raise ValueError(f"{option} {text}; needed: a list of values, such as 64,128,256")
        if len(scale) > 1 or scale[0] not in ("log", "linear"):
            raise ValueError(f"{option} {text}; needed: LOW:HIGH, LOW:HIGH:linear or LOW:HIGH:log")
        low, high = (_value(option, text, end, float) for end in ends)
        return Parameter(name, tuple(path), low=low, high=high, log=scale[0] == "log")
    values = [_value(option, text, part, parse) for part in text.split(",")]
    return values[0] if len(values) == 1 else Parameter(name, tuple(path), choices=tuple(values))


def _value(option: str, text: str, part: str, parse: Callable[[str], Any]) -> Any:
    try:
        if not part.strip():
            raise ValueError
        return parse(part.strip())
    except ValueError:
        kind = "a whole number" if parse is int else "a number"
        raise ValueError(f"{option} {text}: {part.strip()!r} is not {kind}") from None


def other_names(option: str) -> list[str]:
    """What else RLlib calls an option in a configuration's dict: _train_batch_size_per_learner, lambda."""
    return [name for name in (f"_{option}", option.rstrip("_")) if name != option]


def put(values: Iterable[tuple[Parameter, Any]], into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a configuration's dict with values at their parameters' places."""
    found = dict(into or {})
    for parameter, value in values:
        place = found
        for key in parameter.path[:-1]:
            place[key] = dict(place.get(key, {}))
            place = place[key]
        place[parameter.path[-1]] = value
    return found


def corners(parameters: Sequence[Parameter]) -> list[tuple[Any, ...]]:
    """Values to try out: all combinations of ends and choices if they are few, else one parameter at a time."""
    if math.prod(len(p.ends) for p in parameters) <= MAX_CORNERS:
        return list(itertools.product(*(p.ends for p in parameters)))
    first = tuple(p.ends[0] for p in parameters)
    changed = ((*first[:i], value, *first[i + 1 :]) for i, p in enumerate(parameters) for value in p.ends[:MAX_CORNERS])
    return list(dict.fromkeys([first, *changed]))


@dataclass(frozen=True)
class KeepInRange:
    """What `PopulationBasedTraining` calls after a mutation, which multiplies: nothing leaves its range."""

    parameters: tuple[Parameter, ...]

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """The same dict, changed."""
        for parameter in self.parameters:
            place = config
            for key in parameter.path[:-1]:
                place = place[key]
            place[parameter.path[-1]] = parameter.clip(place[parameter.path[-1]])
        return config
