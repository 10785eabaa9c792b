"""Draws panels of curves; matplotlib without pyplot, so that nothing global is touched and no window opens."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

from thrust_rllib.reporting.groups import RunGroup
from thrust_rllib.reporting.panels import (
    MAX_AGENTS,
    MAX_MODULES,
    Line,
    Panel,
    agents_apart,
    agents_of,
    agents_together,
    constraint_panels,
    diversity_panels,
    group_colors,
    modules_of,
    team_return,
    training_panels,
)
from thrust_rllib.reporting.seed_curves import moving_average, seed_curve, smoothing_window

WIDTH = 13  # inches
DOTS_PER_INCH = 130
PANEL_HEIGHT = 3.05  # inches, of a small one
NOTE_WIDTH, LEGEND_WIDTH = 190, 60  # characters
MAX_FAINT = 8  # faint curves in a panel; more are a mess
_LEGEND = None  # a cell of the grid with the groups' colours
_LINE, _CHARACTER, _HANDLE = 0.19, 0.068, 0.6  # inches of a legend


@dataclass(frozen=True)
class _Row:
    """Cells side by side, the widths of all columns of the row, and the height in small panels."""

    cells: Sequence[Panel | None]
    widths: Sequence[int]
    height: float = 1.0


def learning_curves(groups: Sequence[RunGroup], title: str) -> Figure:
    """Returns, then entropy, explained variance, KL and couplings. One group: agents and modules have own lines."""
    if len(groups) == 1:
        first = _Row([team_return(groups), agents_together(groups[0])], [1, 1], 1.35)
    else:
        first = _Row([team_return(groups), _LEGEND], [7, 5], max(1.35, _legend_height(groups)))
    return _figure([first, *_rows(training_panels(groups))], groups, title, curves_caption(groups))


def agent_returns(groups: Sequence[RunGroup], title: str) -> Figure:
    """A small panel for each agent, a line per group."""
    return _figure([_legend_row(groups), *_rows(agents_apart(groups))], groups, title, agents_caption(groups))


def diversity_curves(groups: Sequence[RunGroup], title: str) -> Figure | None:
    """Diversity of policies and accuracy of auxiliary targets, a line per group; None where no run has either."""
    panels = diversity_panels(groups)
    if not panels:
        return None
    legend = [_legend_row(groups)] if len(groups) > 1 else []
    return _figure([*legend, *_rows(panels)], groups, title, diversity_caption(groups))


def diversity_caption(groups: Sequence[RunGroup]) -> str:
    """How to read the curves of diversity."""
    runs, text = [run.curves for group in groups for run in group.runs], ""
    if any(run.diversity for run in runs):
        text = (
            "Diversity: distance of the modules' action distributions on the same observations, mean over pairs; dots "
            "are the updates that measured it, not averaged over iterations. A name such as agent_0_and_3_more is that "
            "of the first of 4 modules with the same spaces. "
        )
        if len(groups) > 1 and any(len(kinds) > 1 for run in runs for kinds in run.diversity.values()):
            text += "Mean over such groups of modules. "
    if any(run.auxiliary_accuracy for run in runs):
        text += (
            "Accuracy: 1 − median relative error of the predictions of an auxiliary target that is not 0, cut to [0, 1]"
        )
        text += ", mean over modules. " if len(groups) > 1 else ". "
        text += _lines_in_words(groups)
    elif max(len(group.runs) for group in groups) > 1:
        text += "Lines: mean over runs; bands: ± 1 standard error of that mean."
    return text.rstrip()


def constraint_curves(groups: Sequence[RunGroup], title: str) -> Figure | None:
    """Costs with their limits and multipliers, a line per group; None where no run has a constraint."""
    panels = constraint_panels(groups)
    if not panels:
        return None
    legend = [_legend_row(groups)] if len(groups) > 1 else []
    return _figure([*legend, *_rows(panels)], groups, title, constraints_caption(groups))


def constraints_caption(groups: Sequence[RunGroup]) -> str:
    """How to read the curves of constraints."""
    return (
        "Cost: mean per step of a rollout, or of a coupling's value over an update; dotted: its limit. Multiplier: the "
        f"λ that held in that rollout. {_lines_in_words(groups)}"
    )


def curves_caption(groups: Sequence[RunGroup]) -> str:
    """How to read the learning curves."""
    text, modules = lines_caption(groups), modules_of(groups)
    if len(groups) > 1:
        text += " Entropy, explained variance and KL: mean over modules."
    elif len(modules) > MAX_MODULES:
        text += f" Below: mean and range of the {len(modules)} modules."
    if len(groups) == 1 and len(agents_of(groups)) > MAX_AGENTS:
        text += f" Agents: mean and range of the {len(agents_of(groups))}."
    if any(run.curves.gradients for group in groups for run in group.runs):
        text += " Gradients: dots are the updates that measured them, not averaged over iterations."
    return text


def agents_caption(groups: Sequence[RunGroup]) -> str:
    """How to read the returns of agents."""
    agents = len(agents_of(groups))
    return lines_caption(groups) + (f" The first {MAX_AGENTS} of {agents} agents." if agents > MAX_AGENTS else "")


def lines_caption(groups: Sequence[RunGroup]) -> str:
    """What a line and a band are."""
    return f"{_lines_in_words(groups)} Returns: mean over the latest finished episodes."


def _lines_in_words(groups: Sequence[RunGroup]) -> str:
    windows = {smoothing_window(len(run.curves.env_steps)) for group in groups for run in group.runs}
    several = max(len(group.runs) for group in groups) > 1
    ragged = any(
        not np.array_equal(run.curves.env_steps, group.runs[0].curves.env_steps)
        for group in groups
        for run in group.runs
    )
    text = "Lines: every iteration"
    if max(windows) > 1:
        shown = str(max(windows)) if len(windows) == 1 else f"{min(windows)} to {max(windows)}"
        text = f"Lines: moving average over {shown} iterations"
    if several:
        text += ", then the mean over runs"
        text += " (interpolated linearly onto common steps)" if ragged else ""
        text += "; bands: ± 1 standard error of that mean; faint, where there is room: each run"
    elif max(windows) > 1:
        text += "; faint: every iteration"
    return f"{text}."


def plain(text: str) -> str:
    """A name as matplotlib draws it as it is: no formula between dollars, no leading underscore (a hidden label)."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with a title on the left."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=layout)
    figure.suptitle(plain(title), fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def _legend_row(groups: Sequence[RunGroup]) -> _Row:
    """The groups' colours above everything."""
    labels = _legend_labels(groups)
    rows = -(-len(labels) // _legend_columns(groups, WIDTH))
    return _Row([_LEGEND], [1], (_LINE * rows * max(map(len, labels)) + 0.1) / PANEL_HEIGHT)


def _rows(cells: Sequence[Panel | None]) -> list[_Row]:
    """At most four side by side, rows of equal length but for the last."""
    number = -(-len(cells) // 4)
    length = -(-len(cells) // number)
    return [_Row(cells[first : first + length], [1] * length) for first in range(0, len(cells), length)]


def _figure(rows: Sequence[_Row], groups: Sequence[RunGroup], title: str, note: str) -> Figure:
    heights = [row.height for row in rows]
    figure = new_figure(WIDTH, PANEL_HEIGHT * sum(heights) + 0.2, title)
    grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for index, row in enumerate(rows):
        columns = grid[index].subgridspec(1, len(row.widths), width_ratios=row.widths)
        for place, panel in enumerate(row.cells):
            axes = figure.add_subplot(columns[place])
            if panel is None:
                _draw_legend_cell(axes, groups, alone=len(row.cells) == 1)
            else:
                _draw_panel(axes, panel)
    figure.supxlabel("\n".join(textwrap.wrap(note, NOTE_WIDTH)), fontsize=8.5, color="0.35")
    return figure


def _draw_legend_cell(axes: Any, groups: Sequence[RunGroup], alone: bool) -> None:
    axes.set_axis_off()
    handles = [Line2D([], [], color=color, linewidth=2.2) for color in group_colors(len(groups))]
    labels = [plain("\n".join(lines)) for lines in _legend_labels(groups)]
    legend = axes.legend(
        handles, labels, loc="upper left", fontsize=9 if len(groups) <= 12 else 7, frameon=False, borderaxespad=0,
        title=None if alone else "groups", title_fontsize=9, alignment="left",
        ncols=_legend_columns(groups, WIDTH) if alone else 1,
    )  # fmt: skip
    legend.set_in_layout(False)  # it has the room that it needs, and would push the panels aside


def _legend_labels(groups: Sequence[RunGroup]) -> list[list[str]]:
    """The lines of each group's label."""
    counts = ["1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs" for group in groups]
    return [
        textwrap.wrap(f"{group.label} ({count})", LEGEND_WIDTH) for group, count in zip(groups, counts, strict=True)
    ]


def _legend_columns(groups: Sequence[RunGroup], width: float) -> int:
    """So many as fit side by side into so many inches."""
    longest = max(len(line) for label in _legend_labels(groups) for line in label)
    return max(1, min(len(groups), int(width / (_CHARACTER * longest + _HANDLE))))


def _legend_height(groups: Sequence[RunGroup]) -> float:
    """In small panels."""
    return 0.2 + 0.07 * sum(map(len, _legend_labels(groups)))


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.set_title(plain(panel.title), fontsize=10.5, loc="left")
    axes.set_xlabel("environment steps", fontsize=9)
    axes.set_ylabel(plain(panel.unit), fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.10g}"))  # no factor above the axis, such as 1e-5
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not panel.lines:
        axes.text(0.5, 0.5, "nothing reported", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    faint = sum(len(line.curves) for line in panel.lines if not line.is_limit) <= MAX_FAINT
    drawn = [_draw_line(axes, line, panel, faint) for line in panel.lines]
    if panel.share:
        _show_share(axes, panel)
    if panel.measured:  # the whole run in view, as in the other panels
        steps = np.concatenate([steps for line in panel.lines for steps, _ in line.curves])
        axes.update_datalim([(steps.min(), 0), (steps.max(), 0)], updatey=False)
        axes.autoscale_view()
    if panel.cosine:
        axes.axhline(0.0, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(-1.05, 1.05)
    if panel.legend is not None:
        inside = panel.legend == "modules"
        axes.legend(
            drawn, [plain(line.label) for line in panel.lines], title=panel.legend, fontsize=8.5, title_fontsize=8.5,
            frameon=False, **({} if inside else {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}),
        )  # fmt: skip


def _draw_line(axes: Any, line: Line, panel: Panel, faint: bool) -> Any:
    """Draws one line with what belongs to it; returns its handle for a legend."""
    if line.is_limit:
        smooth = line.curves
    elif panel.measured:
        smooth = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in line.curves]
    else:
        smooth = [(steps, moving_average(values, smoothing_window(len(steps)))) for steps, values in line.curves]
    single = len(smooth) == 1
    if faint and line.spread != "range" and not line.is_limit and not (single and panel.measured):
        for steps, values in line.curves if single else smooth:
            axes.plot(steps, values, color=line.color, alpha=0.22 if single else 0.35, linewidth=0.8)
    if single:
        steps, values = smooth[0]
    else:
        curve = seed_curve(smooth)
        steps, values = curve.steps, curve.mean
        low, high = (values - curve.standard_error, values + curve.standard_error)
        if line.spread == "range":
            low, high = curve.low, curve.high
        axes.fill_between(steps, low, high, color=line.color, alpha=0.18, linewidth=0)
    dots = panel.measured or np.isfinite(values).sum() == 1
    (handle,) = axes.plot(
        steps, values, color=line.color, label=plain(line.label), linewidth=panel.line_width,
        linestyle=":" if line.is_limit else "-", marker="o" if dots else None, markersize=3 if panel.measured else 6,
    )  # fmt: skip
    return handle


def _show_share(axes: Any, panel: Panel) -> None:
    """0 and 1 in view; the first iterations, which may be far below 0, must not flatten the rest."""
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axes.axhline(0.0, color="0.6", linewidth=0.8, linestyle=":")
    values = np.concatenate([v[np.isfinite(v)] for line in panel.lines for _, v in line.curves])
    lowest = float(np.percentile(values, 5))
    axes.set_ylim(max(-1.05, min(-0.05, lowest - 0.05)), 1.05)
