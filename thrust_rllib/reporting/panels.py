"""Which panels a report has, and which lines are in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np

from thrust_rllib.command_line.training_progress import in_order, is_at_least
from thrust_rllib.reporting.groups import RunGroup
from thrust_rllib.reporting.run_curves import RunCurves

TOTAL_COLOR = "black"
MAX_MODULES = 8  # as lines of their own in one panel
MAX_AGENTS = 24  # likewise
STATISTICS = (
    # statistic, title, unit
    ("entropy", "Policy entropy", "nats"),
    ("vf_explained_var", "Explained variance of the value", "1 = perfect"),
    ("approx_kl", "KL of an update", "nats"),
)
GRADIENTS = {
    "norm_ratio": ("Gradient of {}: size", "norm / norm of PPO's"),
    "cosine": ("Gradient of {}: direction", "cosine with PPO's"),
}
DIVERSITY = {
    # statistic: title, unit
    "total_variation": ("Total variation of policies", "0 = alike, 1 = disjoint"),
    "total_variation_time_averaged": ("Total variation, time-averaged", "0 = alike, 1 = disjoint"),
    "jensen_shannon": ("Jensen-Shannon divergence", "nats, at most 0.69"),
    "system_neural_diversity": ("System neural diversity", "units of the actions"),
}
Curve = tuple[np.ndarray, np.ndarray]
_One = Callable[[RunCurves], np.ndarray | None]
_Named = Callable[[RunCurves], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Line:
    """One line: a curve, or the mean of several with a band.

    Args:
        label: in the legend.
        color: any of matplotlib's.
        curves: (steps [I], values [I]) of each run.
        spread: what the band shows: "standard error" of the mean, or "range" from the lowest to the highest.
        is_limit: dotted, of what another line is to keep.
    """

    label: str
    color: Any
    curves: list[Curve]
    spread: str = "standard error"
    is_limit: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes over environment steps.

    Args:
        title: above.
        unit: beside.
        lines: in drawing order.
        legend: its title; None for no legend.
        share: 0 and 1 are marked and in view, what is far below 0 is not.
        cosine: the axis shows -1 to 1, with 0 marked.
        measured: each finite number is a measurement of its own, drawn with a marker and not smoothed.
        line_width: of its lines.
    """

    title: str
    unit: str
    lines: list[Line]
    legend: str | None = None
    share: bool = False
    cosine: bool = False
    measured: bool = False
    line_width: float = 1.5


def team_return(groups: Sequence[RunGroup]) -> Panel:
    """Return of all agents, a line per group."""
    lines = _by_group(groups, lambda run: run.total_return)
    return Panel("Return, sum over agents", "reward per episode", lines, line_width=2.2)


def agents_together(group: RunGroup) -> Panel:
    """Return of each agent of one group in one panel."""
    agents = agents_of([group])
    lines = _each(group, lambda run: run.agent_returns, _agent_colors(agents))
    if len(agents) > MAX_AGENTS:
        lines = _range(group, lambda run: run.agent_returns)
    return Panel("Return of each agent", "reward per episode", lines, "agents" if 1 < len(lines) else None)


def agents_apart(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return of each agent, a panel for each of the first `MAX_AGENTS`, a line per group."""
    return [
        Panel(agent, "reward per episode", _by_group(groups, _of_agent(agent)))
        for agent in agents_of(groups)[:MAX_AGENTS]
    ]


def training_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Entropy, explained variance and KL, then each coupling's value, then each coupling's gradient where known."""
    panels = [
        Panel(
            title,
            unit,
            _of_modules(groups, _statistic(statistic)),
            "modules" if index == 0 and _modules_need_a_legend(groups) else None,
            share=statistic == "vf_explained_var",
        )
        for index, (statistic, title, unit) in enumerate(STATISTICS)
    ]
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in run.curves.couplings):
        lines = _by_group(groups, _coupling(name))
        panels.append(Panel(f"Cross-agent loss: {name}", "before its coefficient", lines))
    measured = dict.fromkeys(key for group in groups for run in group.runs for key in run.curves.gradients)
    for key in (key for key in measured if key[1] in GRADIENTS):
        title, unit = GRADIENTS[key[1]]
        lines = _of_modules(groups, _gradient(key))
        panels.append(Panel(title.format(key[0]), unit, lines, cosine=key[1] == "cosine", measured=True))
    return panels


