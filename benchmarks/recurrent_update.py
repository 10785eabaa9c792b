"""What does a memory cost in training? Seconds of a recurrent policy's update divided by those of an MLP's.

    python benchmarks/recurrent_update.py                          # LSTM and GRU, sequences of 20 and whole rollouts
    python benchmarks/recurrent_update.py --agents 16 --rounds 9
    python benchmarks/recurrent_update.py --clock cpu              # on a busy machine

Takes about a minute. Bar: an LSTM takes at most 4 times the MLP's seconds in the median. The GRU has none: on the CPU
torch runs its LSTM as one call of oneDNN's, and its GRU step by step.

An update is `JointPPOLearner.update`: values, advantages, 4 epochs of minibatches of 256. All sides train on the same
rows, 128 steps of 16 environments in which the MLP acted; recurrent ones are also told where sequences begin, and get
their initial states as those that enter them. The MLP is 2 × 64 with a shared trunk, the others have a cell of 64
behind it. Sequences of 20 do not fill a minibatch of 256: they take 36 gradient steps, the other sides 32.

All sides run in this process and take turns, a ratio is made within a round; who goes first changes from round to
round, and the first `--warmup` rounds are thrown away.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from common.drifting_team import BATCH, EPOCHS, MINIBATCH, DriftingTeamVector, joint_ppo
from common.results import Row, draw_bar, draw_columns, new_figure, panel, parse, parser, save, summary, text
from common.rounds import CLOCKS, Seconds, console, run_script, start_quietly, take_turns
from common.tasks import new_table
from matplotlib.figure import Figure
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.rl_modules.memory import MemoryLayout

NAME = "recurrent_update"
BAR, BARRED = 4.0, "lstm"
CASE = ("agents", "envs", "cell", "max_seq_len", "clock")
RATIO = "times the MLP's"
WHOLE = "whole rollout"
MLP = ("mlp", "")
SIDES = {
    MLP: None,
    **{
        (cell, str(length or WHOLE)): {
            "cell": cell, "cell_size": 64, "fcnet_hiddens": [64, 64], "max_seq_len": length,
        }
        for cell in ("lstm", "gru")
        for length in (20, None)
    },
}  # fmt: skip


def rollout_for(algo: Algorithm, batch: JointBatch) -> JointBatch:
    """The batch with sequences and states, where the modules have a memory."""
    modules = {m: algo.get_module(m) for m in batch.modules}
    memories = {m: MemoryLayout.of(module) for m, module in modules.items()}
    if None in memories.values():
        return batch
    length = next(iter(modules.values())).max_seq_len or batch.num_steps
    starts = np.arange(0, batch.num_steps, length)[:, None] * batch.num_envs + np.arange(batch.num_envs)

    def with_states(module_id: str) -> Any:
        streams, memory = batch.modules[module_id], memories[module_id]
        states = np.broadcast_to(memory.initial, (len(streams.agents), starts.size, memory.size)).copy()
        return dataclasses.replace(streams, state_in=states)

    return dataclasses.replace(
        batch, modules={m: with_states(m) for m in batch.modules}, sequence_rows=starts.ravel()
    ).check()


class Side:
    """Updates of one kind of policy on one batch, and what the last one did."""

    def __init__(self, algo: Algorithm, batch: JointBatch, clock: str) -> None:
        self.learner_group, self.clock = algo.learner_group, CLOCKS[clock]
        self.batch = rollout_for(algo, batch)
        self.work: dict[str, float] = {}

    def update(self) -> Seconds:
        before = self.clock()
        (results,) = self.learner_group.update_from_rollouts(
            [[self.batch]],
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: len(self.batch)},
            num_epochs=EPOCHS,
            minibatch_size=MINIBATCH,
        )
        seconds = self.clock() - before
        learned = results["__all_modules__"]
        self.work = {key: learned[key].peek() for key in ("num_minibatch_steps", "num_env_steps_trained")}
        return {"update": seconds}


def measure(args: argparse.Namespace) -> tuple[dict[tuple[str, str], list[Seconds]], dict[tuple[str, str], Side]]:
    """Seconds and sides by (cell, max_seq_len)."""
    algos = {
        name: joint_ppo(DriftingTeamVector, args.agents, args.envs, args.seed, model_config=model)
        for name, model in SIDES.items()
    }
    (batch,) = algos[MLP].env_runner.sample(num_timesteps=BATCH)
    sides = {name: Side(algo, batch, args.clock) for name, algo in algos.items()}
    measured = take_turns({name: side.update for name, side in sides.items()}, args.warmup, args.rounds)
    for algo in algos.values():
        algo.stop()
    for name, side in sides.items():
        trained = side.work["num_env_steps_trained"]
        assert trained == EPOCHS * len(batch), f"{name} trained on {trained} rows; needed {EPOCHS} times {len(batch)}"
    return measured, sides


def rows_of(
    args: argparse.Namespace, measured: dict[tuple[str, str], list[Seconds]], sides: dict[tuple[str, str], Side]
) -> list[Row]:
    rows: list[Row] = []
    mlp = measured[MLP]
    for (cell, length), rounds in measured.items():
        case = {"agents": args.agents, "envs": args.envs, "cell": cell, "max_seq_len": length}

        def add(quantity: str, unit: str, values: Sequence[float], case: Row = case) -> None:
            rows.append({**case, "quantity": quantity, "unit": unit} | summary(values))

        add("update", "s", [seconds["update"] for seconds in rounds])
        add("gradient steps", "per update", [sides[cell, length].work["num_minibatch_steps"]])
        if (cell, length) != MLP:
            add("update", RATIO, [a["update"] / b["update"] for a, b in zip(rounds, mlp, strict=True)])
    return rows


def draw(rows: list[Row]) -> Figure:
    """The ratios, a group of columns for each team and clock of the file."""
    ratios = [row for row in rows if row["unit"] == RATIO]
    cases = list(dict.fromkeys((row["agents"], row["envs"], row["clock"]) for row in ratios))
    figure = new_figure("Update of a recurrent policy against an MLP's", 5.0 + 2.4 * len(cases), 4.6)
    axes = figure.add_subplot()
    panel(axes, "Median, minimum and maximum of the rounds", "seconds / seconds of the MLP's update")
    for k, (cell, length) in enumerate(name for name in SIDES if name != MLP):
        mine = [row for row in ratios if (row["cell"], row["max_seq_len"]) == (cell, length)]
        places = [cases.index((row["agents"], row["envs"], row["clock"])) + 0.2 * (k - 1.5) for row in mine]
        draw_columns(axes, places, mine, 0.18, f"{cell}, {length}")
    draw_bar(axes, BAR, f"bar, {BAR:g}")
    axes.set_xticks(
        range(len(cases)), [f"agents {agents}, envs {envs}\n{clock} clock" for agents, envs, clock in cases]
    )
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def show(rows: list[Row], args: argparse.Namespace) -> bool:
    """Prints the figures; whether the bar is met."""
    table = new_table(["cell", "max_seq_len", "gradient steps", "update", RATIO, f"bar: <= {BAR:g}"])
    found = {(row["cell"], row["max_seq_len"], row["unit"]): row for row in rows}
    met = True
    for cell, length in SIDES:
        seconds, steps, ratio = (found.get((cell, length, unit)) for unit in ("s", "per update", RATIO))
        passed = cell != BARRED or ratio["median"] <= BAR
        met &= passed
        bar = "" if cell != BARRED else "met" if passed else "missed"
        table.add_row(cell, length, text(steps), text(seconds, " s"), "" if ratio is None else text(ratio), bar)
    console.print(f"{args.agents} agents, {args.envs} environments, {args.clock} clock: median (min to max)")
    console.print(table)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=9, warmup=2)
    options.add_argument("--agents", type=int, default=4)
    options.add_argument("--envs", type=int, default=16)
    args = parse(options, argv, agents=2)
    start_quietly()
    rows = rows_of(args, *measure(args))
    save(NAME, rows, args, CASE, draw)
    met = show(rows, args)
    return 0 if met or args.smoke else 1


if __name__ == "__main__":
    run_script(main)
