"""The numbers with which runs end: of one run for `summary.json`, of groups as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrust_rllib.command_line.training_progress import duration, number
from thrust_rllib.confidence import MeanInterval, mean_interval
from thrust_rllib.reporting.groups import RunGroup, by_environment
from thrust_rllib.reporting.panels import MAX_AGENTS, STATISTICS, agents_of
from thrust_rllib.reporting.run_curves import RunCurves, last_known
from thrust_rllib.reporting.runs import Run

EVALUATION = "evaluation"


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns.

    Args:
        title: above.
        columns: headings; the first column names the row.
        rows: one text per column.
        kind: "numbers", aligned on the right, or "texts", which wrap.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    kind: str = "numbers"


def summary(curves: RunCurves, evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The final numbers of a run; the last known where the last iteration reported none.

    Args:
        curves: of the run.
        evaluation: as `evaluation_summary` gives it.
    """
    known = np.flatnonzero(np.isfinite(curves.total_return))
    best = int(known[np.argmax(curves.total_return[known])]) if len(known) else None
    return {
        "iterations": len(curves.env_steps),
        "env_steps": int(curves.env_steps[-1]),
        "seconds": last_known(curves.seconds),
        "stop_reason": curves.stop_reason,
        "return_mean": last_known(curves.total_return),
        "best_return_mean": None if best is None else float(curves.total_return[best]),
        "best_iteration": None if best is None else best + 1,
        "agent_returns": {agent: last_known(values) for agent, values in curves.agent_returns.items()},
        "cross_agent_losses": {name: last_known(values) for name, values in curves.couplings.items()},
        "modules": {
            statistic: {module: last_known(values) for module, values in curves.modules.get(statistic, {}).items()}
            for statistic, *_ in STATISTICS
        },
        "evaluation": None if evaluation is None else dict(evaluation),
    }


def evaluation_summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """What of RLlib's results of an evaluation is kept."""
    return {
        "episodes": results.get("num_episodes"),
        "return_mean": results.get("episode_return_mean"),
        "agent_returns": dict(results.get("agent_episode_returns_mean", {})),
        "episode_length_mean": results.get("episode_len_mean"),
        "sampled": results.get("sampled", True),
    }


def mean_of_known(values: Sequence[float | None]) -> tuple[MeanInterval | None, int]:
    """Mean and standard error of the finite ones, None where there is none, and how many they are."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (mean_interval(finite) if finite else None), len(finite)


def final_table(groups: Sequence[RunGroup]) -> Table:
    """A row per group: runs, steps, time, then mean ± standard error over runs of each final number."""
    shown = {
        name: values
        for name, values in _final_numbers(groups).items()
        if any(value is not None and math.isfinite(value) for group in values for value in group)
    }
    rows = []
    for k, group in enumerate(groups):
        steps = [int(run.curves.env_steps[-1]) for run in group.runs]
        seconds, _ = mean_of_known([last_known(run.curves.seconds) for run in group.runs])
        rows.append(
            [group.label, str(len(group.runs)), _span(steps), duration(seconds.mean if seconds else math.nan)]
            + [_cell(values[k]) for values in shown.values()]
        )
    return Table("Final numbers", ["group", "runs", "environment steps", "wall time", *shown], rows)


def evaluation_heading(groups: Sequence[RunGroup]) -> str:
    """Says whether the evaluations took sampled or the most likely actions; runs that do not say so sampled."""
    evaluations = [run.evaluation for group in groups for run in group.runs if run.evaluation]
    kinds = {bool(evaluation.get("sampled", True)) for evaluation in evaluations}
    how = {frozenset({True}): "sampled", frozenset({False}): "greedy"}
    return f"{EVALUATION}, {how.get(frozenset(kinds), 'greedy or sampled')}"


def agent_table(groups: Sequence[RunGroup]) -> Table:
    """A row per group: the last return of each of the first `MAX_AGENTS` agents."""
    agents = agents_of(groups)[:MAX_AGENTS]
    rows = [
        [group.label, *(_cell([_last(run.curves.agent_returns.get(agent)) for run in group.runs]) for agent in agents)]
        for group in groups
    ]
    return Table("Final return of each agent", ["group", *agents], rows)


def difference_table(groups: Sequence[RunGroup]) -> Table:
    """A row per group: every setting that is not the same in all groups."""
    names = list(dict.fromkeys(name for group in groups for name in group.differences))
    rows = [[group.label, *(group.differences.get(name, "none") for name in names)] for group in groups]
    return Table("What differs", ["group", *names], rows, "texts")


def runs_table(groups: Sequence[RunGroup]) -> Table:
    """A row per run, with its environment where there are several."""
    several = len(by_environment(groups)) > 1
    rows = [
        [
            *([group.env] if several else []),
            group.label,
            str(run.seed),
            str(run.folder),
            str(run.record.get("started", "–")),
            f"{len(run.curves.env_steps):,}",
            f"{int(run.curves.env_steps[-1]):,}",
            duration(last_known(run.curves.seconds) or math.nan),
            number(last_known(run.curves.total_return)),
        ]
        for group in groups
        for run in group.runs
    ]
    columns = [
        *(["environment"] if several else []),
        "group", "seed", "folder", "started", "iterations", "environment steps", "wall time", "return",
    ]  # fmt: skip
    return Table("Runs", columns, rows, "texts")


def _final_numbers(groups: Sequence[RunGroup]) -> dict[str, list[list[float | None]]]:
    """{heading: for each group the value of each run}."""
    couplings = dict.fromkeys(name for group in groups for run in group.runs for name in run.curves.couplings)
    readers: dict[str, Callable[[Run], float | None]] = {
        "return, all agents": lambda run: last_known(run.curves.total_return),
        evaluation_heading(groups): lambda run: (run.evaluation or {}).get("return_mean"),
        "entropy": lambda run: _module_mean(run, "entropy"),
        "explained variance": lambda run: _module_mean(run, "vf_explained_var"),
        "KL": lambda run: _module_mean(run, "approx_kl"),
        **{f"cross-agent loss {name}": _last_coupling(name) for name in couplings},
        "feature correlation": lambda run: None if run.correlation is None else run.correlation.mean_of_pairs,
    }
    return {name: [[read(run) for run in group.runs] for group in groups] for name, read in readers.items()}


def _last_coupling(name: str) -> Callable[[Run], float | None]:
    return lambda run: _last(run.curves.couplings.get(name))


def _module_mean(run: Run, statistic: str) -> float | None:
    found, _ = mean_of_known([last_known(v) for v in run.curves.modules.get(statistic, {}).values()])
    return found.mean if found else None


def _last(values: np.ndarray | None) -> float | None:
    return None if values is None else last_known(values)


def _cell(values: Sequence[float | None]) -> str:
    found, count = mean_of_known(values)
    text = number(found.mean if found else None)
    if count > 1 and found is not None:
        text += f" ± {number(found.standard_error)}"
    return text if count in (0, len(values)) else f"{text} ({count} of {len(values)} runs)"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
