"""What a person sees while a run goes on: a live panel in a terminal, one plain line per iteration elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.training_progress import (
    Limit,
    Progress,
    against_limit,
    duration,
    multiplier,
    number,
)

SPARKS = "▁▂▃▄▅▆▇█"
AGENTS_PER_LINE = 8


class View(Protocol):
    """Told by a run what happens."""

    def __enter__(self) -> View: ...

    def __exit__(self, *exc: object) -> None: ...

    def update(self, progress: Progress) -> None:
        """An iteration is over."""

    def doing(self, what: str) -> None:
        """Something else than training begins."""

    def message(self, text: str) -> None:
        """A line that stays."""


class PlainView:
    """One line per iteration, for logs and pipes."""

    def __init__(self, console: Console, limit: Limit) -> None:
        self._console = console
        self._limit = limit

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, progress: Progress) -> None:
        """See `View`."""
        parts = [
            f"iteration {_of(progress.iteration, self._limit, 'iterations')}",
            f"steps {_of(progress.env_steps, self._limit, 'steps')}",
            f"{number(progress.steps_per_second)} steps/s",
            f"return {number(progress.return_mean)}",
            _agents_in_words(progress.agent_returns),
            *(f"{name} {number(value)}" for name, value in progress.couplings.items()),
            *(f"{name}: cost {against_limit(c)}, λ {multiplier(c)}" for name, c in progress.constraints.items()),
            f"left {duration(self._limit.seconds_left(progress))}",
        ]
        self.message("  ".join(part for part in parts if part))

    def doing(self, what: str) -> None:
        """See `View`."""
        self.message(what)

    def message(self, text: str) -> None:
        """See `View`."""
        # Not print(): rich would break the line at 80 columns, and read [brackets] as markup.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class LiveView:
    """A panel that is drawn again four times a second and stays on the screen with its last state."""

    def __init__(self, console: Console, limit: Limit, title: str, subtitle: str) -> None:
        self._console = console
        self._limit = limit
        self._title, self._subtitle = title, subtitle
        self._progress: Progress | None = None
        self._doing = "first iteration"
        self._started = self._updated = time.perf_counter()
        self._returns: deque[float] = deque(maxlen=40)
        self._live = Live(self, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        self._started = self._updated = time.perf_counter()
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._doing = ""
        self._live.stop()

    def update(self, progress: Progress) -> None:
        """See `View`."""
        self._progress = progress
        self._updated = time.perf_counter()
        self._doing = ""
        if progress.return_mean is not None:
            self._returns.append(progress.return_mean)

    def doing(self, what: str) -> None:
        """See `View`."""
        self._doing = what

    def message(self, text: str) -> None:
        """See `View`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        """Drawn by `Live`, in its thread."""
        progress, width = self._progress, min(self._console.width, 100)
        lines: list[RenderableType] = [self._bar(progress)]
        if progress is not None:
            lines += [Text(), self._numbers(progress)]
            if progress.agent_returns:
                lines += [Text(), _agents(progress.agent_returns, width - 4)]
        return Panel(
            Group(*lines),
            title=Text(self._title, style="bold"),
            subtitle=Text(self._subtitle, style="dim"),
            title_align="left",
            subtitle_align="left",
            padding=(0, 1),
            width=width,
        )

    def _bar(self, progress: Progress | None) -> Table:
        now = time.perf_counter()
        line = Table.grid(padding=(0, 2))
        fraction = 0.0 if progress is None else self._limit.fraction(progress)
        bar = ProgressBar(total=1.0, completed=fraction, width=24)
        done = "0" if progress is None else number_done(self._limit, progress)
        elapsed = f"{duration(now - self._started)} gone"
        left = ""
        if progress is not None and fraction < 1:
            left = f"{duration(max(0.0, self._limit.seconds_left(progress) - (now - self._updated)))} left"
        line.add_row(bar, f"{done} / {self._limit}", elapsed, left, Text(self._doing, style="yellow"))
        return line

    def _numbers(self, progress: Progress) -> Table:
        table = Table.grid(padding=(0, 1))
        for justify in ("left", "right", "left", "right", "left", "left"):
            table.add_column(justify=justify)
        entropy, explained = progress.module_mean("entropy"), progress.module_mean("vf_explained_var")
        table.add_row(
            "iteration", _bold(f"{progress.iteration:,}"), "  env steps", _bold(f"{progress.env_steps:,}"),
            "  steps/s", _bold(number(progress.steps_per_second)),
        )  # fmt: skip
        table.add_row(
            "return", _bold(number(progress.return_mean)), "  entropy", _bold(number(entropy)),
            "  explained variance", _bold(number(explained)),
        )  # fmt: skip
        if self._returns:
            table.add_row("", "", "", "", "  latest returns", Text(sparkline(list(self._returns)), style="green"))
        for name, value in progress.couplings.items():
            table.add_row(name, _bold(number(value)))
        for name, constraint in progress.constraints.items():
            table.add_row(name, _bold(against_limit(constraint)), "  λ", _bold(multiplier(constraint)))
        return table


def number_done(limit: Limit, progress: Progress) -> str:
    """What of the limit has been used."""
    done = limit.done(progress)
    return f"{done:,.1f}" if limit.kind == "minutes" else f"{int(done):,}"


def sparkline(values: list[float]) -> str:
    """One block per value between the smallest and the largest."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((v - low) / span * top)] if span else SPARKS[0] for v in finite)


class ViewHandler(logging.Handler):
    """Warnings of this package as lines of the view, which the live panel then does not overwrite."""

    def __init__(self, view: View) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        self._view.message(f"{record.levelname.lower()}: {record.getMessage()}")


def _of(done: int, limit: Limit, kind: str) -> str:
    return f"{done:,}/{int(limit.amount):,}" if limit.kind == kind else f"{done:,}"


def _bold(text: str) -> Text:
    return Text(text, style="bold")


def _agents_in_words(returns: dict[str, float]) -> str:
    if len(returns) < 2:
        return ""
    if len(returns) > AGENTS_PER_LINE:
        low, high = min(returns, key=returns.__getitem__), max(returns, key=returns.__getitem__)
        return f"agents {number(returns[low])} ({low}) to {number(returns[high])} ({high})"
    return "  ".join(f"{agent} {number(value)}" for agent, value in returns.items())


def _agents(returns: dict[str, float], width: int) -> Table:
    """Returns per agent, in as many columns as fit into `width`."""
    number_width = 10
    columns = max(1, min(len(returns), width // (max(map(len, returns)) + number_width + 2)))
    table = Table.grid(padding=(0, 1))
    for _ in range(columns):
        table.add_column()
        table.add_column(justify="right", min_width=number_width)
    cells = [(Text(agent, style="cyan"), _bold(number(value))) for agent, value in returns.items()]
    for first in range(0, len(cells), columns):
        table.add_row(*(part for cell in cells[first : first + columns] for part in cell))
    return table
