"""Stock RLlib PPO against JointPPO on the same environment: seconds per iteration, for sampling and for learning.

    python benchmarks/compare_rllib.py                      # 4 agents, 16 environments, the table below
    python benchmarks/compare_rllib.py --envs 1 --rounds 5
    python benchmarks/compare_rllib.py --agents 16 --vectorized --memory
    python benchmarks/compare_rllib.py --cell lstm          # policies with a memory; bar: iteration >= 4 x

Takes about 20 seconds (16 agents or 1 environment: a minute).

Both sides run in this process and take turns, so that whatever else the machine does hits both: a round is one
training iteration of each side (who goes first changes from round to round), a ratio is made within a round. The
first `--warmup` rounds are thrown away.

Equal on both sides: the class `DriftingTeam` (one object per environment, stepped one after another), spaces Box(16)
and Discrete(5), episodes of 100, one module of 2 × 64 tanh with a shared trunk per agent, one local runner, 2048 steps
per iteration, 4 epochs of minibatches of 256, the PPO constants, no KL loss, RLlib's environment checks, metrics and
statistics, one torch thread. What is left differs on purpose: the stock learner takes 1 to 4 more minibatches per
iteration (it keeps the artificial last row of each episode), JointPPO normalises value targets (its default).

`--cell lstm`: an LSTM of 64 behind the 2 × 64 on both sides, its output read by both heads; training sequences of 20
steps, each begun with the state that the rollout had there. RLlib ends a sequence with its episode, pads each to 20
steps, and puts as many into a minibatch as hold 256 steps at their mean length; JointPPO goes on behind an episode's
end with a fresh state, and takes as many whole sequences as fit into 256 steps. An iteration then takes 35 gradient
steps there and 36 here (the table's "gradient steps").

`--vectorized` adds a third side: JointPPO on `DriftingTeamVector`, the same rules as a `VectorJointEnv`. `--episodes`
adds JointPPO on `DriftingTeam` with `sampling="episodes"`: RLlib's loop, episodes and connectors.

Timers are put around the same `log_time` sections of both `training_step`s; "iteration" is all of `Algorithm.train`. On
a busy machine `--clock cpu` takes this process's CPU seconds instead of the wall's. Memory (`--memory`) is the peak
resident set of a fresh process per side, imports included. The plot shows all cases of the CSV file.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.drifting_team import DriftingTeam, DriftingTeamVector, build, joint_ppo
from common.results import Row, draw_bar, draw_columns, new_figure, panel, parse, parser, save, summary, text
from common.rounds import CLOCKS, PHASES, Seconds, Stopwatch, console, run_script, start_quietly, take_turns
from matplotlib.figure import Figure
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from rich.table import Table

NAME = "compare_rllib"
CASE = ("agents", "envs", "cell", "side", "clock")
RATIO = "times faster than stock"
STEPS = "per iteration"
UNITS = {"s": " s", "MB": " MB", STEPS: ""}  # of what is not a ratio, and how it is written

# --- the sides --------------------------------------------------------------------------------------------------------

STOCK_MODELS = {
    "mlp": DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True),
    "lstm": DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True, use_lstm=True, lstm_cell_size=64,
        max_seq_len=20,
    ),
}  # fmt: skip
JOINT_MODELS: dict[str, dict[str, Any] | None] = {
    "mlp": None,
    "lstm": {"cell": "lstm", "cell_size": 64, "fcnet_hiddens": [64, 64], "max_seq_len": 20},
}


def stock(args: argparse.Namespace) -> Algorithm:
    agents = [f"agent_{i}" for i in range(args.agents)]
    config = (
        PPOConfig()
        .multi_agent(policies=set(agents), policy_mapping_fn=lambda agent, episode, **kwargs: agent)
        .rl_module(model_config=STOCK_MODELS[args.cell])
        .training(vf_clip_param=float("inf"))
    )
    return build(config, DriftingTeam, args.agents, args.envs, args.seed)


def joint(args: argparse.Namespace, env: type = DriftingTeam, sampling: str = "auto") -> Algorithm:
    model = JOINT_MODELS[args.cell]
    return joint_ppo(env, args.agents, args.envs, args.seed, sampling=sampling, model_config=model)


SIDES: dict[str, Callable[[argparse.Namespace], Algorithm]] = {
    "stock": stock,
    "joint": joint,
    "vectorized": partial(joint, env=DriftingTeamVector),
    "episodes": partial(joint, sampling="episodes"),
}


def names_of(args: argparse.Namespace) -> list[str]:
    return ["stock", "joint", *[name for name in ("vectorized", "episodes") if getattr(args, name)]]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> tuple[dict[str, list[Seconds]], dict[str, float]]:
    """Seconds {side: [one dict per round]}, and {side: gradient steps of the last round}."""
    stopwatches = {name: Stopwatch(SIDES[name](args), CLOCKS[args.clock]) for name in names_of(args)}
    sides = {name: stopwatch.iteration for name, stopwatch in stopwatches.items()}
    measured = take_turns(sides, args.warmup, args.rounds)
    for stopwatch in stopwatches.values():
        stopwatch.algo.stop()
    return measured, {name: gradient_steps(stopwatch.result) for name, stopwatch in stopwatches.items()}


def gradient_steps(result: dict[str, Any]) -> float:
    """Of one iteration. RLlib counts all steps of the rollout anew in each of its minibatches."""
    learned, sampled = result["learners"]["__all_modules__"], result["env_runners"]["num_env_steps_sampled"]
    return float(learned.get("num_minibatch_steps", learned["num_env_steps_trained"] / sampled))


def peak_memory(args: argparse.Namespace) -> dict[str, float]:
    """Peak resident set in MB of one fresh process per side."""
    peaks = {}
    for name in names_of(args):
        command = [sys.executable, __file__, "--side", name, "--rounds", str(args.rounds), "--seed", str(args.seed)]
        command += ["--agents", str(args.agents), "--envs", str(args.envs), "--cell", args.cell]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = float(done.stdout.split()[-1])
    return peaks


def run_one_side(args: argparse.Namespace) -> None:
    """What `--side` does: train, then print the peak resident set in MB."""
    algo = SIDES[args.side](args)
    for _ in range(args.warmup + args.rounds):
        algo.train()
    # VmHWM and not getrusage, whose maximum a child takes over from the process that started it.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


# --- reporting --------------------------------------------------------------------------------------------------------


def rows_of(
    args: argparse.Namespace, rounds: dict[str, list[Seconds]], steps: dict[str, float], memory: dict[str, float]
) -> list[Row]:
    rows: list[Row] = []

    def add(side: str, quantity: str, unit: str, values: Sequence[float]) -> None:
        case = {"agents": args.agents, "envs": args.envs, "cell": args.cell, "side": side}
        rows.append(case | {"quantity": quantity, "unit": unit} | summary(values))

    for side, measured in rounds.items():
        for phase in PHASES:
            add(side, phase, "s", [seconds[phase] for seconds in measured])
            if side != "stock":
                pairs = zip(rounds["stock"], measured, strict=True)
                add(side, phase, RATIO, [a[phase] / b[phase] for a, b in pairs])
        add(side, "gradient steps", STEPS, [steps[side]])
    for side, peak in memory.items():
        add(side, "peak memory", "MB", [peak])
        if side != "stock":
            add(side, "peak memory", "times stock", [peak / memory["stock"]])
    return rows


def draw(rows: list[Row]) -> Figure:
    """How many times faster each phase is, a group of columns for each case."""
    ratios = [row for row in rows if row["unit"] == RATIO]
    cases = list(dict.fromkeys(tuple(str(row[key]) for key in CASE) for row in ratios))
    figure = new_figure("JointPPO against RLlib's PPO", 4.5 + 1.5 * len(cases), 4.6)
    axes = figure.add_subplot()
    panel(axes, "Median, minimum and maximum of the rounds", "times faster than RLlib's PPO")
    for k, phase in enumerate(PHASES):
        mine = [row for row in ratios if row["quantity"] == phase]
        places = [cases.index(tuple(str(row[key]) for key in CASE)) + 0.27 * (k - 1) for row in mine]
        draw_columns(axes, places, mine, 0.25, phase)
    draw_bar(axes, 1.0, "as fast as RLlib's PPO")
    kinds = {"joint": "MultiAgentEnv", "vectorized": "VectorJointEnv", "episodes": "by episodes"}
    labels = [
        f"agents {agents}, envs {envs}, {cell}\n{kinds[side]}, {clock} clock"
        for agents, envs, cell, side, clock in cases
    ]
    axes.set_xticks(range(len(cases)), labels)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def show(rows: list[Row], args: argparse.Namespace) -> None:
    title = f"{args.agents} agents, {args.envs} environments, {args.cell}, {args.clock} clock: median (min to max)"
    table = Table(title=title)
    for column in ("side", "quantity", "value", "against stock"):
        table.add_column(column, justify="left" if column in ("side", "quantity") else "right")
    ratios = {(row["side"], row["quantity"]): row for row in rows if "stock" in row["unit"]}
    for row in rows:
        if row["unit"] in UNITS:
            ratio = ratios.get((row["side"], row["quantity"]))
            against = "" if ratio is None else text(ratio, "x" if ratio["unit"] == RATIO else "")
            table.add_row(row["side"], row["quantity"], text(row, UNITS[row["unit"]]), against)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=9, warmup=2)
    options.add_argument("--agents", type=int, default=4)
    options.add_argument("--envs", type=int, default=16, help="environments in the one runner")
    options.add_argument("--cell", choices=JOINT_MODELS, default="mlp", help="lstm: policies with a memory")
    options.add_argument("--vectorized", action="store_true", help="add JointPPO on the vectorised environment")
    options.add_argument("--episodes", action="store_true", help="add JointPPO sampling by RLlib's episodes")
    options.add_argument("--memory", action="store_true", help="also measure the peak memory, in one process per side")
    options.add_argument("--side", choices=SIDES, help="train this side only and print its peak memory in MB")
    args = parse(options, argv, agents=2)
    start_quietly()
    if args.side:
        run_one_side(args)
        return 0
    rows = rows_of(args, *measure(args), peak_memory(args) if args.memory else {})
    save(NAME, rows, args, CASE, draw)
    show(rows, args)
    return 0


if __name__ == "__main__":
    run_script(main)
