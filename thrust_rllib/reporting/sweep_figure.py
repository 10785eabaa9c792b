"""Draws a sweep: the curves of all trials, and each parameter against the score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from thrust_rllib.command_line.training_progress import number
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweep_results import SweepResults, TrialRow

WIDTH, CURVES_HEIGHT, PANEL_HEIGHT = 13, 4.2, 3.05  # inches
COLUMNS = 3
DOTS_PER_INCH = 130
MAX_LABELLED = 12


def draw_sweep(results: SweepResults, title: str, path: Path) -> Path:
    """Writes a PNG; trials are coloured by their score, the best one is ringed.

    Args:
        results: of the sweep.
        title: above.
        path: of the file.
    """
    rows = -(-len(results.parameters) // COLUMNS)
    figure = Figure(figsize=(WIDTH, CURVES_HEIGHT + PANEL_HEIGHT * rows), layout="constrained", dpi=DOTS_PER_INCH)
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=[CURVES_HEIGHT] + [PANEL_HEIGHT] * rows)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    colors = _colors(results)
    _draw_curves(figure.add_subplot(grid[0, :]), results, colors)
    for index, parameter in enumerate(results.parameters):
        axes = figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS])
        _draw_parameter(axes, parameter, results, colors)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _colors(results: SweepResults) -> dict[int, Any]:
    """By rank: scores often lie close together but for a few."""
    scored = [row for row in reversed(results.ranked) if not math.isnan(row.score)]
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, max(len(scored), 1)))
    return {row.number: shade for row, shade in zip(scored, shades, strict=False)}


def _draw_curves(axes: Any, results: SweepResults, colors: dict[int, Any]) -> None:
    axes.set_title("Return of each trial, sum over agents", loc="left", fontsize=10)
    for row in reversed(results.ranked):  # the best one on top
        points = [(steps, score) for steps, score in row.curve if math.isfinite(score)]
        if not points:
            continue
        best = row is results.best
        label = f"{row.number}  ({number(row.score)})"
        style = {"linewidth": 2.4 if best else 1.2, "marker": "o" if len(points) == 1 else None}
        axes.plot(*zip(*points, strict=True), color=colors.get(row.number, "0.7"), label=label, **style)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("reward per episode")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        best_first = list(zip(handles, labels, strict=True))[::-1][:MAX_LABELLED]
        axes.legend(
            *zip(*best_first, strict=True), title="trial (score)", loc="center left", bbox_to_anchor=(1.0, 0.5),
            fontsize=8.5, title_fontsize=8.5, frameon=False,
        )  # fmt: skip


def _draw_parameter(axes: Any, parameter: Parameter, results: SweepResults, colors: dict[int, Any]) -> None:
    rows = [row for row in results.rows if row.number in colors and row.values[parameter.name] is not None]
    axes.set_title(parameter.name, loc="left", fontsize=10)
    axes.set_ylabel("score")
    _plain(axes)
    if parameter.choices:
        axes.set_xticks(range(len(parameter.choices)), [str(choice) for choice in parameter.choices])
        axes.set_xlim(-0.5, len(parameter.choices) - 0.5)
    else:
        axes.set_xscale("log" if parameter.log else "linear")
        axes.set_xlim(parameter.low, parameter.high)
    for row in rows:
        place = _place(parameter, row)
        ring = {"edgecolor": "black", "linewidth": 1.4} if row is results.best else {"edgecolor": "none"}
        axes.scatter(place, row.score, color=[colors[row.number]], s=46, clip_on=False, zorder=3, **ring)


def _place(parameter: Parameter, row: TrialRow) -> float:
    value = row.values[parameter.name]
    return float(parameter.choices.index(value)) if parameter.choices else float(value)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8.5)
