"""Options, the CSV file and the picture of a benchmark."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import thrust_rllib
from common.rounds import CLOCKS, console

RESULTS = Path(__file__).parent.parent / "results"
Row = dict[str, Any]
SMOKE = {"rounds": 1, "warmup": 1}


def parser(doc: str | None, rounds: int, warmup: int) -> argparse.ArgumentParser:
    """The options that every benchmark of speed has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=_positive, default=rounds, help="measured iterations of each side")
    parser.add_argument("--warmup", type=int, default=warmup, help="rounds before these, not counted")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: this process's seconds, not the wall's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of the results, or their CSV file (default: results/)")
    parser.add_argument("--smoke", action="store_true", help="some seconds, to see that it runs; saved with --output")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **smoke: Any) -> argparse.Namespace:
    """Parses; `--smoke` puts in the values of `SMOKE` and `smoke`, and `given` holds the options as they were given."""
    args = parser.parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    if args.smoke:
        vars(args).update(SMOKE | smoke)
    return args


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} given; needed: 1 or more")
    return int(text)


def csv_path(name: str, args: argparse.Namespace) -> Path | None:
    """Where the rows go; None for a smoke run that names no place."""
    if args.output is None:
        return None if args.smoke else RESULTS / f"{name}.csv"
    return args.output if args.output.suffix == ".csv" else args.output / f"{name}.csv"


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, four digits each."""
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {key: float(f"{value:.4g}") for key, value in numbers.items()}


def text(row: Row, unit: str = "") -> str:
    """`median unit (minimum to maximum)` of a row."""
    extremes = "" if row["min"] == row["max"] else f" ({row['min']:.3g} to {row['max']:.3g})"
    return f"{row['median']:.3g}{unit}{extremes}"


def about(name: str, args: argparse.Namespace) -> Row:
    """The columns that say how the numbers came about."""
    return {
        "clock": args.clock,
        "rounds": args.rounds,
        "seed": args.seed,
        "thrust_rllib": thrust_rllib.__version__,
        "ray": ray.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "command": command(name, args.given),
    }


def command(name: str, options: Sequence[str]) -> str:
    """What to type for a benchmark with these options."""
    return shlex.join(["python", f"benchmarks/{name}.py", *options])


def save(
    name: str,
    rows: Sequence[Row],
    args: argparse.Namespace,
    case: Sequence[str],
    draw: Callable[[list[Row]], Figure],
) -> None:
    """Writes the rows and a picture of all rows in the file; they replace earlier rows of the same `case` columns."""
    path = csv_path(name, args)
    if path is None:
        return
    columns = about(name, args)
    new = [{key: str(value) for key, value in (row | columns).items()} for row in rows]
    rows = merged(path, new, case)
    write(path, rows, list(new[0]))
    picture = path.with_suffix(".png")
    draw([row | {key: float(row[key]) for key in ("median", "min", "max")} for row in rows]).savefig(picture)
    console.print(f"written: {path}, {picture}", soft_wrap=True, highlight=False)


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def merged(path: Path, new: Sequence[Row], case: Sequence[str]) -> list[Row]:
    """The rows of the file, but for those that are equal to a new one in the columns of `case`, then the new ones."""
    cases = {tuple(row[key] for key in case) for row in new}
    return [row for row in read(path) if tuple(row[key] for key in case) not in cases] + list(new)


def write(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)


def new_figure(title: str, width: float, height: float) -> Figure:
    """A figure of matplotlib's Agg, without pyplot: nothing global is touched and no window opens."""
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure


def panel(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_columns(
    axes: Any, places: Sequence[float], rows: Sequence[Row], width: float, label: str | None = None
) -> None:
    """Columns up to the medians with their spread; the number stands at the foot, clear of the spread."""
    drawn = axes.bar(places, [row["median"] for row in rows], width, yerr=spread(rows), capsize=2.5, label=label)
    for column, row in zip(drawn, rows, strict=True):
        x = column.get_x() + column.get_width() / 2
        foot = axes.get_xaxis_transform()
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        axes.text(x, 0.015, f"{row['median']:.2f}", transform=foot, ha="center", fontsize=7.5, bbox=box)


def draw_bar(axes: Any, height: float, label: str = "") -> None:
    """The dashed line that a measured number is held against."""
    axes.axhline(height, color="black", linewidth=1.1, linestyle="--", label=label)


def spread(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Distances from each median down to the minimum and up to the maximum: matplotlib's `yerr`."""
    return [row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]
