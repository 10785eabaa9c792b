"""A run's numbers by iteration, read from its `progress.csv`."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from thrust_rllib.command_line.training_progress import in_order
from thrust_rllib.entropy_guard import STOP_REASON

Key = TypeVar("Key")
_STEPS = "env_runners/num_env_steps_sampled_lifetime"
_AGENT_RETURN = "env_runners/agent_episode_returns_mean/"
_COUPLING = "learners/__all_modules__/cross_agent_loss/"
_DIVERSITY = re.compile(r"learners/__all_modules__/diversity/(.+)/([^/]+)")
_CONSTRAINT = re.compile(r"learners/__all_modules__/constraints/(.+)/(cost|limit|multiplier|violation)")
_AUXILIARY = re.compile(r"learners/(.+)/auxiliary_(?:loss|(accuracy))/([^/]+)")
_GRADIENT = re.compile(r"learners/(.+)/coupling_gradient/(.+)/(norm|norm_ratio|cosine)")


@dataclass(frozen=True)
class RunCurves:
    """A run's numbers by iteration, float64 [I]; NaN where an iteration did not report one.

    Args:
        env_steps: sampled up to the end of the iteration; finite.
        seconds: since the start.
        total_return: sum over agents, mean of the latest finished episodes.
        agent_returns: {agent: the same for one agent}.
        modules: {statistic: {module: values}}.
        couplings: {name: value of the cross-agent loss before its coefficient}.
        gradients: {(coupling, "norm", "norm_ratio" or "cosine"): {module: values}}, the coupling's gradient against the
            module's own, NaN where an iteration repeats an earlier measurement; empty where the run measured none.
        diversity: {statistic: {group of alike modules: values}}, NaN where an iteration repeats an earlier measurement;
            empty where the run measured none.
        auxiliary_accuracy: {target: {module: accuracy of its predictions}}.
        constraints: {name: {"cost", "limit", "multiplier" or "violation": values}}.
        note: what a reader has to know about the file; None for nothing.
        stop_reason: why the training itself ended before its limit.
    """

    env_steps: np.ndarray
    seconds: np.ndarray
    total_return: np.ndarray
    agent_returns: dict[str, np.ndarray]
    modules: dict[str, dict[str, np.ndarray]]
    couplings: dict[str, np.ndarray]
    gradients: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)
    diversity: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    auxiliary_accuracy: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    constraints: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    note: str | None = None
    stop_reason: str | None = None

    @property
    def notes(self) -> list[str]:
        """What a reader has to know before the numbers."""
        return [text for text in (self.stop_reason, self.note) if text]


class NoIterationError(ValueError):
    """A folder without a run, or a run that was stopped before its first iteration was written."""


def read_curves(progress_file: Path) -> RunCurves:
    """Reads a `progress.csv` of RLlib.

    A last row that was cut off while it was written is left out, see `RunCurves.note`.

    Raises:
        NoIterationError: no such file, or one without an iteration.
        ValueError: it is no text, or has no count of steps.
    """
    if not progress_file.is_file():
        raise NoIterationError(
            f"there is no {progress_file}; a report needs the folder of a run that did one iteration"
        )
    rows, columns, note = _read_rows(progress_file)
    if not rows:
        raise NoIterationError(f"{progress_file} has no iteration yet")

    def column(name: str) -> np.ndarray:
        return np.array([_number(row.get(name)) for row in rows])

    env_steps = column(_STEPS)
    known = np.flatnonzero(np.isfinite(env_steps))
    if len(known) == 0:
        raise ValueError(f"{progress_file} has no number in its column {_STEPS}; a report counts in these steps")
    modules: dict[str, dict[str, np.ndarray]] = {}
    gradients: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    diversity: dict[str, dict[str, np.ndarray]] = {}
    accuracy: dict[str, dict[str, np.ndarray]] = {}
    constraints: dict[str, dict[str, np.ndarray]] = {}
    for name in columns:
        if gradient := _GRADIENT.fullmatch(name):
            module, coupling, statistic = gradient.groups()
            gradients.setdefault((coupling, statistic), {})[module] = column(name)
        elif measured := _DIVERSITY.fullmatch(name):
            group, statistic = measured.groups()
            diversity.setdefault(statistic, {})[group] = column(name)
        elif constrained := _CONSTRAINT.fullmatch(name):
            constraint, kind = constrained.groups()
            constraints.setdefault(constraint, {})[kind] = column(name)
        elif auxiliary := _AUXILIARY.fullmatch(name):
            module, is_accuracy, target = auxiliary.groups()
            if is_accuracy:
                accuracy.setdefault(target, {})[module] = column(name)
        elif name.startswith("learners/") and not name.startswith("learners/__all_modules__/"):
            module, _, statistic = name.removeprefix("learners/").rpartition("/")
            modules.setdefault(statistic, {})[module] = column(name)
    return RunCurves(
        env_steps=np.interp(np.arange(len(env_steps)), known, env_steps[known]),
        seconds=column("time_total_s"),
        total_return=column("env_runners/episode_return_mean"),
        agent_returns=in_order(
            {name.removeprefix(_AGENT_RETURN): column(name) for name in columns if name.startswith(_AGENT_RETURN)}
        ),
        modules={statistic: in_order(values) for statistic, values in modules.items()},
        couplings={
            name.removeprefix(_COUPLING): column(name)
            for name in columns
            if name.startswith(_COUPLING) and name != _COUPLING + "total"
        },
        gradients={key: in_order(values) for key, values in sorted(_measured(gradients, lambda key: key[0]).items())},
        diversity={
            statistic: in_order(values) for statistic, values in _measured(diversity, lambda _: "all at once").items()
        },
        constraints=in_order(constraints),
        auxiliary_accuracy={target: in_order(values) for target, values in sorted(accuracy.items())},
        note=note,
        stop_reason=rows[-1].get(STOP_REASON) or None,
    )


def last_known(values: np.ndarray) -> float | None:
    """The last finite one."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _read_rows(path: Path) -> tuple[list[dict[str, str]], list[str], str | None]:
    """Complete rows, columns, and a note where the last row was not complete."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows, columns = list(reader), list(reader.fieldnames or ())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); remove what is broken in it, or the run") from error
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV ({error}); remove what is broken in it, or the run") from error
    if not rows:
        return rows, columns, None
    last, before = _number(rows[-1].get(_STEPS)), [_number(row.get(_STEPS)) for row in rows[:-1]]
    backwards = bool(before) and last <= np.nanmax([-math.inf, *before])
    if None in rows[-1].values() or not text.endswith("\n"):
        why = "it was cut off while it was written"
    elif backwards:
        why = f"its environment steps, {last:.0f}, are no more than those before"
    else:
        return rows, columns, None
    return rows[:-1], columns, f"the last row of {path.name} is left out: {why}"


def _measured(
    reported: dict[Key, dict[str, np.ndarray]], together: Callable[[Key], str]
) -> dict[Key, dict[str, np.ndarray]]:
    """NaN in place of repetitions: a run measures every few updates, and reports the last measurement in all.

    Args:
        reported: {what: {module or group of modules: values}}.
        together: what is measured at the same time has the same answer. An iteration measured it where any of its
            numbers is not the one of the iteration before.
    """
    measured: dict[str, np.ndarray] = {}
    for key, modules in reported.items():
        for values in modules.values():
            new = np.isfinite(values) & (values != np.concatenate([[math.nan], values[:-1]]))
            measured[together(key)] = measured.get(together(key), False) | new
    return {
        key: {module: np.where(measured[together(key)], values, math.nan) for module, values in modules.items()}
        for key, modules in reported.items()
    }


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
