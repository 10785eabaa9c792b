"""A run's numbers by iteration, read from its `progress.csv`."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thrust_rllib.command_line.training_progress import in_order

_STEPS = "env_runners/num_env_steps_sampled_lifetime"
_AGENT_RETURN = "env_runners/agent_episode_returns_mean/"
_COUPLING = "learners/__all_modules__/cross_agent_loss/"
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
            module's own; empty where the run did not measure it.
    """

    env_steps: np.ndarray
    seconds: np.ndarray
    total_return: np.ndarray
    agent_returns: dict[str, np.ndarray]
    modules: dict[str, dict[str, np.ndarray]]
    couplings: dict[str, np.ndarray]
    gradients: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)


def read_curves(progress_file: Path) -> RunCurves:
    """Reads a `progress.csv` of RLlib.

    Raises:
        ValueError: no such file, or one without an iteration, or without a count of steps.
    """
    if not progress_file.is_file():
        raise ValueError(f"there is no {progress_file}; a report needs the folder of a run that did one iteration")
    with progress_file.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), list(reader.fieldnames or ())
    if not rows:
        raise ValueError(f"{progress_file} has no iteration yet")

    def column(name: str) -> np.ndarray:
        return np.array([_number(row.get(name)) for row in rows])

    env_steps = column(_STEPS)
    known = np.flatnonzero(np.isfinite(env_steps))
    if len(known) == 0:
        raise ValueError(f"{progress_file} has no number in its column {_STEPS}; a report counts in these steps")
    modules: dict[str, dict[str, np.ndarray]] = {}
    gradients: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name in columns:
        if gradient := _GRADIENT.fullmatch(name):
            module, coupling, statistic = gradient.groups()
            gradients.setdefault((coupling, statistic), {})[module] = column(name)
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
        gradients={key: in_order(values) for key, values in sorted(gradients.items())},
    )


def last_known(values: np.ndarray) -> float | None:
    """The last finite one."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
