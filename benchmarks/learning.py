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

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common.results import RESULTS, Row, command, merged, read, write
from common.rounds import console, run_script, start_quietly
from common.runs import as_text, mean_and_error, run_each, versions
from common.tasks import CURVE_EVERY, EVALUATION_SEED, Task, chosen_runs, curve_as_text, new_table, task_parser, train

from thrust_rllib import JointPPOConfig, RedundancyPenalty
from thrust_rllib.envs import calibrate, gap_closed
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes
from thrust_rllib.recipes import recipe

NAME = "learning"
CASE = ("task", "seed", "redundancy")
REDUNDANCY = 0.1
CALIBRATION_EPISODES = 10_000
CROSSING_SEED = 2_000_000  # as far from the seeds of training as EVALUATION_SEED


@dataclass(frozen=True)
class RecipeTask(Task):
    """`scenario` is that of the bucket brigade, None elsewhere."""

    scenario: str | None = None

    @property
    def env_config(self) -> dict[str, Any]:
        return {} if self.scenario is None else {"scenario": self.scenario}

    @property
    def episodes(self) -> int:
        return 100 if self.scenario is None else 1000


TASKS = {
    "minimal_specialization": RecipeTask("bucket_brigade", 200_000, 0.9, (0, 1, 2), "minimal_specialization"),
    "rest_trap": RecipeTask("bucket_brigade", 200_000, 0.9, (0, 1, 2), "rest_trap"),
    "cartpole": RecipeTask("CartPole-v1", 150_000, 475.0, (0, 1, 2)),
    "pendulum": RecipeTask("Pendulum-v1", 300_000, -400.0, (0,)),
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

    def __init__(self, task: RecipeTask) -> None:
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


def config_of(task: RecipeTask, seed: int, redundancy: float) -> JointPPOConfig:
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
        for found, outcome.env_steps, outcome.training_seconds in train(algo, steps or task.steps):
            training = found.get("episode_return_mean", -np.inf)
            if task.scenario is None and outcome.training_crossed is None and training >= task.bar:
                outcome.training_crossed = outcome.env_steps
            if algo.iteration % CURVE_EVERY == 0:
                played = play_episodes(algo, 100, seed=CROSSING_SEED + algo.iteration)
                score = float(scale.scores(played).mean())
                outcome.scores.append((outcome.env_steps, score))
                if outcome.crossed is None and score >= task.bar:
                    outcome.crossed = outcome.env_steps
        played = play_episodes(algo, task.episodes, seed=EVALUATION_SEED)
        outcome.value = float(scale.values(played).mean())
        outcome.score, outcome.standard_error = mean_and_error(scale.scores(played).tolist())
        sampled = play_episodes(algo, task.episodes, seed=EVALUATION_SEED, explore=True)
        outcome.sampled = float(scale.scores(sampled).mean())
        outcome.passed = outcome.score >= task.bar
    finally:
        algo.stop()
    outcome.seconds = time.perf_counter() - start
    return outcome


def row_of(outcome: Outcome) -> Row:
    arguments = [outcome.task, "--seeds", f"{outcome.seed}"]
    if TASKS[outcome.task].scenario is not None:
        arguments += ["--redundancy", f"{outcome.redundancy:g}"]
    found = asdict(outcome) | {"scores": curve_as_text(outcome.scores)}
    return as_text(found | versions() | {"command": command(NAME, arguments)})


def add(path: Path, rows: Sequence[Row]) -> None:
    """Adds the rows in the order of the runs; they replace earlier ones of the same task, seed and coupling."""
    write(path, merged(path, rows, CASE), list(rows[0]))


def show(rows: Sequence[Mapping[str, str]]) -> None:
    columns = (
        "task", "seed", "redundancy", "env_steps", "score", "standard_error", "bar", "passed", "sampled", "crossed",
        "training_crossed", "training_seconds", "seconds",
    )  # fmt: skip
    rounded = ("score", "standard_error", "sampled", "training_seconds", "seconds")
    table = new_table([column.replace("_", " ") for column in columns])
    for row in rows:
        table.add_row(*(f"{float(row[key]):.4g}" if key in rounded else row[key] for key in columns))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = task_parser(__doc__, TASKS)
    parser.add_argument("--redundancy", type=float, default=REDUNDANCY, help="coefficient of the coupling, 0 for none")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.csv", help="CSV file")
    args = parser.parse_args(argv)
    runs = chosen_runs(args, TASKS)
    if len(runs) == 1:
        start_quietly()
        rows = [row_of(learn(*runs[0], redundancy=args.redundancy))]
        add(args.output, rows)
        show(rows)
    else:
        arguments = [[name, "--seeds", f"{seed}", "--redundancy", f"{args.redundancy}"] for name, seed in runs]
        rows = run_each(__file__, arguments, partial(add, args.output))
        show(read(args.output))
    return 0 if all(row["passed"] == "True" for row in rows) else 1


if __name__ == "__main__":
    run_script(main)
