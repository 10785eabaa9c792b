"""What keeps a team together while it covers: a fixed price, two multipliers, a mask, or nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.experiment import Experiment, grouped, points, train_through, trainer
from common.results import Row, draw_bar, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure

from covering.team import MARGIN, MECHANISMS, SCRIPT, config_of, play, play_at_random, world_of

STEPS = 160_000
SEEDS = (0, 1)
RANDOM = "random"
SIDES = (*MECHANISMS, RANDOM)
COVERAGE, CONNECTED = 0.6, 0.95
NUMBERS = ("coverage", "connected", "firmly_connected")
TRAINED = ("cost", "multiplier", "training_seconds", "return_curve", "cost_curve", "multiplier_curve")
SHOWN = (("multiplier", ".2f"), ("training_seconds", ".0f"))
COLORS = dict(zip(SIDES, ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#c7c7c7"), strict=True))


def measure(mechanism: str, terrain: str, seed: int, steps: int, keep: str = "") -> list[Row]:
    """Trains and plays. keep: folder for a checkpoint of the last weights, "" for none."""
    row: Row = {"terrain": terrain, "mechanism": mechanism, "seed": seed}
    if mechanism == RANDOM:
        with trainer(config_of(world_of(mechanism, terrain), "none", seed, steps)) as algo:
            return [row | {"env_steps": 0} | play_at_random(algo) | dict.fromkeys(TRAINED)]
    path = f"learners/__all_modules__/constraints/{MARGIN}"
    watched = {"return": "env_runners/episode_return_mean"}
    watched |= {name: f"{path}/{name}" for name in ("cost", "multiplier")}
    with trainer(config_of(world_of(mechanism, terrain), mechanism, seed, steps)) as algo:
        progress = train_through(algo, steps, watched)
        row |= {"env_steps": progress.env_steps} | play(algo)
        if keep:
            algo.save_to_path(Path(keep).resolve() / f"{terrain}_{mechanism}_{seed}")
    return [
        row
        | {
            **{name: progress.late(name) if MECHANISMS[mechanism] else None for name in ("cost", "multiplier")},
            "training_seconds": progress.seconds,
            "return_curve": curve_as_text(progress.curves["return"][1::2]),
            "cost_curve": curve_as_text(progress.curves["cost"][::2]),
            "multiplier_curve": curve_as_text(progress.curves["multiplier"][::2]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    """Whether one mechanism keeps both bars on every terrain of the rows, means over its seeds."""
    shown = ("coverage", "λ₂ > 0.001", "λ₂ > 0.5", "return", "price", "s")
    table = new_table(("terrain", "mechanism", "seed", "env steps", *shown))
    for row in rows:
        coverage = f"{float(row['coverage']):.3f} ± {float(row['coverage_error']):.3f}"
        shares = [f"{float(row[name]):.3f}" for name in NUMBERS[1:]]
        trained = [f"{float(row[name]):{form}}" if row[name] else "" for name, form in SHOWN]
        name = (row["terrain"], row["mechanism"], row["seed"], row["env_steps"])
        table.add_row(*name, coverage, *shares, f"{float(row['return']):.0f}", *trained)
    console.print(table, "greedy episodes, ± standard error over episodes; price: over the last quarter of the updates")
    kept: dict[str, list[str]] = {}
    for (terrain, mechanism), mine in grouped(rows, "terrain", "mechanism").items():
        coverage, connected = (statistics.fmean(float(row[name]) for row in mine) for name in NUMBERS[:2])
        enough = mechanism != RANDOM and coverage >= COVERAGE and connected >= CONNECTED
        kept.setdefault(terrain, []).extend([mechanism] * enough)
    for terrain, names in kept.items():
        told = f"coverage ≥ {COVERAGE:g} with λ₂ > 0.001 in ≥ {CONNECTED:.0%} of the steps"
        console.print(f"{terrain}: {told}: {', '.join(names) or 'none'}", highlight=False)
    return bool(kept) and all(kept.values())


def draw(rows: Sequence[Row]) -> Figure:
    terrains = list(dict.fromkeys(row["terrain"] for row in rows))
    figure = new_figure("Coverage and connection, by what keeps the team together", 12, 3.8 * len(terrains))
    all_axes: Any = figure.subplots(len(terrains), 3, squeeze=False)
    for axes, terrain in zip(all_axes, terrains, strict=True):
        mine = [row for row in rows if row["terrain"] == terrain]
        for one, bar_name in zip(axes, NUMBERS[1:], strict=False):
            _against_coverage(one, mine, bar_name)
        axes[0].axvline(CONNECTED, color="black", linewidth=1.1, linestyle="--", label="bars")
        draw_bar(axes[0], COVERAGE)
        axes[0].legend(fontsize=7.5)
        axes[0].set_title(f"{terrain}: λ₂ > 0.001", fontsize=10.5, loc="left")
        axes[1].set_title(f"{terrain}: λ₂ > 0.5", fontsize=10.5, loc="left")
        panel(axes[2], f"{terrain}: price that a multiplier found", "multiplier")
        axes[2].set_xlabel("thousands of environment steps", fontsize=9)
        for row in mine:
            if row["mechanism"] in ("lagrangian", "pid") and row["multiplier_curve"]:
                label = row["mechanism"] if row["seed"] == mine[0]["seed"] else None
                color = COLORS[row["mechanism"]]
                axes[2].plot(*points(row["multiplier_curve"]), color=color, linewidth=1.1, alpha=0.8, label=label)
        if axes[2].lines:
            axes[2].legend(fontsize=8)
    return figure


def _against_coverage(axes: Any, rows: Sequence[Row], share: str) -> None:
    panel(axes, "", "coverage at the end of an episode")
    axes.set_xlabel("share of the steps", fontsize=9)
    for (mechanism,), mine in grouped(rows, "mechanism").items():
        x, y = ([float(row[name]) for row in mine] for name in (share, "coverage"))
        marker = "x" if mechanism == RANDOM else "o"
        axes.plot(x, y, marker, color=COLORS[mechanism], markersize=6, label=mechanism)


EXPERIMENT = Experiment(SCRIPT, "mechanisms", ("terrain", "mechanism", "env_steps", "seed"), measure, show, draw)
