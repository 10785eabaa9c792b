"""`thrust-rllib report` from its arguments to its exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.messages import EXIT_FAILED, EXIT_OK, EXIT_USAGE, print_error

if TYPE_CHECKING:
    from thrust_rllib.reporting.final_numbers import Table as FinalNumbers

SHOWN = ("group", "runs", "return, all agents", "evaluation")  # starts of headings


def run(folders: Sequence[Path], output: Path | None, labels: Sequence[str]) -> int:
    """Writes the report and says where it is; returns the exit code."""
    from thrust_rllib.report import compare_runs

    console = Console()
    try:
        with console.status("drawing"):
            report = compare_runs(folders, output, labels)
    except (ValueError, OSError) as error:
        print_error(error)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED
    for note in report.notes:
        print_error(note, prefix="note")
    for env, numbers in report.tables.items():
        _print_table(console, numbers, title=env if len(report.tables) > 1 else None)
    for name, path in (("report", report.page), *(("learning curves", plot) for plot in report.plots)):
        shown = os.path.relpath(path)
        line = Text(f"{name:<16} ", style="dim")
        line.append(str(path) if shown.startswith("..") else shown, style="not dim")
        console.print(line, soft_wrap=True, highlight=False)
    return EXIT_OK


def _print_table(console: Console, numbers: FinalNumbers, title: str | None) -> None:
    """What fits into a terminal; the page has all numbers."""
    shown = [index for index, name in enumerate(numbers.columns) if name.startswith(SHOWN)]
    if title is not None:
        console.print(Text(title, style="bold"))
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for index in shown:
        table.add_column(Text(numbers.columns[index]), justify="left" if index == 0 else "right", overflow="fold")
    for row in numbers.rows:
        table.add_row(*(Text(row[index]) for index in shown))
    console.print(table)
