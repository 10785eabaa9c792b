"""How near is JointPPO to a loop written by hand without Ray? Seconds of the loop divided by those of JointPPO.

    python benchmarks/floor.py                          # 4 agents, 16 environments
    python benchmarks/floor.py --agents 16 --rounds 9
    python benchmarks/floor.py --clock cpu              # on a busy machine

Takes about a minute. Bar: the iteration's ratio is at least 0.7 in the median.

The loop (`benchmarks/common/hand_loop.py`) is PPO in the manner of CleanRL, written for speed with what torch offers:
rollout without gradients, one network and one fused Adam per agent, all losses of the team at once. It has no checks,
no configuration, no metrics per episode. Both sides run in this process and take turns, a ratio is made within a round;
who goes first changes from round to round, and the first `--warmup` rounds are thrown away.

Equal on both sides, and checked while it runs: gradient steps, rows and parameters. Two kinds of environment:
`vector` is `DriftingTeamVector`, all environments in one call; `scalar` is `DriftingTeam`, one object per environment
with dicts by agent, which the loop steps one after another. Box(16), Discrete(5), episodes of 100, 2 × 64 tanh with a
shared trunk, 2048 steps, 4 epochs of minibatches of 256, the same PPO constants, normalised value targets, one thread.

Both must learn meanwhile: the mean reward per step of an agent (0.2 if it acts at random) has to rise.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import math
from collections.abc import Callable, Sequence

from common.drifting_team import BATCH, EPOCHS, LENGTH, MINIBATCH, DriftingTeam, DriftingTeamVector, joint_ppo
from common.hand_loop import HandLoop, PlainTeams
from common.results import Row, draw_bar, draw_columns, new_figure, panel, parse, parser, save, summary, text
from common.rounds import CLOCKS, PHASES, Seconds, Stopwatch, console, run_script, start_quietly, take_turns
from matplotlib.figure import Figure
from rich.table import Table

NAME = "floor"
BAR = 0.7
CASE = ("agents", "envs", "environment", "clock")
ENVIRONMENTS = {"vector": (DriftingTeamVector, DriftingTeamVector), "scalar": (PlainTeams, DriftingTeam)}
RATIO = "of JointPPO's seconds"


class Side:
    """One side of one kind of environment: its rounds, its work and its reward."""

    def __init__(self, iteration: Callable[[], Seconds], work: Callable[[], Row], reward: Callable[[], float]) -> None:
        self._iteration, self._work, self._reward = iteration, work, reward
        self.works: list[Row] = []
        self.rewards: list[float] = []

    def round(self) -> Seconds:
        seconds = self._iteration()
        self.works.append(self._work())
        self.rewards.append(self._reward())
        return seconds


def hand_side(env: type, args: argparse.Namespace) -> Side:
    loop = HandLoop(env(args.envs, args.agents), args.agents, args.envs, args.seed, CLOCKS[args.clock])

    def work() -> Row:
        return {
            "gradient steps": loop.gradient_steps,
            "rows sampled": loop.truncated.size,
            "rows trained": loop.rows_trained,
            "parameters": sum(p.numel() for parameters in loop.parameters for p in parameters),
        }

    return Side(loop.iteration, work, lambda: loop.mean_reward)


def joint_side(env: type, args: argparse.Namespace) -> tuple[Side, Callable[[], None]]:
    algo = joint_ppo(env, args.agents, args.envs, args.seed)
    stopwatch = Stopwatch(algo, CLOCKS[args.clock])
    weights = algo.learner_group.get_weights()
    parameters = sum(array.size for module in weights.values() for array in module.values())

    def work() -> Row:
        learned = stopwatch.result["learners"]["__all_modules__"]
        return {
            "gradient steps": learned["num_minibatch_steps"],
            "rows sampled": stopwatch.result["env_runners"]["num_env_steps_sampled"],
            "rows trained": learned["num_env_steps_trained"],
            "parameters": parameters,
        }

    def reward() -> float:
        # Of the latest finished episodes; none has ended in the first rounds where there are many environments.
        return stopwatch.result["env_runners"].get("episode_return_mean", math.nan) / (LENGTH * args.agents)

    return Side(stopwatch.iteration, work, reward), algo.stop


def measure(args: argparse.Namespace) -> tuple[dict[tuple[str, str], list[Seconds]], dict[tuple[str, str], Side]]:
    """Seconds and sides by (kind of environment, "hand" or "joint")."""
    sides: dict[tuple[str, str], Side] = {}
    stops = []
    for kind, (plain, joint) in ENVIRONMENTS.items():
        sides[kind, "hand"] = hand_side(plain, args)
        sides[kind, "joint"], stop = joint_side(joint, args)
        stops.append(stop)
    measured = take_turns({name: side.round for name, side in sides.items()}, args.warmup, args.rounds)
    for stop in stops:
        stop()
    check_work(sides, args)
    return measured, sides


def check_work(sides: dict[tuple[str, str], Side], args: argparse.Namespace) -> None:
    """Every round of every side did the same amount of work, that of the constants."""
    rows = math.ceil(BATCH / args.envs) * args.envs
    expected = {
        "gradient steps": EPOCHS * math.ceil(rows / MINIBATCH),
        "rows sampled": rows,
        "rows trained": rows * EPOCHS,
        "parameters": sides["vector", "hand"].works[0]["parameters"],
    }
    for name, side in sides.items():
        for work in side.works:
            assert work == expected, f"{name} did {work}; needed {expected}"


def rows_of(
    args: argparse.Namespace, measured: dict[tuple[str, str], list[Seconds]], sides: dict[tuple[str, str], Side]
) -> list[Row]:
    rows: list[Row] = []
    for kind in ENVIRONMENTS:
        case = {"agents": args.agents, "envs": args.envs, "environment": kind}

        def add(side: str, quantity: str, unit: str, values: Sequence[float], case: Row = case) -> None:
            rows.append({**case, "side": side, "quantity": quantity, "unit": unit} | summary(values))

        hand, joint = measured[kind, "hand"], measured[kind, "joint"]
        for phase in PHASES:
            add("hand", phase, "s", [seconds[phase] for seconds in hand])
            add("joint", phase, "s", [seconds[phase] for seconds in joint])
            add("hand", phase, RATIO, [a[phase] / b[phase] for a, b in zip(hand, joint, strict=True)])
        for side in ("hand", "joint"):
            rewards = [reward for reward in sides[kind, side].rewards if not math.isnan(reward)] or [math.nan]
            add(side, "first mean reward", "per step", rewards[:1])
            add(side, "last mean reward", "per step", rewards[-1:])
    return rows


def draw(rows: list[Row]) -> Figure:
    """The ratios of each phase, a group of bars for each case of the file."""
    ratios = [row for row in rows if row["unit"] == RATIO]
    cases = list(dict.fromkeys(tuple(str(row[key]) for key in CASE) for row in ratios))
    figure = new_figure("A loop by hand without Ray against JointPPO", 4.5 + 1.6 * len(cases), 4.6)
    axes = figure.add_subplot()
    panel(axes, "Median, minimum and maximum of the rounds", "seconds by hand / seconds of JointPPO")
    for k, phase in enumerate(PHASES):
        mine = [row for row in ratios if row["quantity"] == phase]
        places = [cases.index(tuple(str(row[key]) for key in CASE)) + 0.27 * (k - 1) for row in mine]
        draw_columns(axes, places, mine, 0.25, phase)
    draw_bar(axes, BAR, f"bar of the iteration, {BAR}")
    labels = [f"agents {agents}, envs {envs}\n{kind}, {clock} clock" for agents, envs, kind, clock in cases]
    axes.set_xticks(range(len(cases)), labels)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def show(rows: list[Row], args: argparse.Namespace) -> bool:
    """Prints the figures; whether the bars are met."""
    table = Table(title=f"{args.agents} agents, {args.envs} environments, {args.clock} clock: median (min to max)")
    for column in ("environment", "quantity", "by hand", "JointPPO", "by hand / JointPPO", "bar"):
        table.add_column(column, justify="left" if column in ("environment", "quantity") else "right")
    found = {(row["environment"], row["quantity"], row["side"], row["unit"]): row for row in rows}
    met = True
    for kind in ENVIRONMENTS:
        for phase in PHASES:
            ratio = found[kind, phase, "hand", RATIO]
            sides = (text(found[kind, phase, side, "s"], " s") for side in ("hand", "joint"))
            passed = ratio["median"] >= BAR
            bar = "" if phase != "iteration" else f">= {BAR}: {'met' if passed else 'missed'}"
            met &= passed or phase != "iteration"
            table.add_row(kind, phase, *sides, text(ratio), bar)
        rewards = []
        for side in ("hand", "joint"):
            first, last = (found[kind, f"{when} mean reward", side, "per step"]["median"] for when in ("first", "last"))
            met &= last > first
            rewards.append(f"{first:.3f} to {last:.3f}")
        table.add_row(kind, "mean reward", *rewards, "", "rises", end_section=True)
    console.print(table)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=25, warmup=3)
    options.add_argument("--agents", type=int, default=4)
    options.add_argument("--envs", type=int, default=16)
    args = parse(options, argv)
    start_quietly()
    rows = rows_of(args, *measure(args))
    save(NAME, rows, args, CASE, draw)
    met = show(rows, args)
    return 0 if met or args.smoke else 1


if __name__ == "__main__":
    run_script(main)
