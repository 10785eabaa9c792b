"""Draws a report's figures into its folder, with their captions for the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thrust_rllib.reporting import correlation_figures, curve_figures
from thrust_rllib.reporting.groups import RunGroup, by_environment
from thrust_rllib.reporting.page import PageFigure
from thrust_rllib.reporting.panels import agents_of

# The field is for the environment, where there are several.
PLOT = "learning_curves{}.png"
DIVERSITY_PLOT = "diversity{}.png"
CONSTRAINTS_PLOT = "constraints{}.png"
AGENTS_PLOT = "agent_returns{}.png"
CORRELATION_PLOT = "feature_correlation{}.png"
HEAT_MAP = "feature_heat_map{}.png"


def environment_suffixes(groups: Sequence[RunGroup]) -> dict[str, str]:
    """{environment: what its files have behind their names}: nothing for a single one, else its name."""
    envs = list(by_environment(groups))
    if len(envs) == 1:
        return {envs[0]: ""}
    found: dict[str, str] = {}
    for env in envs:
        start = "_" + re.sub(r"[^\w.-]+", "_", env)
        taken = {suffix.lower() for suffix in found.values()}  # some file systems do not see capitals
        found[env] = next(s for s in chain([start], (f"{start}_{k}" for k in count(2))) if s.lower() not in taken)
    return found


def draw_figures(target: Path, groups: Sequence[RunGroup], title: str, suffix: str) -> list[PageFigure]:
    """Draws all figures of one environment.

    Args:
        target: folder of their files.
        groups: of the environment.
        title: above the curves.
        suffix: of the files' names.
    """
    curves = _save(curve_figures.learning_curves(groups, title), target / PLOT.format(suffix))
    figures = [PageFigure("Learning curves", curve_figures.curves_caption(groups), curves)]
    if len(groups) > 1 and len(agents_of(groups)) > 1:
        agents = _save(
            curve_figures.agent_returns(groups, f"{title}: return of each agent"), target / AGENTS_PLOT.format(suffix)
        )
        figures.append(PageFigure("Return of each agent", curve_figures.agents_caption(groups), agents))
    heading = _diversity_heading(groups)
    diversity = curve_figures.diversity_curves(groups, f"{title}: {heading.lower()}")
    if diversity is not None:
        saved = _save(diversity, target / DIVERSITY_PLOT.format(suffix))
        figures.append(PageFigure(heading, curve_figures.diversity_caption(groups), saved))
    constraints = curve_figures.constraint_curves(groups, f"{title}: constraints")
    if constraints is not None:
        saved = _save(constraints, target / CONSTRAINTS_PLOT.format(suffix))
        figures.append(PageFigure("Constraints", curve_figures.constraints_caption(groups), saved))
    return [*figures, *_correlation_figures(target, groups, suffix)]


def _diversity_heading(groups: Sequence[RunGroup]) -> str:
    runs = [run.curves for group in groups for run in group.runs]
    parts = {"diversity": any(r.diversity for r in runs), "auxiliary targets": any(r.auxiliary_accuracy for r in runs)}
    return " and ".join(name for name, there in parts.items() if there).capitalize()


def _correlation_figures(target: Path, groups: Sequence[RunGroup], suffix: str) -> list[PageFigure]:
    heading = "Correlation of the agents' features"
    runs = [run for group in groups for run in group.runs]
    known = [run for run in runs if run.correlation is not None]
    if not known:
        why = (
            "These runs have none in their report folders: a run writes it at its end, when it has two agents or more "
            "and all modules give encoder_features."
        )
        return [PageFigure(heading, why, None)]
    rows = sorted({run.correlation.num_rows for run in known if run.correlation is not None})
    span = f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
    matrices = _save(
        correlation_figures.correlation_matrices(groups, heading), target / CORRELATION_PLOT.format(suffix)
    )
    caption = (
        "Number in row i, column j: mean squared Pearson correlation of agent i's encoder features with agent j's, "
        f"||corr(Z_i, Z_j)||² / (D_i D_j), with the last weights on {span} fresh joint rows"
        f"{', mean over the runs of a group' if len(runs) > len(groups) else ''}. Independent features give about "
        f"{1 / rows[0]:.1g}. Colours start at 0. Grey diagonal: an agent's features among themselves. "
        f"{correlation_figures.groups_without(groups)}"
    )
    figures = [PageFigure(heading, caption, matrices, narrow=True)]
    first = next((run for run in known if run.correlation is not None and run.correlation.signed is not None), None)
    if first is not None and first.correlation is not None:
        drawn = correlation_figures.correlation_heat_map(first.correlation, f"All features: {first.folder.name}")
        caption = (
            f"Absolute correlation of every encoder feature with every other one in the run {first.folder}; lines "
            "separate agents."
        )
        figures.append(
            PageFigure("All features of one run", caption, _save(drawn, target / HEAT_MAP.format(suffix)), narrow=True)
        )
    return figures


def _save(figure: Figure, path: Path) -> Path:
    # Not savefig, which draws everything once more beforehand to find the layout.
    FigureCanvasAgg(figure).print_png(path)
    return path
