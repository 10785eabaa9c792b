"""Training runs of a benchmark: each a process of its own, each a row of a CSV file."""

from __future__ import annotations

import csv
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

import thrust_rllib
from common.results import Row, read
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
    """Writes the rows; they replace earlier ones that are equal in the columns of `case`."""
    new = [as_text(row) for row in rows]
    cases = {tuple(row[key] for key in case) for row in new}
    old = [row for row in read(path) if tuple(row[key] for key in case) not in cases]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(new[0]))
        writer.writeheader()
        writer.writerows(sorted(old + new, key=lambda row: [_number_or_text(row[key]) for key in case]))


def run_each(script: str, runs: Sequence[Sequence[str]], output: Path, case: Sequence[str], jobs: int) -> list[Row]:
    """Runs the script once with each list of arguments, `jobs` at a time, and adds what they found to `output`.

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
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
            return read(path)

        found = pool.map(run, range(len(runs)))
        for arguments, new in zip(runs, track(found, "runs", len(runs), console=console), strict=True):
            if new:
                add_rows(output, new, case)
            else:
                failed.append(" ".join(arguments))
            rows += new
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(runs)} runs left no row; run one alone to see why: {failed[0]}")
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
