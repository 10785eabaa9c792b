"""Training runs of a benchmark: each a process of its own, each a row of a CSV file."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

import thrust_rllib
from common.results import Row, merged, read, write
from common.rounds import console

PACKAGES = ("ray", "torch", "gymnasium", "numpy")


def versions(*others: str) -> Row:
    """The columns that say what a run was made with: packages, Python, number of CPUs, date."""
    # The package itself is asked: a checkout that is not installed has no metadata.
    return (
        {"thrust_rllib": thrust_rllib.__version__}
        | {name: version(name) for name in (*PACKAGES, *others)}
        | {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
        }
    )


def as_text(row: Row) -> dict[str, str]:
    """Numbers with six digits; what is not there is empty."""
    return {key: "" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x) for key, x in row.items()}


def add_rows(path: Path, rows: Sequence[Row], case: Sequence[str]) -> None:
    """Writes the rows, sorted by the columns of `case`; they replace earlier ones that are equal in these."""
    new = [as_text(row) for row in rows]
    rows = sorted(merged(path, new, case), key=lambda row: [_number_or_text(row[key]) for key in case])
    write(path, rows, list(new[0]))


def run_each(
    script: str, runs: Sequence[Sequence[str]], add: Callable[[list[Row]], object], jobs: int = 1
) -> list[Row]:
    """Runs the script once with each list of arguments, `jobs` at a time, and hands what each found to `add`.

    A run writes a file of its own, which is read here: two that end together cannot overwrite each other's row.

    Returns:
        The rows, in the order of `runs`.

    Raises:
        RuntimeError: a run left no row; those of the others are kept.
    """
    rows: list[Row] = []
    failed = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def run(number: int) -> list[Row]:
            path = Path(folder) / f"{number}.csv"
            command = [sys.executable, script, *runs[number], "--output", str(path)]
            # Remarks are kept in a file: on Ctrl-C this process alone speaks.
            with path.with_suffix(".log").open("w") as log:
                subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=log)
            return read(path)

        found = pool.map(run, range(len(runs)))
        for number, new in enumerate(track(found, "runs", len(runs), console=console)):
            if new:
                add(new)
            else:
                log = (Path(folder) / f"{number}.log").read_text(errors="replace")
                failed.append(f"{' '.join(runs[number])}\n{log[-2000:]}")
            rows += new
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(runs)} runs left no row; the first: {failed[0]}")
    return rows


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN for a single value's error."""
    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def plus_minus(values: Iterable[float], digits: int = 3) -> str:
    """`mean ± standard error`."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def _number_or_text(text: str) -> tuple[bool, float, str]:
    try:
        return (False, float(text), "")
    except ValueError:
        return (True, 0.0, text)
