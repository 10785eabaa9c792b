"""What does the redundancy penalty do to a team that learns? Weights 0 to 3 on the bucket brigade.

    python benchmarks/redundancy.py --jobs 2                # the table below, 20 runs
    python benchmarks/redundancy.py --weights 1 --seeds 0   # one run
    python benchmarks/redundancy.py --weights 0 10          # two weights, all seeds

`minimal_specialization` (four agents, a network each), 200,000 steps, `thrust_rllib.recipes.recipe` and nothing else,
exactly as in `benchmarks/learning.py`, with `RedundancyPenalty` at the weights 0, 0.1, 1 and 3, seeds 0 to 4.

Takes about 8 minutes with --jobs 2; a run is a process with one torch thread. Measured with the last weights:

| column         | what                                                                                             |
|----------------|--------------------------------------------------------------------------------------------------|
| gap            | gap closed between the random and the specialist policy, greedy, 1,000 episodes (`learning.py`)  |
| sampled        | the same with actions drawn as in training                                                       |
| correlation    | mean squared cross-correlation of the agents' features, ||corr||²_F / (D·D), mean over pairs     |
| own            | the same of an agent's features with themselves: 1/D if all differ, 1 if all say the same        |
| feature_std    | mean standard deviation of a feature: 0 if the features have died                                |
| lost           | team reward per step that is lost when one agent acts uniformly at random, mean over who it is   |
| lost_share     | `lost` as a share of specialist - random                                                         |

Features are those of 8,192 fresh joint rows, actions sampled; independent features have a correlation of 1/8192.
`lost` compares greedy play of the same 1,000 episodes with and without the replacement.

Bar: at some weight above 0, on at least four of five seeds, the correlation is at most a third of the same seed's at
weight 0 and the gap closed is at least 0.9.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from common.results import RESULTS, Row, command, draw_bar, new_figure, panel, read
from common.rounds import console, run_script, start_quietly
from common.runs import add_rows, as_text, mean_and_error, plus_minus, run_each, versions
from common.tasks import EVALUATION_SEED, new_table, train
from learning import TASKS, Scale, config_of
from matplotlib.figure import Figure

from thrust_rllib.evaluation import play_episodes
from thrust_rllib.team_features import feature_correlation, fresh_features, mean_squared_correlation

NAME = "redundancy"
CASE = ("weight", "env_steps", "seed")
TASK = TASKS["minimal_specialization"]
WEIGHTS, SEEDS = (0.0, 0.1, 1.0, 3.0), (0, 1, 2, 3, 4)
EPISODES, ROWS = 1000, 8192
GAP_BAR, CORRELATION_BAR, SEEDS_BAR = 0.9, 1 / 3, 4 / 5
PANELS = {
    "gap": ("Gap closed", "1 = the specialist policy"),
    "correlation": ("Correlation of the agents' features", "mean square over pairs"),
    "lost_share": ("Lost when one agent acts at random", "share of the gap"),
}


@dataclass
class Outcome:
    """One run; the columns are those of the module docstring."""

    weight: float
    seed: int
    env_steps: int = 0
    gap: float = float("nan")
    gap_standard_error: float = float("nan")
    sampled: float = float("nan")
    correlation: float = float("nan")
    own: float = float("nan")
    feature_std: float = float("nan")
    lost: float = float("nan")
    lost_share: float = float("nan")
    training_seconds: float = 0.0
    seconds: float = 0.0


def study(weight: float, seed: int, steps: int = TASK.steps, episodes: int = EPISODES, rows: int = ROWS) -> Outcome:
    """Trains and measures one run in this process; see the module docstring."""
    start = time.perf_counter()
    scale = Scale(TASK)
    outcome = Outcome(weight, seed)
    algo = config_of(replace(TASK, steps=steps), seed, weight).build_algo()
    try:
        for _, outcome.env_steps, _ in train(algo, steps):
            pass
        outcome.training_seconds = time.perf_counter() - start

        played = play_episodes(algo, episodes, seed=EVALUATION_SEED)
        reward = scale.values(played).mean()
        outcome.gap, outcome.gap_standard_error = mean_and_error(scale.scores(played).tolist())
        outcome.sampled = float(scale.scores(play_episodes(algo, episodes, seed=EVALUATION_SEED, explore=True)).mean())

        features = fresh_features(algo, rows, seed=EVALUATION_SEED)
        outcome.correlation = mean_squared_correlation(features)
        outcome.own = float(feature_correlation(features)[1].diagonal().mean())
        outcome.feature_std = float(np.mean([z.std(axis=0).mean() for z in features.values()]))

        without = [
            scale.values(play_episodes(algo, episodes, seed=EVALUATION_SEED, random_agents=[agent])).mean()
            for agent in played.agents
        ]
        outcome.lost = float(reward - np.mean(without))
        outcome.lost_share = outcome.lost / (scale.specialist - scale.random)
    finally:
        algo.stop()
    outcome.seconds = time.perf_counter() - start
    return outcome


def row_of(outcome: Outcome, steps: int) -> Row:
    arguments = ["--weights", f"{outcome.weight:g}", "--seeds", f"{outcome.seed}"]
    arguments += [] if steps == TASK.steps else ["--steps", f"{steps}"]
    return as_text(asdict(outcome) | versions() | {"command": command(NAME, arguments)})


def by_weight(rows: Sequence[Mapping[str, str]], column: str) -> dict[float, dict[int, float]]:
    """{weight: {seed: number}}, weights in order."""
    found: dict[float, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: float(row["weight"])):
        found.setdefault(float(row["weight"]), {})[int(row["seed"])] = float(row[column])
    return found


def seeds_that_pass(rows: Sequence[Mapping[str, str]]) -> dict[float, tuple[int, int]]:
    """{weight > 0: on how many seeds both parts of the bar are met, of how many that ran at weight 0 as well}."""
    gaps, correlations = by_weight(rows, "gap"), by_weight(rows, "correlation")
    base = correlations.get(0.0, {})
    counts = {}
    for weight, gap in gaps.items():
        seeds = [seed for seed in gap if seed in base]
        if weight > 0 and seeds:
            lower = [correlations[weight][seed] <= CORRELATION_BAR * base[seed] for seed in seeds]
            met = [low and gap[seed] >= GAP_BAR for low, seed in zip(lower, seeds, strict=True)]
            counts[weight] = (sum(met), len(seeds))
    return counts


def show(rows: Sequence[Mapping[str, str]]) -> bool | None:
    """Prints mean ± standard error over seeds of each weight; returns whether the bar is met, None without pairs."""
    passed = seeds_that_pass(rows)
    table = new_table(
        ("weight", "seeds", "gap closed", "sampled", "correlation", "own", "feature std")
        + ("lost per step", "lost, share of gap", "bar met on")
    )
    columns = {"gap": 3, "sampled": 3, "correlation": 4, "own": 3, "feature_std": 3, "lost": 1, "lost_share": 3}
    numbers = {column: by_weight(rows, column) for column in columns}
    for weight in numbers["gap"]:
        cells = [plus_minus(numbers[column][weight].values(), digits) for column, digits in columns.items()]
        met = "" if weight not in passed else "{} of {}".format(*passed[weight])
        table.add_row(f"{weight:g}", str(len(numbers["gap"][weight])), *cells, met)
    console.print(table, "mean ± standard error over seeds")
    return any(met >= SEEDS_BAR * total for met, total in passed.values()) if passed else None


def draw(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Gap, correlation and loss by replacement against the weight; a dot is a seed, the line their mean."""
    figure = new_figure("Redundancy penalty on the bucket brigade (minimal_specialization)", 12, 4)
    for axes, (column, (title, unit)) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        panel(axes, title, unit)
        numbers = by_weight(rows, column)
        places = range(len(numbers))
        means = [float(np.mean(list(seeds.values()))) for seeds in numbers.values()]
        axes.plot(places, means, color="#1f77b4", linewidth=1.8, label="mean")
        for place, seeds in zip(places, numbers.values(), strict=True):
            offsets = np.linspace(-0.12, 0.12, len(seeds)) if len(seeds) > 1 else [0.0]
            label = "one seed" if place == 0 else None
            axes.plot(place + np.array(offsets), list(seeds.values()), "o", color="#ff7f0e", markersize=4, label=label)
        axes.set_xticks(places, [f"{weight:g}" for weight in numbers])
        axes.set_xlabel("weight of the penalty", fontsize=9)
        if column == "correlation":
            axes.set_yscale("log")
            axes.axhline(1 / ROWS, color="grey", linewidth=1, linestyle=":", label="independent features")
            if 0.0 in numbers:
                draw_bar(axes, CORRELATION_BAR * means[0], "a third of weight 0")
        elif column == "gap":
            draw_bar(axes, GAP_BAR, f"bar {GAP_BAR:g}")
        if column != "correlation":
            low, high = axes.get_ylim()
            axes.set_ylim(min(0.0, low), high + 0.1 * abs(high))  # from 0: differences in proportion to the whole
        axes.legend(fontsize=8, loc="best" if column == "correlation" else "lower left")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, nargs="+", default=WEIGHTS, help="coefficients of the penalty")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=TASK.steps, help="environment steps of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, help=f"CSV file; the picture lies beside it (default: results/{NAME}.*)")
    parser.add_argument(
        "--smoke", action="store_true", help="weights 0 and 1, two iterations; saved with --output only"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.weights, args.seeds, args.steps = (0.0, 1.0), (0,), 4096

    runs = [(weight, seed) for weight in args.weights for seed in args.seeds]
    output = args.output or (None if args.smoke else RESULTS / f"{NAME}.csv")
    if args.smoke or len(runs) == 1:
        start_quietly()
        sizes = (20, 512) if args.smoke else (EPISODES, ROWS)
        rows = [row_of(study(*run, args.steps, *sizes), args.steps) for run in runs]
        if output is not None:
            add_rows(output, rows, CASE)
    else:
        arguments = [["--weights", f"{w:g}", "--seeds", f"{s}", "--steps", f"{args.steps}"] for w, s in runs]
        rows = run_each(__file__, arguments, partial(add_rows, output, case=CASE), args.jobs)
    if output is not None:
        # With what the file had: a weight that was added later is seen beside the others.
        rows = [row for row in read(output) if row["env_steps"] == rows[0]["env_steps"]]
    met = show(rows)
    if output is not None and len(rows) > 1:
        draw(rows).savefig(output.with_suffix(".png"))
        console.print(f"written: {output}, {output.with_suffix('.png')}", soft_wrap=True, highlight=False)
    return 1 if met is False and not args.smoke else 0


if __name__ == "__main__":
    run_script(main)
