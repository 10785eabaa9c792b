"""A team grows: six agents on 24 × 24 cells begin with the weights of four on 16 × 16, or with new ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.experiment import Experiment, points, train_through, trainer
from common.results import Row, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure
from ray.rllib.algorithms.algorithm import Algorithm

from covering.team import SCRIPT, config_of, play, play_at_random, world_of

MECHANISM, TERRAIN = "pid", "open"
SMALL_STEPS = 160_000
LARGE: dict[str, Any] = {"grid": 24, "num_agents": 6}
MINUTES, SEED = 5.0, 0
GENTLE, USUAL = [[0, 3e-4], [100_000, 1e-4]], [[0, 1e-3], [100_000, 2e-4]]
LR = {"warm": GENTLE, "warm, rate of scratch": USUAL, "scratch": USUAL}
"""Learning rates by environment steps: a high one at once undoes a part of what the small team has learned."""
SIDES = tuple(LR)
WARM, SCRATCH, RANDOM = "warm", "scratch", "random"


def measure(seed: int, minutes: float, small_steps: int) -> list[Row]:
    """One row of each start, and of agents that act at random; all train in turn, iteration by iteration."""
    small, large = world_of(MECHANISM, TERRAIN), world_of(MECHANISM, TERRAIN, **LARGE)
    about = {"seed": seed, "minutes": minutes, "small_steps": small_steps}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        with trainer(config_of(small, MECHANISM, seed, small_steps)) as algo:
            train_through(algo, small_steps, {})
            at_home = play(algo)["coverage"]
            checkpoint = algo.save_to_path(Path(folder) / "small")
        configs = {side: config_of(large, MECHANISM, seed, 10**6).training(lr=LR[side]) for side in SIDES}
        teams = {side: stack.enter_context(trainer(config)) for side, config in configs.items()}
        for side, algo in teams.items():
            if side != SCRATCH:
                algo.warm_start(checkpoint)
        before = {side: play(algo)["coverage"] for side, algo in teams.items()}
        trained = train_in_turn(teams, 60 * minutes)
        rows = [
            {"start": side, **about, "small_coverage": None if side == SCRATCH else at_home, "before": before[side]}
            | play(algo)
            | trained[side]
            for side, algo in teams.items()
        ]
        at_random = play_at_random(teams[WARM])
    empty = dict.fromkeys(("small_coverage", "before"))
    return [*rows, {"start": RANDOM, **about, **empty, **at_random, **dict.fromkeys(trained[WARM])}]


def train_in_turn(teams: dict[str, Algorithm], seconds: float) -> dict[str, Row]:
    """Trains each until it has had that many seconds of its own; steps, seconds and the curve of its returns."""
    used, steps = dict.fromkeys(teams, 0.0), dict.fromkeys(teams, 0)
    curves: dict[str, list[tuple[int, float]]] = {side: [] for side in teams}
    while waiting := [side for side in teams if used[side] < seconds]:
        for side in waiting:
            algo, before = teams[side], time.perf_counter()
            found = algo.train()["env_runners"]
            used[side] += time.perf_counter() - before
            steps[side] = int(found["num_env_steps_sampled_lifetime"])
            if "episode_return_mean" in found:
                agents = len(algo.config.policy_mapping_fn.table)
                curves[side].append((steps[side], found["episode_return_mean"] / agents))
    return {
        side: {"env_steps": steps[side], "training_seconds": used[side], "curve": curve_as_text(curves[side])}
        for side in teams
    }


def show(rows: Sequence[Row]) -> bool:
    """Whether the warm start is ahead, before training of the random team and behind it of the new weights."""
    columns = ("start", "seed", "minutes", "env steps", "before", "coverage", "λ₂ > 0.001", "λ₂ > 0.5", "16 × 16")
    table = new_table(columns)
    for row in rows:
        numbers = [f"{float(row[name]):.3f}" if row[name] else "" for name in ("before", "coverage")]
        shares = [f"{float(row[name]):.3f}" for name in ("connected", "firmly_connected")]
        small = f"{float(row['small_coverage']):.3f}" if row["small_coverage"] else ""
        table.add_row(row["start"], row["seed"], row["minutes"], row["env_steps"], *numbers, *shares, small)
    console.print(table, "coverage at the end of greedy episodes, before and after the minutes of training")
    of = {row["start"]: row for row in rows}
    coverage = {side: float(row["coverage"]) for side, row in of.items()}
    ahead = coverage[WARM] > coverage[SCRATCH] and float(of[WARM]["before"]) > coverage[RANDOM]
    return bool(ahead)


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("24 × 24 cells, six agents: mean of the last 100 episodes of training", 7, 4)
    axes = figure.subplots()
    panel(axes, "actions sampled", "return per agent")
    axes.set_xlabel("thousands of environment steps", fontsize=9)
    for number, row in enumerate(row for row in rows if row["curve"]):
        axes.plot(*points(row["curve"]), color=f"C{number}", linewidth=1.2, label=f"{row['start']}, seed {row['seed']}")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(SCRIPT, "growth", ("seed", "minutes", "start"), measure, show, draw)