def diversity_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Each statistic of diversity that some run measured, then the accuracy of each auxiliary target."""
    runs = [run.curves for group in groups for run in group.runs]
    panels: list[Panel] = []
    for statistic, (title, unit) in DIVERSITY.items():
        kinds = in_order({kind: None for run in runs for kind in run.diversity.get(statistic, {})})
        if not kinds:
            continue
        if len(groups) > 1:
            lines = _by_group(groups, _mean_diversity(statistic))
        else:
            palette = [TOTAL_COLOR] if len(kinds) == 1 else [matplotlib.colormaps["tab10"](k) for k in range(10)]
            colors = {kind: palette[k % len(palette)] for k, kind in enumerate(kinds)}
            lines = _each(groups[0], _diversity(statistic), colors)
        legend = "modules" if not panels and len(groups) == 1 and len(lines) > 1 else None
        panels.append(Panel(title, unit, lines, legend, measured=True))
    for index, target in enumerate(sorted({target for run in runs for target in run.auxiliary_accuracy})):
        lines = _of_modules(groups, _accuracy(target))
        legend = "modules" if index == 0 and len(groups) == 1 and 1 < len(lines) <= MAX_MODULES else None
        panels.append(Panel(f"Accuracy: {target}", "1 = perfect", lines, legend, share=True))
    return panels


def constraint_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Two of each constraint: its cost and limit, and its multiplier; a line per group."""
    panels: list[Panel] = []
    for name in in_order({name: None for group in groups for run in group.runs for name in run.curves.constraints}):
        cost, limit, multiplier = (
            _by_group(groups, _of_constraint(name, kind)) for kind in ("cost", "limit", "multiplier")
        )
        limit = [replace(line, is_limit=True) for line in limit]
        unit = "mean per step, at least the limit" if _is_at_least(groups, name) else "mean per step"
        panels.append(Panel(f"Cost: {name}", unit, [*cost, *limit]))
        panels.append(Panel(f"Multiplier: {name}", "λ, reward per cost", multiplier))
    return panels


def _is_at_least(groups: Sequence[RunGroup], name: str) -> bool:
    curves = [run.curves.constraints.get(name, {}) for group in groups for run in group.runs]
    rows = [zip(*(own.get(k, ()) for k in ("cost", "limit", "violation")), strict=False) for own in curves]
    return any(is_at_least(*row) for run in rows for row in run)


