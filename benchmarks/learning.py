"""Does JointPPO learn? One recipe on four tasks, each measured against a bar that was set beforehand.

    python benchmarks/learning.py                          # all runs of the table below, one after another
    python benchmarks/learning.py cartpole --seeds 0       # one run
    python benchmarks/learning.py rest_trap --redundancy 0 # without the coupling

Takes about 7 minutes; a single run up to one.

| task                   | environment                            | env steps | bar                | seeds   |
|------------------------|----------------------------------------|-----------|--------------------|---------|
| minimal_specialization | bucket_brigade, this scenario          | 200,000   | gap closed >= 0.9  | 0, 1, 2 |
| rest_trap              | bucket_brigade, this scenario          | 200,000   | gap closed >= 0.9  | 0, 1, 2 |
| cartpole               | CartPole-v1, one agent                 | 150,000   | return >= 475      | 0, 1, 2 |
| pendulum               | Pendulum-v1, one agent, Box actions    | 300,000   | return >= -400     | 0       |

All tasks are trained by `thrust_rllib.recipes.recipe` and nothing else; the bucket brigade, where agents can be
coupled, also has `RedundancyPenalty` with a coefficient of 0.1 (`--redundancy`). A run is a process with one torch
thread, and samples as many whole batches of 2048 as fit into the number of steps.

Scores are of the last weights, not of the best. Evaluation plays whole episodes with the mode of the policy ("greedy";
the column "sampled" draws actions as in training): 1,000 of the bucket brigade, 100 of the others. In the bucket
brigade x is the mean over episodes of the episode's mean team reward per step (sum over the agents);
gap closed = (x - random) / (specialist - random), where the uniform and the scripted policy of
`thrust_rllib.envs.calibrate` are measured in the same way over 10,000 episodes each.

"crossed" is the first evaluation at or above the bar (100 greedy episodes with other seeds, every 10 iterations);
"training crossed" the first iteration whose mean over the last 100 episodes of training is.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import csv
import logging
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table

import thrust_rllib
from thrust_rllib import JointPPOConfig, RedundancyPenalty
from thrust_rllib.envs import calibrate, gap_closed
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes
from thrust_rllib.recipes import recipe

RESULTS = Path(__file__).parent / "results" / "learning.csv"
CASE = ("task", "seed", "redundancy")
REDUNDANCY = 0.1
EVALUATE_EVERY = 10  # iterations
CALIBRATION_EPISODES = 10_000
EVALUATION_SEED, CROSSING_SEED = 1_000_000, 2_000_000  # far from the seeds of training


@dataclass(frozen=True)
class Task:
    """A task with its bar; `scenario` is that of the bucket brigade, None elsewhere."""

    env: str
    steps: int
    bar: float
    seeds: tuple[int, ...]
    scenario: str | None = None

    @property
    def env_config(self) -> dict[str, Any]:
        return {} if self.scenario is None else {"scenario": self.scenario}

    @property
    def episodes(self) -> int:
        return 100 if self.scenario is None else 1000


TASKS = {
    "minimal_specialization": Task("bucket_brigade", 200_000, 0.9, (0, 1, 2), "minimal_specialization"),
    "rest_trap": Task("bucket_brigade", 200_000, 0.9, (0, 1, 2), "rest_trap"),
    "cartpole": Task("CartPole-v1", 150_000, 475.0, (0, 1, 2)),
    "pendulum": Task("Pendulum-v1", 300_000, -400.0, (0,)),
}


@dataclass
class Outcome:
    """One run. score: gap closed, or return; value: what it was made of; standard_error: of score."""

    task: str
    seed: int
    redundancy: float
    env_steps: int = 0
    score: float = float("nan")
    standard_error: float = float("nan")
    bar: float = float("nan")
    passed: bool = False
    sampled: float = float("nan")
    value: float = float("nan")
    random: float | None = None
    specialist: float | None = None
    crossed: int | None = None
    training_crossed: int | None = None
    training_seconds: float = 0.0
    seconds: float = 0.0
    scores: list[tuple[int, float]] = field(default_factory=list)


class Scale:
    """From episodes to scores: the gap closed in the bucket brigade, the return elsewhere."""

    def __init__(self, task: Task) -> None:
        self.random = self.specialist = None
        if task.scenario is not None:
            self.random, self.specialist = (
                calibrate(task.scenario, policy, CALIBRATION_EPISODES, seed=EVALUATION_SEED).mean
                for policy in ("random", "specialist")
            )

    def values(self, played: PlayedEpisodes) -> np.ndarray:
        return played.team_returns if self.random is None else played.team_reward_per_step

    def scores(self, played: PlayedEpisodes) -> np.ndarray:
        values = self.values(played)
        if self.random is None or self.specialist is None:
            return values
        return gap_closed(values, self.random, self.specialist)


def config_of(task: Task, seed: int, redundancy: float) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=task.steps)
    config.environment(task.env, env_config=task.env_config).debugging(seed=seed)
    if task.scenario is not None and redundancy:
        config.training(
            cross_agent_losses={"redundancy": RedundancyPenalty()}, cross_agent_coeffs={"redundancy": redundancy}
        )
    return config


def learn(name: str, seed: int, redundancy: float = REDUNDANCY, steps: int | None = None) -> Outcome:
    """Trains and evaluates one run in this process.

    Args:
        name: a key of `TASKS`.
        seed: of everything.
        redundancy: coefficient of the coupling, read by the bucket brigade only.
        steps: environment steps in place of the task's (the schedule of the learning rate stays).
    """
    task = TASKS[name]
    start = time.perf_counter()
    scale = Scale(task)
    algo = config_of(task, seed, redundancy).build_algo()
    outcome = Outcome(name, seed, redundancy if task.scenario else 0.0, bar=task.bar)
    outcome.random, outcome.specialist = scale.random, scale.specialist
    try:
        iteration = 0
        while outcome.env_steps + algo.config.total_train_batch_size <= (steps or task.steps):
            before = time.perf_counter()
            results = algo.train()["env_runners"]
            outcome.training_seconds += time.perf_counter() - before
            iteration += 1
            outcome.env_steps = int(results["num_env_steps_sampled_lifetime"])
            training = results.get("episode_return_mean", -np.inf)
            if task.scenario is None and outcome.training_crossed is None and training >= task.bar:
                outcome.training_crossed = outcome.env_steps
            if iteration % EVALUATE_EVERY == 0:
                score = float(scale.scores(play_episodes(algo, 100, seed=CROSSING_SEED + iteration)).mean())
                outcome.scores.append((outcome.env_steps, score))
                if outcome.crossed is None and score >= task.bar:
                    outcome.crossed = outcome.env_steps
        played = play_episodes(algo, task.episodes, seed=EVALUATION_SEED)
        scores = scale.scores(played)
        outcome.value = float(scale.values(played).mean())
        outcome.score = float(scores.mean())
        outcome.standard_error = float(scores.std(ddof=1) / np.sqrt(len(scores)))
        sampled = play_episodes(algo, task.episodes, seed=EVALUATION_SEED, explore=True)
        outcome.sampled = float(scale.scores(sampled).mean())
        outcome.passed = outcome.score >= task.bar
    finally:
        algo.stop()
    outcome.seconds = time.perf_counter() - start
    return outcome


def row_of(outcome: Outcome) -> dict[str, str]:
    """A row of the CSV file."""
    found = asdict(outcome)
    found["scores"] = " ".join(f"{steps}:{score:.4g}" for steps, score in outcome.scores)
    about = {
        "thrust_rllib": thrust_rllib.__version__,
        "ray": ray.__version__,
        "torch": torch.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "benchmarks/learning.py", outcome.task, "--seeds", str(outcome.seed)])
        + (f" --redundancy {outcome.redundancy:g}" if TASKS[outcome.task].scenario else ""),
    }
    return {
        key: "" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x) for key, x in (found | about).items()
    }


def save(path: Path, row: Mapping[str, str]) -> None:
    """Adds the row; it replaces an earlier one of the same task, seed and coupling."""
    old = []
    if path.exists():
        with path.open(newline="") as file:
            old = [r for r in csv.DictReader(file) if any(r[key] != row[key] for key in CASE)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerows([*old, row])


def show(rows: Sequence[Mapping[str, str]]) -> None:
    columns = (
        "task", "seed", "redundancy", "env_steps", "score", "standard_error", "bar", "passed", "sampled", "crossed",
        "training_crossed", "training_seconds", "seconds",
    )  # fmt: skip
    table = Table()
    for column in columns:
        table.add_column(
            column.replace("_", " "), justify="left" if column == "task" else "right", no_wrap=column == "task"
        )
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    Console(width=None if sys.stdout.isatty() else 190).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; none means all")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the table's")
    parser.add_argument("--redundancy", type=float, default=REDUNDANCY, help="coefficient of the coupling, 0 for none")
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.tasks if name not in TASKS]:
        parser.error(f"unknown task {unknown[0]!r}; there are {', '.join(TASKS)}")

    warnings.filterwarnings("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs = [(name, seed) for name in args.tasks or TASKS for seed in args.seeds or TASKS[name].seeds]
    if len(runs) == 1:
        row = row_of(learn(*runs[0], redundancy=args.redundancy))
        save(args.output, row)
        show([row])
        return 0 if row["passed"] == "True" else 1
    failed = 0
    for name, seed in runs:
        arguments = [name, "--seeds", str(seed), "--redundancy", str(args.redundancy), "--output", str(args.output)]
        failed += subprocess.run([sys.executable, __file__, *arguments], check=False).returncode != 0
    with args.output.open(newline="") as file:
        show(list(csv.DictReader(file)))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
