"""What messages cost: time per agent and step, of sampling and of the update, as teams grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from common.experiment import Experiment, grouped, trainer
from common.results import Row, draw_columns, new_figure, panel, summary
from common.rounds import PHASES, Stopwatch, console, take_turns
from common.tasks import new_table
from matplotlib.figure import Figure

from covering.team import MODEL, SCRIPT, config_of, world_of
from thrust_rllib import JointPPOConfig

GRIDS = {4: 16, 16: 24, 64: 32}
MESSAGE_ROUNDS = (2, 0)
ENVS, STEPS, MINIBATCH, EPOCHS = 16, 50, 200, 4
ROUNDS, WARMUP, SEED = 5, 1, 0
MECHANISM = "pid"


def config_for(agents: int, message_rounds: int, seed: int) -> JointPPOConfig:
    config = config_of(world_of(MECHANISM, "open", grid=GRIDS[agents], num_agents=agents), MECHANISM, seed, 10**6)
    config.env_runners(num_envs_per_env_runner=ENVS).rl_module(model_config=MODEL | {"message_rounds": message_rounds})
    return config.training(train_batch_size_per_learner=ENVS * STEPS, minibatch_size=MINIBATCH, num_epochs=EPOCHS)


def measure(rounds: int, seed: int) -> list[Row]:
    """All sides run in turn in one process."""
    with ExitStack() as stack:
        watches = {
            (agents, told): Stopwatch(stack.enter_context(trainer(config_for(agents, told, seed))), time.perf_counter)
            for agents in GRIDS
            for told in MESSAGE_ROUNDS
        }
        taken = take_turns({side: watch.iteration for side, watch in watches.items()}, WARMUP, rounds)
    rows: list[Row] = []
    for (agents, told), seconds in taken.items():
        row: Row = {"agents": agents, "grid": GRIDS[agents], "message_rounds": told, "rounds": rounds, "seed": seed}
        row |= {"envs": ENVS, "steps": STEPS, "minibatch_size": MINIBATCH, "num_epochs": EPOCHS}
        for phase in PHASES:
            each = [1e6 * found[phase] / (ENVS * STEPS * agents) for found in seconds]
            row |= {f"{phase}_{name}": value for name, value in summary(each).items()}
        rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("agents", "grid", "message rounds", *(f"{phase} µs" for phase in PHASES), "agent-steps/s"))
    for row in rows:
        times = [f"{number(row, phase, 'median'):.1f} ({_range(row, phase)})" for phase in PHASES]
        per_second = f"{1e6 / number(row, 'iteration', 'median'):,.0f}"
        table.add_row(row["agents"], row["grid"], row["message_rounds"], *times, per_second)
    about = f"per agent and step, medians (minimum to maximum); {ENVS} environments × {STEPS} steps, {EPOCHS} epochs"
    console.print(table, f"{about}, minibatches of {MINIBATCH} joint rows")
    return True


def number(row: Row, phase: str, name: str) -> float:
    return float(row[f"{phase}_{name}"])


def _range(row: Row, phase: str) -> str:
    return f"{number(row, phase, 'min'):.1f} to {number(row, phase, 'max'):.1f}"


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Messages: time per agent and step", 9, 4)
    all_axes: Any = figure.subplots(1, 2)
    for axes, phase in zip(all_axes, ("sampling", "learner"), strict=True):
        panel(axes, "sampling" if phase == "sampling" else "update", "µs per agent and step")
        for place, ((rounds,), mine) in enumerate(grouped(rows, "message_rounds").items()):
            drawn = [{name: number(row, phase, name) for name in ("median", "min", "max")} for row in mine]
            places = [x + 0.4 * place - 0.2 for x in range(len(mine))]
            draw_columns(axes, places, drawn, 0.38, f"{rounds} rounds of messages")
            axes.set_xticks(range(len(mine)), [f"N = {row['agents']}" for row in mine])
    all_axes[0].legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(SCRIPT, "messages", ("agents", "message_rounds", "seed"), measure, show, draw)
