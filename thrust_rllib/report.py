"""Reports of runs, from their folders alone: learning curves, final numbers, feature correlation, one page.

| in the folder of a report | what |
|---|---|
| `report.html` | all of it, with its images inside |
| `learning_curves.png` | returns, entropy, explained variance, KL, couplings |
| `diversity.png` | where runs have them: diversity of the policies, accuracy of auxiliary targets |
| `constraints.png` | where runs have them: costs, limits and multipliers |
| `agent_returns.png` | where groups are compared: return of each agent |
| `feature_correlation.png`, `feature_heat_map.png` | of the last weights' features |
| `summary.json` | the final numbers |

Runs of several environments have a section each, and figures such as `learning_curves_CartPole-v1.png`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from thrust_rllib import __version__
from thrust_rllib.command_line.run_record import write_json
from thrust_rllib.reporting.final_numbers import (
    Table,
    agent_table,
    difference_table,
    evaluation_summary,
    final_table,
    runs_table,
    summary,
)
from thrust_rllib.reporting.groups import RunGroup, by_environment, group_runs
from thrust_rllib.reporting.page import PageSection, page
from thrust_rllib.reporting.panels import agents_of
from thrust_rllib.reporting.report_figures import PLOT, draw_figures, environment_suffixes
from thrust_rllib.reporting.runs import REPORT, SUMMARY, Run, read_run, read_runs

PAGE = "report.html"
ERRORS = "± is the standard error of the mean over runs"


@dataclass(frozen=True)
class WrittenReport:
    """Where a report is, and what of it a terminal shows.

    Args:
        folder: has all files.
        tables: {environment: its final numbers}.
        plots: learning curves, one for each environment.
        notes: what a reader has to know before the numbers.
    """

    folder: Path
    tables: dict[str, Table]
    plots: list[Path]
    notes: list[str]

    @property
    def page(self) -> Path:
        """The HTML file."""
        return self.folder / PAGE


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
    return _write(folder / REPORT, [run], (), run.curves.notes).plots[0]


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
    suffixes = environment_suffixes(groups)
    sections = [
        PageSection(
            heading=env if len(suffixes) > 1 else None,
            tables=_tables(of_env),
            figures=draw_figures(target, of_env, title if len(suffixes) == 1 else _headline(of_env), suffixes[env]),
        )
        for env, of_env in by_environment(groups).items()
    ]
    text = page(title, lead, notes, sections, details=[runs_table(groups)], commands=_commands(runs))
    (target / PAGE).write_text(text, "utf-8")
    return WrittenReport(
        folder=target,
        tables={env: final_table(of_env) for env, of_env in by_environment(groups).items()},
        plots=[target / PLOT.format(suffix) for suffix in suffixes.values()],
        notes=notes,
    )


def _tables(groups: Sequence[RunGroup]) -> list[Table]:
    """Of one environment."""
    agents = [agent_table(groups)] if len(agents_of(groups)) > 1 else []
    differ = [difference_table(groups)] if len(groups) > 1 and any(group.differences for group in groups) else []
    return [final_table(groups), *agents, *differ]


def _headline(groups: Sequence[RunGroup]) -> str:
    envs = list(dict.fromkeys(run.env for group in groups for run in group.runs))
    number = sum(len(group.runs) for group in groups)
    of = ", ".join(envs) if len(envs) <= 3 else f"{len(envs)} environments"
    return f"{of}: {number} run{'s' if number > 1 else ''}" + (f" in {len(groups)} groups" if len(groups) > 1 else "")


def _group_record(group: RunGroup) -> dict[str, Any]:
    return {
        "environment": group.env,
        "label": group.label,
        "differences": group.differences,
        "runs": [
            {"folder": run.folder, "seed": run.seed, **summary(run.curves, run.evaluation)}
            | {"feature_correlation": run.correlation and run.correlation.mean_of_pairs}
            for run in group.runs
        ],
    }


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
