"""What a person sees of a sweep: a table that follows it, or lines; and the table at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.training_progress import duration, number
from thrust_rllib.sweep_results import TrialRow

STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}
LINES_AROUND = 6  # of a terminal, above and below the live table


class SweepView(Protocol):
    """Told by a sweep what happens."""

    def __enter__(self) -> SweepView: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, rows: Sequence[TrialRow]) -> None:
        """Something may have changed."""


class PlainSweepView:
    """A line when a trial begins and when it ends, for logs and pipes."""

    def __init__(self, console: Console, num_trials: int) -> None:
        self._console, self._num_trials = console, num_trials
        self._told: dict[int, str] = {}

    def __enter__(self) -> PlainSweepView:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, rows: Sequence[TrialRow]) -> None:
        """See `SweepView`."""
        for row in rows:
            begins = row.state == "running" and row.number not in self._told
            if begins or (row.state in ("finished", "stopped", "failed") and self._told.get(row.number) != row.state):
                self._told[row.number] = row.state
                numbers = "" if begins else f"  score {number(row.score)}  steps {row.env_steps:,}"
                text = f"trial {row.number}/{self._num_trials} {row.state}{numbers}  {in_words(row)}"
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
                self._console.file.flush()


class LiveSweepView:
    """A table of all trials that is drawn again four times a second."""

    def __init__(self, console: Console, num_trials: int, steps: int, title: str) -> None:
        self._console, self._num_trials, self._steps, self._title = console, num_trials, steps, title
        self._rows: Sequence[TrialRow] = ()
        self._started = time.perf_counter()
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveSweepView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, rows: Sequence[TrialRow]) -> None:
        """See `SweepView`."""
        self._rows = rows

    def __rich__(self) -> Group:
        """Drawn by `Live`, in its thread."""
        rows = self._rows
        room = max(4, self._console.height - LINES_AROUND)
        shown = sorted(rows, key=_busy_then_best)[:room]
        over = sum(row.over for row in rows)
        head = Text.assemble(
            (self._title, "bold"),
            f"   {over} of {self._num_trials} trials over, "
            f"{sum(row.state == 'running' for row in rows)} running   {duration(time.perf_counter() - self._started)}",
        )
        table = trial_table(sorted(shown, key=lambda row: row.number), steps=self._steps)
        rest = [Text(f"… {len(rows) - len(shown)} more", style="dim")] if len(rows) > len(shown) else []
        return Group(head, Text(), table, *rest)


def _busy_then_best(row: TrialRow) -> tuple[bool, float]:
    return row.state != "running", math.inf if math.isnan(row.score) else -row.score


def trial_table(rows: Sequence[TrialRow], steps: int | None = None) -> Table:
    """A line for each trial.

    Args:
        rows: in the order of the lines.
        steps: of a whole trial: shown beside those taken.
    """
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    names = list(rows[0].values) if rows else []
    for name in ("trial", *names, "steps", "score"):
        table.add_column(name, justify="left" if name == "trial" else "right")
    table.add_column("")
    for row in rows:
        taken = f"{row.env_steps:,}" + (f" / {steps:,}" if steps is not None else "")
        cells = [shown(row.values[name]) for name in names]
        state = Text(row.state, style=STYLES.get(row.state, "dim"))
        table.add_row(str(row.number), *cells, taken, Text(number(row.score), "bold"), state)
    return table


def in_words(row: TrialRow) -> str:
    """The parameters of a trial: lr 0.001, minibatch 64."""
    return ", ".join(f"{name} {shown(value)}" for name, value in row.values.items())


def shown(value: Any) -> str:
    """A parameter's value for people."""
    return number(value) if isinstance(value, float) else str(value)
