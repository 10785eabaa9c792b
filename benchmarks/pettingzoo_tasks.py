"""Does JointPPO learn PettingZoo environments by their names, with two remote runners? Two tasks of MPE.

    python benchmarks/pettingzoo_tasks.py                             # all runs of the table, one after another
    python benchmarks/pettingzoo_tasks.py simple_spread --seeds 0     # one run
    python benchmarks/pettingzoo_tasks.py simple_spread --gamma 0.99  # with another discount

| task                    | environment                                | env steps | seeds   | bar      | random |
|-------------------------|--------------------------------------------|-----------|---------|----------|--------|
| simple_spread           | pettingzoo:mpe2.simple_spread_v3           | 300,000   | 0, 1, 2 | >= -20.0 | -26.6  |
| simple_speaker_listener | pettingzoo:mpe2.simple_speaker_listener_v4 | 200,000   | 0       | >= -36.0 | -80.6  |

Score: the mean return of an episode, per agent in simple_spread (3 agents), summed over both agents in the other. The
bar is for the mean over the seeds. Played are 1,000 episodes with the last weights and the mode of the policy (greedy);
"sampled" draws actions as in training; "random" is measured in the same way, with all agents uniformly random.

`thrust_rllib.recipes.recipe` and two settings: a discount of 0.95 and minibatches of 512. Episodes have 25 steps and
end by truncation, so that with 0.99 most of a return lies behind their end, in the critic's estimate. Both settings
were chosen with seeds 100 and 101, not with those of the table. The agents of simple_spread look alike and share one
module; speaker and listener see and do different things (Box(3) and Discrete(3), Box(11) and Discrete(5)): one each.

Takes about 8 minutes; a run is a process with two remote runners of 16 environments, one torch thread each.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; remote runners inherit it
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import ray
from common.results import RESULTS, Row, command
from common.rounds import console, run_script, start_quietly
from common.runs import add_rows, as_text, mean_and_error, plus_minus, run_each, versions
from common.tasks import CURVE_EVERY, EVALUATION_SEED, Task, chosen_runs, curve_as_text, new_table, task_parser, train

from thrust_rllib import JointPPOConfig
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes
from thrust_rllib.recipes import recipe

NAME = "pettingzoo_tasks"
CASE = ("task", "gamma", "minibatch_size", "seed")
RUNNERS = 2
GAMMA, MINIBATCH = 0.95, 512
EPISODES = 1000


@dataclass(frozen=True)
class PettingZooTask(Task):
    """The score is the return per agent, or the sum over the agents."""

    policies: str
    per_agent: bool
    episodes: int = EPISODES


TASKS = {
    "simple_spread": PettingZooTask("pettingzoo:mpe2.simple_spread_v3", 300_000, -20.0, (0, 1, 2), "shared", True),
    "simple_speaker_listener": PettingZooTask(
        "pettingzoo:mpe2.simple_speaker_listener_v4", 200_000, -36.0, (0,), "per_agent", False
    ),
}


@dataclass
class Outcome:
    """One run. curve: (steps, score of the last 100 episodes of training)."""

    task: str
    seed: int
    gamma: float
    minibatch_size: int
    env_steps: int = 0
    bar: float = float("nan")
    score: float = float("nan")
    standard_error: float = float("nan")
    sampled: float = float("nan")
    sampled_standard_error: float = float("nan")
    random: float = float("nan")
    random_standard_error: float = float("nan")
    training_seconds: float = 0.0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)


def config_of(task: PettingZooTask, seed: int, gamma: float, minibatch_size: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=task.steps)
    config.environment(task.env).env_runners(num_env_runners=RUNNERS).multi_agent(policies=task.policies)
    return config.training(gamma=gamma, minibatch_size=minibatch_size).debugging(seed=seed)


def learn(
    name: str, seed: int, gamma: float = GAMMA, minibatch_size: int = MINIBATCH, task: PettingZooTask | None = None
) -> Outcome:
    """Trains and evaluates one run in this process.

    Args:
        name: a key of `TASKS`.
        seed: of everything.
        gamma: discount.
        minibatch_size: joint rows per gradient step.
        task: in place of the named one.
    """
    start = time.perf_counter()
    task = task or TASKS[name]
    outcome = Outcome(name, seed, gamma, minibatch_size, bar=task.bar)
    algo = config_of(task, seed, gamma, minibatch_size).build_algo()
    try:
        agents = play_episodes(algo, 1).agents
        divisor = len(agents) if task.per_agent else 1
        for found, outcome.env_steps, outcome.training_seconds in train(algo, task.steps):
            if algo.iteration % CURVE_EVERY == 0:
                outcome.curve.append((outcome.env_steps, found["episode_return_mean"] / divisor))

        def score(played: PlayedEpisodes) -> tuple[float, float]:
            return mean_and_error((played.team_returns / divisor).tolist())

        episodes, at = task.episodes, {"seed": EVALUATION_SEED}
        outcome.score, outcome.standard_error = score(play_episodes(algo, episodes, **at))
        outcome.sampled, outcome.sampled_standard_error = score(play_episodes(algo, episodes, explore=True, **at))
        outcome.random, outcome.random_standard_error = score(play_episodes(algo, episodes, random_agents=agents, **at))
    finally:
        algo.stop()
    outcome.seconds = time.perf_counter() - start
    return outcome


def row_of(outcome: Outcome) -> Row:
    arguments = [outcome.task, "--seeds", f"{outcome.seed}"]
    if (outcome.gamma, outcome.minibatch_size) != (GAMMA, MINIBATCH):
        arguments += ["--gamma", f"{outcome.gamma:g}", "--minibatch-size", f"{outcome.minibatch_size}"]
    found = asdict(outcome) | {"curve": curve_as_text(outcome.curve)}
    return as_text(found | versions("pettingzoo", "mpe2") | {"command": command(NAME, arguments)})


def show(rows: Sequence[Row]) -> bool:
    """Prints every run and the mean of each task; returns whether all bars are met."""
    table = new_table(("task", "seed", "env steps", "greedy (score)", "sampled", "random", "training s", "all s"))
    for row in rows:
        scores = [
            f"{float(row[key]):.2f} ± {float(row[f'{key}_standard_error' if key != 'score' else 'standard_error']):.2f}"
            for key in ("score", "sampled", "random")
        ]
        seconds = [f"{float(row[key]):.0f}" for key in ("training_seconds", "seconds")]
        table.add_row(row["task"], row["seed"], row["env_steps"], *scores, *seconds)
    console.print(table, "± standard error over episodes")
    met = []
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name]
        scores, bar = [float(row["score"]) for row in mine], float(mine[0]["bar"])
        met.append(bool(np.mean(scores) >= bar))
        what = "return per agent" if TASKS[name].per_agent else "return, sum over agents"
        console.print(
            f"{name}: {what}, mean over {len(mine)} seed(s) {plus_minus(scores, 2)}; bar {bar:g}: "
            + ("met" if met[-1] else "missed"),
            highlight=False,
        )
    return all(met)


def main(argv: Sequence[str] | None = None) -> int:
    parser = task_parser(__doc__, TASKS)
    parser.add_argument("--gamma", type=float, default=GAMMA, help="discount")
    parser.add_argument("--minibatch-size", type=int, default=MINIBATCH, help="joint rows per gradient step")
    parser.add_argument("--output", type=Path, help=f"CSV file (default: results/{NAME}.csv)")
    parser.add_argument(
        "--smoke", action="store_true", help="seed 0, 2 iterations, 20 episodes; saved with --output only"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds = (0,)
    runs = chosen_runs(args, TASKS)
    add = partial(add_rows, args.output or RESULTS / f"{NAME}.csv", case=CASE)
    if len(runs) > 1 and not args.smoke:
        settings = ["--gamma", f"{args.gamma}", "--minibatch-size", f"{args.minibatch_size}"]
        rows = run_each(__file__, [[name, "--seeds", str(seed), *settings] for name, seed in runs], add)
    else:
        # A CPU for each runner and one for this process, however many the machine has.
        ray.init(num_cpus=RUNNERS + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        start_quietly()
        rows = []
        for name, seed in runs:
            task = replace(TASKS[name], steps=4096, episodes=20) if args.smoke else TASKS[name]
            rows.append(row_of(learn(name, seed, args.gamma, args.minibatch_size, task)))
        if args.output or not args.smoke:
            add(rows)
    met = show(rows)
    return 0 if met or args.smoke else 1


if __name__ == "__main__":
    run_script(main)
