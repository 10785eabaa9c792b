"""Training tasks that are held against a bar: which runs are asked for, their training, and their table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from rich.table import Table

EVALUATION_SEED = 1_000_000  # far from the seeds of training
CURVE_EVERY = 10  # iterations


@dataclass(frozen=True)
class Task:
    """An environment, the steps to train on it, the score to reach, and the seeds to reach it with."""

    env: str
    steps: int
    bar: float
    seeds: tuple[int, ...]


def task_parser(doc: str | None, tasks: Mapping[str, Task]) -> argparse.ArgumentParser:
    """A parser with the options that choose runs."""

    def known(name: str) -> str:
        if name not in tasks:
            raise argparse.ArgumentTypeError(f"unknown task {name!r}; there are {', '.join(tasks)}")
        return name

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", type=known, help=f"of {', '.join(tasks)}; none means all")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the table's")
    return parser


def chosen_runs(args: argparse.Namespace, tasks: Mapping[str, Task]) -> list[tuple[str, int]]:
    """(name of a task, seed) of each run that is asked for."""
    return [(name, seed) for name in args.tasks or tasks for seed in args.seeds or tasks[name].seeds]


def train(algo: Algorithm, steps: int) -> Iterator[tuple[dict[str, Any], int, float]]:
    """Trains as many whole batches as fit into that number of environment steps.

    Yields:
        After each iteration the metrics of its env runners, the steps so far, and the seconds of training so far.
    """
    env_steps, seconds = 0, 0.0
    while env_steps + algo.config.total_train_batch_size <= steps:
        before = time.perf_counter()
        found = algo.train()["env_runners"]
        seconds += time.perf_counter() - before
        env_steps = int(found["num_env_steps_sampled_lifetime"])
        yield found, env_steps, seconds


def curve_as_text(points: Iterable[tuple[int, float]]) -> str:
    """`steps:score` of each point."""
    return " ".join(f"{steps}:{score:.4g}" for steps, score in points)


def new_table(columns: Sequence[str]) -> Table:
    """An empty table: names to the left and on one line, numbers to the right."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == "task" else "right", no_wrap=column == "task")
    return table
