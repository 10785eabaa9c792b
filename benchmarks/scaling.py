"""Does the cost of an agent's step grow with the size of the team? JointPPO from 2 to 64 agents.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --agents 2 64 --envs 16 --policies shared --rounds 9
    python benchmarks/scaling.py --clock cpu            # on a busy machine

Takes about 3 minutes. Bars, for the iteration, in the median: the time per agent-step at the largest team divided by
that at the smallest is at most 1.0 where all agents share a module, and below 1.2 where each has its own.

A size is a number of agents, a number of environments in the one runner, and who has which module. An agent-step is
one step of one agent: an iteration has T · E · N of them, T · E = 2048 joint rows whatever the size, so that the
gradient steps (4 epochs of minibatches of 256 joint rows) are equally many. Seconds of sampling, of the learner and of
the whole iteration are divided by T · E · N. All sizes live in this process; each runs one iteration per round, so that
whatever else the machine does hits all alike, and growth is a ratio within a round.

The environment is `DriftingTeamVector`: all environments in one call, Box(16), Discrete(5), episodes of 100.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import itertools
import math
from collections.abc import Sequence

from common.drifting_team import BATCH, DriftingTeamVector, joint_ppo
from common.results import Row, draw_bar, draw_columns, new_figure, panel, parse, parser, save, spread, summary, text
from common.rounds import CLOCKS, PHASES, Seconds, Stopwatch, console, run_script, start_quietly, take_turns
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, ScalarFormatter
from rich.progress import track
from rich.table import Table

NAME = "scaling"
BARS = {"shared": 1.0, "per_agent": 1.2}
TITLES = {"shared": "One module for all agents", "per_agent": "A module for each agent"}
CASE = ("policies", "envs", "agents", "clock")
MICROSECONDS = "µs per agent-step"
GROWTH = "times the smallest team"
Size = tuple[str, int, int]


def measure(sizes: Sequence[Size], seed: int, clock: str, warmup: int, rounds: int) -> dict[Size, list[Seconds]]:
    """Seconds per agent-step {size: [one dict per round]}."""
    stopwatches = {}
    for policies, envs, agents in track(sizes, "building", console=console, transient=True):
        algo = joint_ppo(DriftingTeamVector, agents, envs, seed, policies)
        stopwatches[policies, envs, agents] = Stopwatch(algo, CLOCKS[clock])
    measured = take_turns({size: stopwatch.iteration for size, stopwatch in stopwatches.items()}, warmup, rounds)
    for stopwatch in stopwatches.values():
        stopwatch.algo.stop()
    result = {}
    for (policies, envs, agents), found in measured.items():
        agent_steps = math.ceil(BATCH / envs) * envs * agents
        result[policies, envs, agents] = [{p: s / agent_steps for p, s in seconds.items()} for seconds in found]
    return result


def rows_of(measured: dict[Size, list[Seconds]]) -> list[Row]:
    rows: list[Row] = []
    for (policies, envs, agents), found in measured.items():
        smallest = measured[policies, envs, min(n for p, e, n in measured if (p, e) == (policies, envs))]
        for phase in PHASES:
            size = {"policies": policies, "envs": envs, "agents": agents, "quantity": phase}
            rows.append(size | {"unit": MICROSECONDS} | summary([1e6 * seconds[phase] for seconds in found]))
            if found is not smallest:
                growth = [mine[phase] / first[phase] for mine, first in zip(found, smallest, strict=True)]
                rows.append(size | {"unit": GROWTH} | summary(growth))
    return rows


def draw(rows: list[Row]) -> Figure:
    """Above the iteration's time per agent-step over the number of agents, below the growth of each phase."""
    rows = [row | {"envs": int(row["envs"]), "agents": int(row["agents"])} for row in rows]
    envs = sorted({row["envs"] for row in rows})
    figure = new_figure("Time per agent-step of JointPPO, by size of the team", 10.5, 7.4)
    axes = figure.subplots(2, 2, sharey="row")
    for column, policies in enumerate(BARS):
        above, below = axes[:, column]
        panel(above, TITLES[policies], f"iteration, {MICROSECONDS}")
        panel(below, f"Growth; dashed: bar of the iteration, {BARS[policies]}", "largest team / smallest")
        mine = [row for row in rows if row["policies"] == policies]
        for k, num_envs in enumerate(envs):
            line = [r for r in mine if (r["envs"], r["unit"], r["quantity"]) == (num_envs, MICROSECONDS, "iteration")]
            line.sort(key=lambda row: row["agents"])
            x, y = [row["agents"] for row in line], [row["median"] for row in line]
            above.errorbar(x, y, yerr=spread(line), marker="o", capsize=3, label=f"{num_envs}")
            growths = {r["quantity"]: r for r in growth_rows(mine) if r["envs"] == num_envs}
            places = [p + 0.8 * (k - (len(envs) - 1) / 2) / len(envs) for p in range(len(PHASES))]
            if growths:
                draw_columns(below, places, [growths[phase] for phase in PHASES], 0.75 / len(envs))
        agents = sorted({row["agents"] for row in rows})
        above.set_xscale("log", base=2)
        above.set_yscale("log")
        above.set_xlabel("agents", fontsize=9)
        above.xaxis.set_major_locator(FixedLocator(agents))
        above.xaxis.set_minor_locator(NullLocator())
        above.xaxis.set_major_formatter(ScalarFormatter())
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_minor_locator(NullLocator())
        above.yaxis.set_major_formatter(ScalarFormatter())
        draw_bar(below, BARS[policies])
        below.set_xticks(range(len(PHASES)), PHASES)
    axes[0, 0].legend(title="environments", frameon=False, fontsize=8.5, title_fontsize=8.5)
    clocks = ", ".join(sorted({row["clock"] for row in rows}))
    figure.supxlabel(f"Median, minimum and maximum of the rounds, {clocks} clock.", fontsize=8.5, color="0.35")
    return figure


