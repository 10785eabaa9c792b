"""`thrust-rllib report` from its arguments to its exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.messages import print_error
from thrust_rllib.command_line.train import EXIT_FAILED, EXIT_OK, EXIT_USAGE

SHOWN = ("group", "runs", "return, all agents", "evaluation")


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
    _print_table(console, report.table.columns, report.table.rows)
    for name, path in (("report", report.page), ("learning curves", report.plot)):
        shown = os.path.relpath(path)
        line = Text(f"{name:<16} ", style="dim")
        line.append(str(path) if shown.startswith("..") else shown, style="not dim")
        console.print(line, soft_wrap=True, highlight=False)
    return EXIT_OK


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """What fits into a terminal; the page has all numbers."""
    shown = [index for index, name in enumerate(columns) if name in SHOWN]
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for index in shown:
        table.add_column(Text(columns[index]), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))
    console.print(table)
