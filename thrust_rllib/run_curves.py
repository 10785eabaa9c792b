"""A run's numbers by iteration, read from its `progress.csv`."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thrust_rllib.command_line.training_progress import in_order

_AGENT_RETURN = "env_runners/agent_episode_returns_mean/"
_COUPLING = "learners/__all_modules__/cross_agent_loss/"


@dataclass(frozen=True)
class RunCurves:
    """A run's numbers by iteration, float64 [I]; NaN where an iteration did not report one.

    Args:
        env_steps: sampled up to the end of the iteration.
        seconds: since the start.
        total_return: sum over agents, mean of the latest finished episodes.
        agent_returns: {agent: the same for one agent}.
        modules: {statistic: {module: values}}.
        couplings: {name: value of the cross-agent loss before its coefficient}.
    """

    env_steps: np.ndarray
    seconds: np.ndarray
    total_return: np.ndarray
    agent_returns: dict[str, np.ndarray]
    modules: dict[str, dict[str, np.ndarray]]
    couplings: dict[str, np.ndarray]


def read_curves(progress_file: Path) -> RunCurves:
    """Reads a `progress.csv` of RLlib.

    Raises:
        ValueError: no such file, or one without an iteration.
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

    modules: dict[str, dict[str, np.ndarray]] = {}
    for name in columns:
        if name.startswith("learners/") and not name.startswith("learners/__all_modules__/"):
            module, _, statistic = name.removeprefix("learners/").rpartition("/")
            modules.setdefault(statistic, {})[module] = column(name)
    return RunCurves(
        env_steps=column("env_runners/num_env_steps_sampled_lifetime"),
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
    )


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
