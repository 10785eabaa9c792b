"""The report of a run: learning curves and final numbers, from its `progress.csv` alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thrust_rllib.command_line.run_folder import PROGRESS_FILE
from thrust_rllib.command_line.run_record import write_json
from thrust_rllib.learning_curves import learning_curves
from thrust_rllib.run_curves import RunCurves, read_curves

REPORT = "report"
PLOT = "learning_curves.png"
SUMMARY = "summary.json"


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
