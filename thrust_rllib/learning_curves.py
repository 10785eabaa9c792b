"""Draws a run's learning curves; matplotlib without pyplot, so that nothing global is touched and no window opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from thrust_rllib.run_curves import RunCurves

TOTAL_COLOR = "black"
MAX_LINES = 8  # of modules in a small panel, and with faint values behind them
STATISTICS = (
    # statistic, title, unit
    ("entropy", "Policy entropy", "nats"),
    ("vf_explained_var", "Explained variance of the value", "1 = perfect"),
    ("approx_kl", "KL of an update", "nats"),
)


def learning_curves(curves: RunCurves, title: str) -> Figure:
    """Returns overall and per agent, then per module entropy, explained variance and KL, then couplings.

    Lines are moving averages over iterations, the values themselves are faint behind them.
    """
    agents = list(curves.agent_returns)
    modules = list(dict.fromkeys(m for statistic, *_ in STATISTICS for m in curves.modules.get(statistic, {})))
    colors = _colors(agents, modules)
    window = max(1, len(curves.env_steps) // 12)
    panels = len(STATISTICS) + bool(curves.couplings)

    figure = Figure(figsize=(13, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 12, height_ratios=(1.35, 1))
    total = figure.add_subplot(grid[0, :6])
    _panel(total, "Return, sum over agents", "reward per episode")
    _draw(total, curves.env_steps, {"all": curves.total_return}, {"all": TOTAL_COLOR}, window, width=2.2)
    each = figure.add_subplot(grid[0, 6:])
    _panel(each, "Return of each agent", "reward per episode")
    _draw(each, curves.env_steps, curves.agent_returns, colors, window)
    if len(agents) > 1:
        _legend(each, "agents")

    width = 12 // panels
    for index, (statistic, heading, unit) in enumerate(STATISTICS):
        axes = figure.add_subplot(grid[1, index * width : (index + 1) * width])
        values = curves.modules.get(statistic, {})
        _panel(axes, heading, unit)
        if len(values) > MAX_LINES:
            _draw_range(axes, curves.env_steps, values, window)
        else:
            _draw(axes, curves.env_steps, values, colors, window)
        if statistic == "vf_explained_var":
            _show_explained_variance(axes, values)
        if index == 0 and set(modules) - set(agents) and len(modules) <= MAX_LINES:
            _legend(axes, "modules", inside=True)
    if curves.couplings:
        axes = figure.add_subplot(grid[1, (panels - 1) * width :])
        names = list(curves.couplings)
        _panel(axes, "Cross-agent loss" if len(names) > 1 else f"Cross-agent loss: {names[0]}", "before its weight")
        colors = _colors(names, []) if len(names) > 1 else {names[0]: TOTAL_COLOR}
        _draw(axes, curves.env_steps, curves.couplings, colors, window)
        if len(names) > 1:
            _legend(axes, "losses", inside=True)
    smoothing = f"moving average over {window} iterations; faint: every iteration" if window > 1 else "every iteration"
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    note = f"Lines: {smoothing}. Returns: mean over the latest finished episodes."
    if len(modules) > MAX_LINES:
        note += f" Below: mean and range of the {len(modules)} modules."
    figure.supxlabel(note, fontsize=8.5, color="0.35")
    return figure


def _panel(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel("environment steps", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(
    axes: Any,
    steps: np.ndarray,
    curves: Mapping[str, np.ndarray],
    colors: Mapping[str, Any],
    window: int,
    width: float = 1.5,
) -> None:
    drawn = {name: values for name, values in curves.items() if np.isfinite(values).any()}
    if not drawn:
        axes.text(0.5, 0.5, "nothing reported", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    marker = "o" if len(steps) == 1 else None
    for name, values in drawn.items():
        if window > 1 and len(drawn) <= MAX_LINES:
            axes.plot(steps, values, color=colors[name], alpha=0.22, linewidth=0.8)
        axes.plot(steps, moving_average(values, window), color=colors[name], linewidth=width, label=name, marker=marker)


def _draw_range(axes: Any, steps: np.ndarray, curves: Mapping[str, np.ndarray], window: int) -> None:
    """Many modules: their mean, and a band from the lowest to the highest."""
    smooth = np.stack([moving_average(values, window) for values in curves.values()])
    known = np.isfinite(smooth).any(axis=0)
    steps, smooth = steps[known], smooth[:, known]
    axes.fill_between(steps, np.nanmin(smooth, axis=0), np.nanmax(smooth, axis=0), color=TOTAL_COLOR, alpha=0.15)
    axes.plot(steps, np.nanmean(smooth, axis=0), color=TOTAL_COLOR, linewidth=1.5)


def _show_explained_variance(axes: Any, values: Mapping[str, np.ndarray]) -> None:
    """0 and 1 in view; the first iterations, which may be far below 0, must not flatten the rest."""
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    axes.axhline(0.0, color="0.6", linewidth=0.8, linestyle=":")
    finite = np.concatenate([v[np.isfinite(v)] for v in values.values()] or [np.zeros(0)])
    lowest = float(np.percentile(finite, 5)) if len(finite) else 0.0
    axes.set_ylim(max(-1.05, min(-0.05, lowest - 0.05)), 1.05)


def _legend(axes: Any, title: str, inside: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    if inside:
        axes.legend(handles, labels, title=title, fontsize=8, title_fontsize=8, frameon=False)
    else:
        axes.legend(
            handles, labels, title=title, fontsize=8.5, title_fontsize=8.5, frameon=False,
            loc="center left", bbox_to_anchor=(1.0, 0.5),
        )  # fmt: skip


def _colors(agents: list[str], modules: list[str]) -> dict[str, Any]:
    """A module that has an agent's name has its colour; the others have colours of their own."""
    palette, size = ("tab10", 10) if len(agents) <= 10 else ("tab20", 20)
    colors: dict[str, Any] = {agent: matplotlib.colormaps[palette](i % size) for i, agent in enumerate(agents)}
    others = [m for m in modules if m not in colors]
    dark = matplotlib.colormaps["tab20b"]
    colors.update({m: TOTAL_COLOR if len(others) == 1 else dark(4 * i % 20) for i, m in enumerate(others)})
    return colors


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of the finite values in the window, which is shorter at both ends; NaN before the first of them.

    Args:
        values: [I].
        window: in iterations.
    """
    known = np.isfinite(values)
    kernel = np.ones(window)
    # mode "same" is as long as the longer argument: a window longer than the series must be cut.
    middle = slice((window - 1) // 2, (window - 1) // 2 + len(values))
    total = np.convolve(np.where(known, values, 0.0), kernel)[middle]
    count = np.convolve(known.astype(float), kernel)[middle]
    return np.where((count > 0.5) & np.maximum.accumulate(known), total / np.maximum(count, 1), np.nan)
