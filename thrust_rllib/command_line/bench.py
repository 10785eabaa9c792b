"""The benchmarks of a checkout: which there are, and running one in a process of its own.

A benchmark is a script in the folder `benchmarks` beside the package. The first line of its docstring says what is
measured, a sentence that begins with "Takes" for how long.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thrust_rllib.envs.names import nearest

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Benchmark:
    """A script: its path, what it measures, and about how long it takes ("" where it does not say)."""

    path: Path
    title: str
    takes: str


def find_benchmarks() -> dict[str, Benchmark]:
    """{name: benchmark} of the checkout.

    Raises:
        ValueError: there is no checkout.
    """
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    # Without pyproject.toml this is where packages are installed, and a folder of that name is somebody else's.
    if not scripts or not (ROOT / "pyproject.toml").exists():
        raise ValueError(
            f"benchmarks are scripts of the repository and not part of the installed package; none at {ROOT}. Get a "
            "checkout (git clone) of the repository that thrust_rllib comes from, call `make setup` there, and run its "
            ".venv/bin/thrust-rllib bench"
        )
    return {path.stem: _read(path) for path in scripts}


def _read(path: Path) -> Benchmark:
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    takes = re.search(r"\bTakes\s+([^.;:()]+)", doc)
    return Benchmark(path, doc.partition("\n")[0], " ".join(takes[1].split()) if takes else "")


def print_benchmarks(console: Console) -> None:
    """Names, what is measured, and about how long it takes.

    Raises:
        ValueError: there is no checkout.
    """
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("benchmark", "takes", "measures"):
        table.add_column(column, no_wrap=column == "benchmark")
    for name, benchmark in find_benchmarks().items():
        table.add_row(Text(name, style="cyan"), Text(benchmark.takes), Text(benchmark.title))
    console.print(table)
    console.print("\nOptions of a benchmark: thrust-rllib bench NAME --help", soft_wrap=True, highlight=False)


def run_benchmark(name: str, options: Sequence[str]) -> int:
    """Runs a benchmark with this Python; its output is passed through.

    Ctrl-C and other requests to end are handed on to it and to the processes that it started.

    Returns:
        Its exit code; 128 + n if signal n ended it, as in a shell.

    Raises:
        ValueError: an unknown name, with the nearest one, or there is no checkout.
    """
    benchmarks = find_benchmarks()
    if name not in benchmarks:
        known = ", ".join(benchmarks)
        raise ValueError(f"there is no benchmark {name!r}{nearest(name, benchmarks)} (The names: {known})")
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            raise KeyboardInterrupt
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        # A session of its own: a terminal's Ctrl-C then reaches it once, through `pass_on`.
        process = subprocess.Popen([sys.executable, str(benchmarks[name].path), *options], start_new_session=True)
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
