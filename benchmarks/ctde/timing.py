"""What a critic of the team costs: seconds of an iteration at eight agents, beside independent critics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from common.experiment import Experiment, trainer
from common.results import Row, draw_bar, draw_columns, new_figure, panel, summary
from common.rounds import PHASES, Stopwatch, console, take_turns
from common.tasks import new_table
from matplotlib.figure import Figure

from thrust_rllib import JointPPOConfig
from thrust_rllib.recipes import recipe

AGENTS, ROUNDS, WARMUP, SEED = 8, 15, 3, 0
BAR = 1.5
BASE = "independent"
SIDES: dict[str, dict[str, Any]] = {
    BASE: {},
    "mean": {"critic": "mean", "credit": "shared"},
    "central, a value of the team": {"critic": "central", "credit": "shared"},
    "central, a value per agent": {"critic": "central", "credit": "own"},
    "set, a value of the team": {"critic": "set", "credit": "shared"},
}


def config_of(side: str, agents: int, seed: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig()).environment("spread", env_config={"num_agents": agents})
    return config.training(**SIDES[side]).debugging(seed=seed)


def measure(agents: int, rounds: int, seed: int) -> list[Row]:
    with ExitStack() as stack:
        watches = {
            side: Stopwatch(stack.enter_context(trainer(config_of(side, agents, seed))), time.perf_counter)
            for side in SIDES
        }
        taken = take_turns({side: watch.iteration for side, watch in watches.items()}, WARMUP, rounds)
    rows = []
    for side, seconds in taken.items():
        ratios = [own["iteration"] / base["iteration"] for own, base in zip(seconds, taken[BASE], strict=True)]
        medians = {f"{phase}_seconds": statistics.median(round[phase] for round in seconds) for phase in PHASES}
        rows.append({"side": side, "agents": agents, "rounds": rounds, "seed": seed, **summary(ratios), **medians})
    return rows


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("side", "agents", "iteration, times independent's", *(f"{phase} ms" for phase in PHASES)))
    for row in rows:
        ratio = f"{float(row['median']):.2f} ({float(row['min']):.2f} to {float(row['max']):.2f})"
        milliseconds = [f"{1000 * float(row[f'{phase}_seconds']):.0f}" for phase in PHASES]
        table.add_row(row["side"], row["agents"], ratio, *milliseconds)
    console.print(table, "medians (minimum to maximum) of the rounds")
    return all(float(row["median"]) <= BAR for row in rows if row["side"].startswith("central"))


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Iteration with a critic of the team, eight agents", 8.5, 4)
    axes = figure.subplots()
    panel(axes, "medians, with the range of the rounds", "times independent critics")
    numbers = [row | {key: float(row[key]) for key in ("median", "min", "max")} for row in rows]
    draw_columns(axes, range(len(rows)), numbers, 0.6)
    axes.set_xticks(range(len(rows)), [row["side"].replace(", ", ",\n") for row in rows], fontsize=8)
    draw_bar(axes, BAR, f"bar {BAR:g}")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment("centralized", "timing", ("agents", "side"), measure, show, draw)