def growth_rows(rows: Sequence[Row]) -> list[Row]:
    """The growth at the largest team, for each number of environments."""
    growth = [row for row in rows if row["unit"] == GROWTH]
    largest = max((int(row["agents"]) for row in growth), default=0)
    return [row for row in growth if int(row["agents"]) == largest]


def show(rows: list[Row], clock: str) -> bool:
    """Prints the figures; whether the bars are met."""
    table = Table(title=f"{MICROSECONDS}, {clock} clock: median (min to max)")
    for column in ("policies", "environments", "agents", *PHASES):
        table.add_column(column, justify="left" if column == "policies" else "right")
    sizes = list(dict.fromkeys((row["policies"], row["envs"], row["agents"]) for row in rows))
    found = {(row["policies"], row["envs"], row["agents"], row["quantity"], row["unit"]): row for row in rows}
    for number, size in enumerate(sizes):
        section = number + 1 == len(sizes) or sizes[number + 1][:2] != size[:2]
        cells = [text(found[(*size, phase, MICROSECONDS)]) for phase in PHASES]
        table.add_row(*map(str, size), *cells, end_section=section)
    console.print(table)

    growth = Table(title=f"growth: time per agent-step, {GROWTH}")
    for column in ("policies", "environments", "agents", *PHASES, "bar of the iteration"):
        growth.add_column(column, justify="left" if column == "policies" else "right")
    met = True
    for row in growth_rows(rows):
        if row["quantity"] == "iteration":
            size = row["policies"], row["envs"], row["agents"]
            shared = row["policies"] == "shared"
            passed = row["median"] <= BARS["shared"] if shared else row["median"] < BARS["per_agent"]
            met &= passed
            bar = f"{'<=' if shared else '<'} {BARS[row['policies']]}: {'met' if passed else 'missed'}"
            growth.add_row(*map(str, size), *(text(found[(*size, phase, GROWTH)]) for phase in PHASES), bar)
    console.print(growth)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=5, warmup=1)
    options.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    options.add_argument("--envs", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--policies", choices=BARS, nargs="+", default=list(BARS))
    args = parse(options, argv, agents=[2, 4], envs=[16])
    start_quietly()
    sizes = list(itertools.product(args.policies, args.envs, sorted(args.agents)))
    rows = rows_of(measure(sizes, args.seed, args.clock, args.warmup, args.rounds))
    save(NAME, rows, args, CASE, draw)
    met = show(rows, args.clock)
    return 0 if met or args.smoke else 1


if __name__ == "__main__":
    run_script(main)