def group_colors(number: int) -> list[Any]:
    """One for each group; black where there is one only."""
    if number == 1:
        return [TOTAL_COLOR]
    if number <= 10:
        return [matplotlib.colormaps["tab10"](k) for k in range(number)]
    if number <= 20:
        # tab20 has pairs of a dark and a light colour: all the dark ones first.
        return [matplotlib.colormaps["tab20"]((2 * k) % 20 + k // 10) for k in range(number)]
    return [matplotlib.colormaps["turbo"](k / (number - 1)) for k in range(number)]


def agents_of(groups: Sequence[RunGroup]) -> list[str]:
    """All agents with a return in some run, in order."""
    return list(in_order({agent: None for group in groups for run in group.runs for agent in run.curves.agent_returns}))


def modules_of(groups: Sequence[RunGroup]) -> list[str]:
    """All modules with a statistic in some run, in order."""
    names = {
        module: None
        for group in groups
        for run in group.runs
        for statistic, *_ in STATISTICS
        for module in run.curves.modules.get(statistic, {})
    }
    return list(in_order(names))


def _of_agent(agent: str) -> _One:
    return lambda run: run.agent_returns.get(agent)


def _coupling(name: str) -> _One:
    return lambda run: run.couplings.get(name)


def _statistic(name: str) -> _Named:
    return lambda run: run.modules.get(name, {})


def _diversity(statistic: str) -> _Named:
    return lambda run: run.diversity.get(statistic, {})


def _mean_diversity(statistic: str) -> _One:
    return lambda run: _mean(run.diversity.get(statistic, {}))


def _accuracy(target: str) -> _Named:
    return lambda run: run.auxiliary_accuracy.get(target, {})


def _of_constraint(name: str, kind: str) -> _One:
    return lambda run: run.constraints.get(name, {}).get(kind)


def _gradient(key: tuple[str, str]) -> _Named:
    return lambda run: run.gradients.get(key, {})


def _by_group(groups: Sequence[RunGroup], values: _One) -> list[Line]:
    lines = []
    for group, color in zip(groups, group_colors(len(groups)), strict=True):
        found = [(run.curves.env_steps, values(run.curves)) for run in group.runs]
        curves = [(steps, of_run) for steps, of_run in found if of_run is not None and np.isfinite(of_run).any()]
        if curves:
            lines.append(Line(group.label, color, curves))
    return lines


def _of_modules(groups: Sequence[RunGroup], values: _Named) -> list[Line]:
    """One group: a line per module, or the range of many. Several: the mean over modules, a line per group."""
    if len(groups) > 1:
        return _by_group(groups, lambda run: _mean(values(run)))
    modules = modules_of(groups)
    if len(modules) > MAX_MODULES:
        return _range(groups[0], values)
    return _each(groups[0], values, _agent_colors(agents_of(groups), modules))


def _each(group: RunGroup, values: _Named, colors: dict[str, Any]) -> list[Line]:
    """A line per agent or module."""
    lines = []
    for name, color in colors.items():
        of_runs = [(run.curves.env_steps, values(run.curves).get(name)) for run in group.runs]
        curves = [(steps, found) for steps, found in of_runs if found is not None and np.isfinite(found).any()]
        if curves:
            lines.append(Line(name, color, curves))
    return lines


def _range(group: RunGroup, values: _Named) -> list[Line]:
    curves = [
        (run.curves.env_steps, of_one)
        for run in group.runs
        for of_one in values(run.curves).values()
        if np.isfinite(of_one).any()
    ]
    return [Line("mean", TOTAL_COLOR, curves, "range")] if curves else []


def _mean(values: dict[str, np.ndarray]) -> np.ndarray | None:
    """Over modules, of those that are finite."""
    if not values:
        return None
    table = np.stack(list(values.values()))
    count = np.isfinite(table).sum(axis=0)
    return np.where(count > 0, np.where(np.isfinite(table), table, 0).sum(axis=0) / np.maximum(count, 1), np.nan)


def _modules_need_a_legend(groups: Sequence[RunGroup]) -> bool:
    """Modules that are called like agents have the agents' colours and legend."""
    modules = modules_of(groups)
    return len(groups) == 1 and len(modules) <= MAX_MODULES and bool(set(modules) - set(agents_of(groups)))


def _agent_colors(agents: list[str], modules: Sequence[str] = ()) -> dict[str, Any]:
    """Of agents, or of modules: one that has an agent's name has its colour; the others have colours of their own."""
    palette, size = ("tab10", 10) if len(agents) <= 10 else ("tab20", 20)
    colors: dict[str, Any] = {agent: matplotlib.colormaps[palette](i % size) for i, agent in enumerate(agents)}
    if not modules:
        return colors
    others = [m for m in modules if m not in colors]
    dark = matplotlib.colormaps["tab20b"]
    colors.update({m: TOTAL_COLOR if len(others) == 1 else dark(4 * i % 20) for i, m in enumerate(others)})
    return {module: colors[module] for module in modules}
