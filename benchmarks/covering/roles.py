"""Explorers and relays: a team whose agents choose a role with each goal, beside one without roles."""

from __future__ import annotations

from collections.abc import Sequence

from common.experiment import Experiment, points, train_through, trainer
from common.results import Row, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure

from covering.team import SCRIPT, config_of, play, play_at_random, world_of

STEPS = 320_000
SEEDS = (0,)
MECHANISM = "none"
PUBLISHED = {"with": "90.9 %", "without": "1.6 to 5.6 %"}
SIDES = tuple(PUBLISHED)


def measure(roles: str, seed: int, steps: int) -> list[Row]:
    world = world_of(MECHANISM, "open", cover_r=0, roles=roles == "with")
    with trainer(config_of(world, MECHANISM, seed, steps)) as algo:
        random = play_at_random(algo)
        progress = train_through(algo, steps, {"return": "env_runners/episode_return_mean"})
        played = play(algo)
        agents = len(algo.config.policy_mapping_fn.table)
    return [
        {
            "roles": roles,
            "seed": seed,
            "env_steps": progress.env_steps,
            **played,
            **{f"random_{name}": random[name] for name in ("coverage", "connected", "firmly_connected")},
            "published": PUBLISHED[roles],
            "training_seconds": progress.seconds,
            "curve": curve_as_text([(at, total / agents) for at, total in progress.curves["return"][1::2]]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    columns = ("roles", "seed", "env steps", "coverage", "published", "λ₂ > 0.001", "λ₂ > 0.5", "at random", "s")
    table = new_table(columns)
    for row in rows:
        coverage = f"{float(row['coverage']):.1%} ± {float(row['coverage_error']):.1%}"
        shares = [f"{float(row[name]):.3f}" for name in ("connected", "firmly_connected")]
        at_random, seconds = f"{float(row['random_coverage']):.1%}", f"{float(row['training_seconds']):.0f}"
        name = (row["roles"], row["seed"], row["env_steps"])
        table.add_row(*name, coverage, row["published"], *shares, at_random, seconds)
    console.print(table, "coverage at the end of greedy episodes, ± standard error")
    return True


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Roles: mean of the last 100 episodes of training", 7, 4)
    axes = figure.subplots()
    panel(axes, "16 × 16, footprint of one cell, actions sampled", "return per agent")
    axes.set_xlabel("thousands of environment steps", fontsize=9)
    for number, row in enumerate(rows):
        axes.plot(*points(row["curve"]), color=f"C{number}", linewidth=1.2, label=f"{row['roles']}, seed {row['seed']}")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(SCRIPT, "roles", ("roles", "env_steps", "seed"), measure, show, draw)
