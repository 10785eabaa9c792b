"""Draws how much the agents' features correlate: agent by agent, and feature by feature."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from thrust_rllib.reporting.correlation_file import FeatureCorrelation
from thrust_rllib.reporting.curve_figures import WIDTH, new_figure, plain
from thrust_rllib.reporting.groups import RunGroup

SCALES = (0.1, 0.2, 0.5, 1.0)  # ends of the colour scale; an end at the largest entry makes small ones look large
MAX_NUMBERS = 24  # agents; more leave no room for a number in a cell


def mean_correlation(group: RunGroup) -> tuple[list[str], np.ndarray, int] | None:
    """Agents, the mean matrix over the group's runs, and over how many; None where no run has one.

    Runs with other agents than the first one are left out.
    """
    found = [run.correlation for run in group.runs if run.correlation is not None]
    alike = [each for each in found if each.agents == found[0].agents]
    if not alike:
        return None
    return alike[0].agents, np.mean([each.matrix for each in alike], axis=0), len(alike)


def correlation_matrices(groups: Sequence[RunGroup], title: str) -> Figure:
    """Agents by agents, a matrix for each group that has one; one colour scale, which the diagonal does not stretch."""
    means = [(group, mean) for group in groups if (mean := mean_correlation(group)) is not None]
    agents = max(len(names) for _, (names, _, _) in means)
    columns = min(len(means), 3 if agents <= 8 else 2)
    rows = -(-len(means) // columns)
    side = min(WIDTH / columns, max(4.0, 0.5 * agents + 1.5))
    width = max(columns * side, 6.5)
    note = textwrap.wrap(groups_without(groups), int(13 * width))
    figure = new_figure(width, rows * side * 0.92 + 0.9 + 0.15 * len(note), title)
    top = colour_scale([matrix for _, (_, matrix, _) in means])
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (group, (names, matrix, runs)) in zip(places, means, strict=False):
        image = _draw_matrix(axes, names, matrix, top, 1.0 if side >= 0.5 * agents + 1.5 else 0.75)
        heading = textwrap.wrap(group.label, int(10 * side)) + ([f"mean over {runs} runs"] if runs > 1 else [])
        axes.set_title(plain("\n".join(heading)), fontsize=9.5, loc="left")
    for axes in places[len(means) :]:
        axes.set_axis_off()
    figure.colorbar(
        image, ax=list(places), shrink=0.8, pad=0.02, label=f"mean squared correlation, colours from 0 to {top:g}"
    )
    figure.supxlabel(plain("\n".join(note)), fontsize=8.5, color="0.35")
    return figure


def colour_scale(matrices: Sequence[np.ndarray]) -> float:
    """The first of `SCALES` that holds all entries beside the diagonals."""
    highest = max(map(_highest, matrices))
    return next((scale for scale in SCALES if highest <= scale), SCALES[-1])


def groups_without(groups: Sequence[RunGroup]) -> str:
    """A sentence about groups whose runs have no correlation; empty where there is none."""
    labels = [group.label for group in groups if mean_correlation(group) is None]
    return f"No feature correlation in the runs of: {'; '.join(labels)}." if labels else ""


def correlation_heat_map(correlation: FeatureCorrelation, title: str) -> Figure:
    """|correlation| of every feature with every feature, agents separated by lines."""
    figure = new_figure(8.2, 7.4, title)
    axes = figure.subplots()
    assert correlation.signed is not None
    ends = np.cumsum(correlation.widths)
    middles = ends - np.array(correlation.widths) / 2
    image = axes.imshow(np.abs(correlation.signed), cmap="magma", vmin=0, vmax=1, extent=(0, ends[-1], ends[-1], 0))
    for end in ends[:-1]:
        axes.axhline(end, color="white", linewidth=0.6)
        axes.axvline(end, color="white", linewidth=0.6)
    _name(axes, correlation.agents, middles)
    figure.colorbar(image, ax=axes, shrink=0.8, label="|correlation|")
    return figure


def _highest(matrix: np.ndarray) -> float:
    """The largest entry beside the diagonal."""
    beside = matrix[~np.eye(len(matrix), dtype=bool)]
    finite = beside[np.isfinite(beside)]
    return float(finite.max()) if len(finite) else 0.0


def _draw_matrix(axes: Any, agents: list[str], matrix: np.ndarray, top: float, scale: float) -> Any:
    diagonal = np.eye(len(agents), dtype=bool)
    axes.set_facecolor("0.94")
    image = axes.imshow(np.ma.array(matrix, mask=diagonal | ~np.isfinite(matrix)), cmap="viridis", vmin=0, vmax=top)
    _name(axes, agents, np.arange(len(agents)))
    if len(agents) > MAX_NUMBERS:
        return image
    size = scale * (9 if len(agents) <= 8 else 7 if len(agents) <= 16 else 5.5)
    for (i, j), value in np.ndenumerate(matrix):
        color = "0.45" if diagonal[i, j] else "black" if value > 0.6 * top else "white"
        axes.text(j, i, _cell(value), ha="center", va="center", fontsize=size, color=color)
    return image


def _cell(value: float) -> str:
    if not np.isfinite(value):
        return "–"
    if value < 0.0095:
        return f"{value:.0e}".replace("e-0", "e-") if value else "0"
    return f"{value:.3f}".removeprefix("0") if value < 0.9995 else "1"


def _name(axes: Any, agents: list[str], places: np.ndarray) -> None:
    size = 9 if len(agents) <= 12 else 7 if len(agents) <= 30 else 4.5
    names = [plain(agent) for agent in agents]
    long = max(map(len, names)) > 3
    axes.set_xticks(places, names, fontsize=size)
    if long:
        axes.tick_params(axis="x", labelrotation=45)
        for text in axes.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(places, names, fontsize=size)
    axes.tick_params(length=0)
