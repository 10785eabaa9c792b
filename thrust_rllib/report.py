"""Reports of runs, from their folders alone: learning curves, final numbers, feature correlation, one page.

| in the folder of a report | what |
|---|---|
| `report.html` | all of it, with its images inside |
| `learning_curves.png` | returns, entropy, explained variance, KL, couplings |
| `agent_returns.png` | where groups are compared: return of each agent |
| `feature_correlation.png`, `feature_heat_map.png` | of the last weights' features |
| `summary.json` | the final numbers |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thrust_rllib import __version__
from thrust_rllib.command_line.run_record import write_json
from thrust_rllib.reporting import correlation_figures, curve_figures
from thrust_rllib.reporting.final_numbers import (
    Table,
    agent_table,
    difference_table,
    evaluation_summary,
    final_table,
    runs_table,
    summary,
)
from thrust_rllib.reporting.groups import RunGroup, group_runs
from thrust_rllib.reporting.page import PageFigure, page
from thrust_rllib.reporting.panels import agents_of
from thrust_rllib.reporting.runs import REPORT, SUMMARY, Run, read_run, read_runs

PAGE = "report.html"
PLOT = "learning_curves.png"
AGENTS_PLOT = "agent_returns.png"
CORRELATION_PLOT = "feature_correlation.png"
HEAT_MAP = "feature_heat_map.png"
ERRORS = "± is the standard error of the mean over runs"


@dataclass(frozen=True)
class WrittenReport:
    """Where a report is, and what of it a terminal shows.

    Args:
        folder: has all files.
        table: the final numbers.
        notes: what a reader has to know before the numbers.
    """

    folder: Path
    table: Table
    notes: list[str]

    @property
    def page(self) -> Path:
        """The HTML file."""
        return self.folder / PAGE

    @property
    def plot(self) -> Path:
        """The learning curves."""
        return self.folder / PLOT


def write_report(folder: Path, evaluation: Mapping[str, Any] | None = None) -> Path:
    """Writes a run's own report into `report/` in its folder.

    Args:
        folder: of the run.
        evaluation: the runners' results of an evaluation, as RLlib reports them.

    Returns:
        The path of the plot.
    """
    latest = None if evaluation is None else evaluation_summary(evaluation)
    run = dataclasses.replace(read_run(folder), evaluation=latest)
    return _write(folder / REPORT, [run], (), []).plot


def compare_runs(folders: Sequence[Path], output: Path | None = None, labels: Sequence[str] = ()) -> WrittenReport:
    """Writes a report on several runs: seeds of one configuration are a group, groups are compared.

    Args:
        folders: of the runs.
        output: new, empty or with an earlier report in it; None: `report/` of a single run, report-<time> here for
            several.
        labels: of the groups, in place of what differs between them.

    Raises:
        ValueError: a folder is no run, the labels do not fit the groups, or `output` holds something else.
    """
    runs, notes = read_runs(folders)
    if output is None:
        output = runs[0].folder / REPORT if len(runs) == 1 else _default_output()
    elif output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; give a folder")
    elif output.is_dir() and any(output.iterdir()) and not (output / PAGE).exists():
        raise ValueError(f"--output {output} has something else than a report in it; give a new folder or an empty one")
    return _write(output, runs, labels, notes)


def _default_output() -> Path:
    start = Path(f"report-{datetime.now():%Y%m%d-%H%M%S}")
    number = 2
    while (path := start if number == 2 else start.with_name(f"{start.name}-{number}")).exists():
        number += 1
    return path


def _write(target: Path, runs: list[Run], labels: Sequence[str], notes: list[str]) -> WrittenReport:
    groups, more = group_runs(runs, labels)
    notes = [*notes, *more]
    target.mkdir(parents=True, exist_ok=True)
    single = runs[0] if len(runs) == 1 else None
    if single is not None:
        write_json(target / SUMMARY, summary(single.curves, single.evaluation))
        title = single.folder.name
        lead = f"{single.env}, seed {single.seed}. Final numbers are the last that were reported."
    else:
        write_json(target / SUMMARY, {"groups": [_group_record(group) for group in groups]})
        title = _headline(groups)
        lead = f"{ERRORS}. Final numbers are the last that were reported."
    table = final_table(groups)
    tables = [table, *([agent_table(groups)] if len(agents_of(groups)) > 1 else [])]
    differ = [difference_table(groups)] if len(groups) > 1 and any(group.differences for group in groups) else []
    text = page(
        title=title,
        lead=lead,
        notes=notes,
        tables=[*tables, *differ],
        figures=_figures(target, groups, title),
        details=[runs_table(groups)],
        commands=_commands(runs),
    )
    (target / PAGE).write_text(text, "utf-8")
    return WrittenReport(target, table, notes)


def _headline(groups: Sequence[RunGroup]) -> str:
    envs = list(dict.fromkeys(run.env for group in groups for run in group.runs))
    number = sum(len(group.runs) for group in groups)
    of = ", ".join(envs) if len(envs) <= 3 else f"{len(envs)} environments"
    return f"{of}: {number} runs" + (f" in {len(groups)} groups" if len(groups) > 1 else "")


def _group_record(group: RunGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "differences": group.differences,
        "runs": [
            {"folder": run.folder, "seed": run.seed, **summary(run.curves, run.evaluation)}
            | {"feature_correlation": run.correlation and run.correlation.mean_of_pairs}
            for run in group.runs
        ],
    }


def _figures(target: Path, groups: list[RunGroup], title: str) -> list[PageFigure]:
    """Draws all figures into `target`."""
    curves = _save(curve_figures.learning_curves(groups, title), target / PLOT)
    figures = [PageFigure("Learning curves", curve_figures.curves_caption(groups), curves)]
    if len(groups) > 1 and len(agents_of(groups)) > 1:
        agents = _save(curve_figures.agent_returns(groups, f"{title}: return of each agent"), target / AGENTS_PLOT)
        figures.append(PageFigure("Return of each agent", curve_figures.agents_caption(groups), agents))
    return [*figures, *_correlation_figures(target, groups, title)]


def _correlation_figures(target: Path, groups: list[RunGroup], title: str) -> list[PageFigure]:
    heading = "Correlation of the agents' features"
    runs = [run for group in groups for run in group.runs]
    known = [run for run in runs if run.correlation is not None]
    if not known:
        why = (
            "These runs have none in their report folders: a run writes it at its end, when it has two agents or more "
            "and all modules give encoder_features."
        )
        return [PageFigure(heading, why, None)]
    rows = sorted({run.correlation.num_rows for run in known if run.correlation is not None})
    span = f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
    matrices = _save(correlation_figures.correlation_matrices(groups, heading), target / CORRELATION_PLOT)
    caption = (
        "Number in row i, column j: mean squared Pearson correlation of agent i's encoder features with agent j's, "
        f"||corr(Z_i, Z_j)||² / (D_i D_j), with the last weights on {span} fresh joint rows"
        f"{', mean over the runs of a group' if len(runs) > len(groups) else ''}. Independent features give about "
        f"{1 / rows[0]:.1g}. Grey diagonal: an agent's features among themselves. "
        f"{correlation_figures.groups_without(groups)}"
    )
    figures = [PageFigure(heading, caption, matrices, narrow=True)]
    first = next((run for run in known if run.correlation is not None and run.correlation.signed is not None), None)
    if first is not None and first.correlation is not None:
        drawn = correlation_figures.correlation_heat_map(first.correlation, f"All features: {first.folder.name}")
        caption = (
            f"Absolute correlation of every encoder feature with every other one in the run {first.folder}; lines "
            "separate agents."
        )
        figures.append(PageFigure("All features of one run", caption, _save(drawn, target / HEAT_MAP), narrow=True))
    return figures


def _save(figure: Figure, path: Path) -> Path:
    # Not savefig, which draws everything once more beforehand to find the layout.
    FigureCanvasAgg(figure).print_png(path)
    return path


def _commands(runs: Sequence[Run]) -> str:
    """Each run's command, then the versions with which they ran."""
    lines = [str(run.record.get("command", "no command was recorded")) for run in runs]
    versions: dict[str, list[str]] = {}
    for run in runs:
        of_run = ", ".join(f"{name} {number}" for name, number in run.record.get("versions", {}).items())
        versions.setdefault(of_run or "no versions were recorded", []).append(run.folder.name)
    lines.append("")
    lines += [text if len(versions) == 1 else f"{text}  ({', '.join(of)})" for text, of in versions.items()]
    return "\n".join([*lines, f"report: thrust_rllib {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M}"])
