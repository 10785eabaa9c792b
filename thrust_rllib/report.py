"""The report of a run: learning curves and final numbers, from its `progress.csv` alone."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thrust_rllib.command_line.run_folder import PROGRESS_FILE
from thrust_rllib.command_line.run_record import write_json
from thrust_rllib.command_line.training_progress import in_order
from thrust_rllib.learning_curves import learning_curves

REPORT = "report"
PLOT = "learning_curves.png"
SUMMARY = "summary.json"

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


def write_report(folder: Path, evaluation: Mapping[str, Any] | None = None) -> Path:
    """Writes `report/learning_curves.png` and `report/summary.json` into a run's folder.

    Args:
        folder: of the run.
        evaluation: the runners' results of an evaluation, as RLlib reports them.

    Returns:
        The path of the plot.
    """
    curves = read_curves(folder / PROGRESS_FILE)
    target = folder / REPORT
    target.mkdir(exist_ok=True)
    write_json(target / SUMMARY, summary(curves, evaluation))
    figure = learning_curves(curves, title=folder.name)
    figure.savefig(target / PLOT, dpi=130)
    return target / PLOT


def summary(curves: RunCurves, evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The final numbers; the last known where the last iteration reported none."""
    finite = curves.total_return[np.isfinite(curves.total_return)]
    best = int(np.nanargmax(curves.total_return)) if len(finite) else None
    return {
        "iterations": len(curves.env_steps),
        "env_steps": int(curves.env_steps[-1]),
        "seconds": float(curves.seconds[-1]),
        "return_mean": _last(curves.total_return),
        "best_return_mean": None if best is None else float(curves.total_return[best]),
        "best_iteration": None if best is None else best + 1,
        "agent_returns": {agent: _last(values) for agent, values in curves.agent_returns.items()},
        "cross_agent_losses": {name: _last(values) for name, values in curves.couplings.items()},
        "modules": {
            statistic: {module: _last(values) for module, values in curves.modules.get(statistic, {}).items()}
            for statistic in ("entropy", "vf_explained_var", "approx_kl")
        },
        "evaluation": None if evaluation is None else _evaluation(evaluation),
    }


def _evaluation(results: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "episodes": results.get("num_episodes"),
        "return_mean": results.get("episode_return_mean"),
        "agent_returns": dict(results.get("agent_episode_returns_mean", {})),
        "episode_length_mean": results.get("episode_len_mean"),
    }


def _last(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
