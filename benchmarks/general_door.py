"""Does JointPPO learn where agents end before others, by both ways to sample? And the two-step game, beside RLlib.

    python benchmarks/general_door.py --jobs 2                          # all runs of the tables, two at a time
    python benchmarks/general_door.py cartpole --seeds 0                # one task
    python benchmarks/general_door.py two_step --sides arrays stock --entropy-coeff 0.05

| task           | environment                      | env steps | seeds   | sides                     | bar    |
|----------------|----------------------------------|-----------|---------|---------------------------|--------|
| cartpole       | MultiAgentCartPole, two agents   | 300,000   | 0, 1, 2 | arrays, episodes          | >= 400 |
| two_step       | two_step_game: safe 7, best 8    | 50,000    | 0 to 9  | arrays, like_stock, stock | none   |
| two_step_short | the same                         | 10,000    | 0 to 9  | arrays, stock             | none   |

Sides: "arrays" and "episodes" are JointPPO with `thrust_rllib.recipes.recipe`, whose learning rate falls to 0 over the
task's steps, and the two ways to sample. "stock" is RLlib's PPO on the very same environment (`JointEnvMultiAgentEnv`)
with the recipe's networks, batch, epochs, rates, clips and entropy: every agent learns for itself. "like_stock" is
"arrays" without what stock has not: no normalised observations, no normalised value targets, no clip of the value's
change. Differences that stay: stock's learner keeps the artificial last row of each episode, a third of all rows where
episodes have two steps: it counts in the standardisation of advantages (at zero weight in the losses), and an epoch has
12 minibatches instead of 8.

Score: the mean return of the agent that did worst, over 100 episodes of the last weights played with the mode of the
policy (greedy). In the two-step game both agents get the same payoff, and one greedy episode is all there is to see; it
is a count of how often learners for themselves end at 8, at 7 or elsewhere, not a bar. "training" is the mean over the
last 100 episodes of training, where actions are drawn; "training crossed" the steps (and the iteration) at which that
mean was first at or above the bar, for the worst agent.

Takes about 13 minutes with --jobs 2; a run is a process with one torch thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.results import RESULTS, Row, command
from common.rounds import console, run_script, start_quietly
from common.runs import add_rows, as_text, mean_and_error, plus_minus, run_each, versions
from common.tasks import EVALUATION_SEED, Task, curve_as_text, new_table, task_parser, train
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

from thrust_rllib import JointPPOConfig
from thrust_rllib.envs import JointEnvMultiAgentEnv, make_vector_env
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes, play_policy
from thrust_rllib.recipes import recipe
from thrust_rllib.rl_modules.mlp import MLPModule

NAME = "general_door"
CASE = ("task", "side", "entropy_coeff", "standardize_advantages", "seed")
ENTROPY, STANDARDIZE = 0.01, "rollout"  # JointPPOConfig's defaults
SAFE, BEST = 7.0, 8.0


@dataclass(frozen=True)
class DoorTask(Task):
    """`env_config` belongs to the environment, `sides` are those of the table."""

    env_config: dict[str, Any]
    sides: tuple[str, ...]
    episodes: int = 100


def two_step(steps: int, *sides: str) -> DoorTask:
    return DoorTask("two_step_game", steps, math.nan, tuple(range(10)), {}, sides, 1)


TASKS = {
    "cartpole": DoorTask(MultiAgentCartPole, 300_000, 400.0, (0, 1, 2), {"num_agents": 2}, ("arrays", "episodes")),
    "two_step": two_step(50_000, "arrays", "like_stock", "stock"),
    "two_step_short": two_step(10_000, "arrays", "stock"),
}


@dataclass
class Outcome:
    """One run. score, standard_error: of the worst agent; returns: each agent's mean; curve: (steps, training mean)."""

    task: str
    side: str
    entropy_coeff: float
    standardize_advantages: str
    seed: int
    env_steps: int = 0
    bar: float | None = None
    score: float = float("nan")
    standard_error: float = float("nan")
    passed: bool | None = None
    returns: list[float] = field(default_factory=list)
    training: float = float("nan")
    training_crossed: int | None = None
    iteration_crossed: int | None = None
    training_seconds: float = 0.0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)


def joint(task: DoorTask, sampling: str, entropy_coeff: float, standardize_advantages: str) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=task.steps)
    config.environment(task.env, env_config=task.env_config).env_runners(sampling=sampling)
    return config.training(
        entropy_coeff=entropy_coeff,
        standardize_advantages=False if standardize_advantages == "none" else standardize_advantages,
    )


def like_stock(task: DoorTask, *settings: Any) -> JointPPOConfig:
    config = joint(task, "arrays", *settings).env_runners(normalize_observations=False)
    return config.training(value_normalization=False, value_clip_range=math.inf)


def stock(task: DoorTask, entropy_coeff: float, _: str) -> PPOConfig:
    same = joint(task, "arrays", entropy_coeff, STANDARDIZE)
    agents = make_vector_env(task.env, task.env_config, 1).possible_agents
    config = PPOConfig().environment(JointEnvMultiAgentEnv, env_config={"env": task.env, "env_config": task.env_config})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=same.num_envs_per_env_runner)
    config.multi_agent(policies=set(agents), policy_mapping_fn=lambda agent, episode, **kwargs: agent)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=MLPModule))
    shared = (
        "train_batch_size_per_learner", "minibatch_size", "num_epochs", "lr", "gamma", "lambda_", "grad_clip",
        "grad_clip_by", "clip_param", "vf_clip_param", "vf_loss_coeff", "entropy_coeff", "use_kl_loss",
    )  # fmt: skip
    return config.training(**{name: getattr(same, name) for name in shared}).debugging(log_level="ERROR")


SIDES: dict[str, Callable[..., PPOConfig]] = {
    "arrays": lambda task, *settings: joint(task, "arrays", *settings),
    "episodes": lambda task, *settings: joint(task, "episodes", *settings),
    "like_stock": like_stock,
    "stock": stock,
}


def play(algo: Algorithm, task: DoorTask) -> PlayedEpisodes:
    """Greedy episodes with the last weights."""
    if isinstance(algo.config, JointPPOConfig):
        return play_episodes(algo, task.episodes, seed=EVALUATION_SEED)
    env = make_vector_env(task.env, task.env_config, task.episodes)

    def greedy(observations: np.ndarray) -> np.ndarray:
        actions = []
        for agent, seen in zip(env.possible_agents, observations, strict=True):
            with torch.no_grad():
                acted = algo.get_module(agent).forward_inference({Columns.OBS: torch.from_numpy(seen)})
            actions.append(acted[Columns.ACTION_DIST_INPUTS].argmax(dim=-1).numpy())
        return np.stack(actions)

    return play_policy(env, greedy, task.episodes, seed=EVALUATION_SEED)


def learn(
    name: str,
    side: str,
    seed: int,
    entropy_coeff: float = ENTROPY,
    standardize_advantages: str = STANDARDIZE,
    task: DoorTask | None = None,
) -> Outcome:
    """Trains and evaluates one run in this process.

    Args:
        name: a key of `TASKS`.
        side: a key of `SIDES`.
        seed: of everything.
        entropy_coeff: weight of the entropy.
        standardize_advantages: JointPPO's option, "none" for False; stock always takes the whole batch.
        task: in place of the named one.
    """
    start = time.perf_counter()
    task = task or TASKS[name]
    outcome = Outcome(name, side, entropy_coeff, standardize_advantages, seed)
    algo = SIDES[side](task, entropy_coeff, standardize_advantages).debugging(seed=seed).build_algo()
    try:
        for found, outcome.env_steps, outcome.training_seconds in train(algo, task.steps):
            if returns := found.get("agent_episode_returns_mean"):
                outcome.training = float(min(returns.values()))
                outcome.curve.append((outcome.env_steps, outcome.training))
                if outcome.training_crossed is None and outcome.training >= task.bar:
                    outcome.training_crossed, outcome.iteration_crossed = outcome.env_steps, algo.iteration
        played = play(algo, task)
    finally:
        algo.stop()
    outcome.returns = played.returns.mean(axis=0).tolist()
    worst = played.returns[:, int(np.argmin(outcome.returns))]
    outcome.score, outcome.standard_error = mean_and_error(worst.tolist())
    if not math.isnan(task.bar):
        outcome.bar, outcome.passed = task.bar, outcome.score >= task.bar
    outcome.seconds = time.perf_counter() - start
    return outcome


def arguments_of(name: str, side: str, seed: int, entropy_coeff: float, standardize_advantages: str) -> list[str]:
    arguments = [name, "--sides", side, "--seeds", f"{seed}"]
    if entropy_coeff != ENTROPY:
        arguments += ["--entropy-coeff", f"{entropy_coeff:g}"]
    if standardize_advantages != STANDARDIZE:
        arguments += ["--standardize-advantages", standardize_advantages]
    return arguments


def row_of(outcome: Outcome) -> Row:
    found = asdict(outcome)
    arguments = arguments_of(
        outcome.task, outcome.side, outcome.seed, outcome.entropy_coeff, outcome.standardize_advantages
    )
    found |= {"returns": " ".join(f"{x:.6g}" for x in outcome.returns), "curve": curve_as_text(outcome.curve)}
    return as_text(found | versions() | {"command": command(NAME, arguments)})


def counts(scores: Sequence[float]) -> Counter[str]:
    """How many runs of the two-step game ended at the best payoff, at the safe one, or elsewhere."""
    names = {BEST: "at 8", SAFE: "at 7"}
    return Counter(names.get(score, "elsewhere") for score in scores)


def show(rows: Sequence[Row]) -> None:
    runs = [row for row in rows if row["bar"]]
    if runs:
        columns = (
            "task", "side", "seed", "env_steps", "score", "standard_error", "bar", "passed", "returns",
            "training_crossed", "iteration_crossed", "training_seconds",
        )  # fmt: skip
        table = new_table([column.replace("_", " ") for column in columns])
        for row in runs:
            table.add_row(*(f"{float(row[key]):.1f}" if key == "training_seconds" else row[key] for key in columns))
        console.print(table)
    games = [row for row in rows if not row["bar"]]
    if games:
        columns = ("task", "side", "entropy", "advantages", "runs", "at 8", "at 7", "elsewhere", "score", "training")
        table = new_table([*columns, "training s"])
        for case in dict.fromkeys(tuple(row[key] for key in CASE[:-1]) for row in games):
            mine = [row for row in games if tuple(row[key] for key in CASE[:-1]) == case]
            scores = [float(row["score"]) for row in mine]
            found = counts(scores)
            numbers = [str(found[key]) for key in ("at 8", "at 7", "elsewhere")]
            training = plus_minus((float(row["training"]) for row in mine), 2)
            seconds = sum(float(row["training_seconds"]) for row in mine) / len(mine)
            table.add_row(*case, str(len(mine)), *numbers, plus_minus(scores, 2), training, f"{seconds:.0f}")
        console.print(table, "score, training: mean ± standard error over runs")


def main(argv: Sequence[str] | None = None) -> int:
    parser = task_parser(__doc__, TASKS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="in place of the table's")
    parser.add_argument("--entropy-coeff", type=float, default=ENTROPY, help="weight of the entropy")
    parser.add_argument(
        "--standardize-advantages",
        choices=("rollout", "minibatch", "team", "none"),
        default=STANDARDIZE,
        help="JointPPO's option; stock always takes the whole batch",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, help=f"CSV file (default: results/{NAME}.csv)")
    parser.add_argument("--smoke", action="store_true", help="seed 0, 2 iterations; saved with --output only")
    args = parser.parse_args(argv)
    settings = (args.entropy_coeff, args.standardize_advantages)
    runs = [
        (name, side, seed)
        for name in args.tasks or TASKS
        for side in args.sides or TASKS[name].sides
        for seed in ((0,) if args.smoke else args.seeds or TASKS[name].seeds)
    ]
    add = partial(add_rows, args.output or RESULTS / f"{NAME}.csv", case=CASE)
    if len(runs) > 1 and not args.smoke:
        rows = run_each(__file__, [arguments_of(*run, *settings) for run in runs], add, args.jobs)
    else:
        start_quietly()
        rows = []
        for name, side, seed in runs:
            task = replace(TASKS[name], steps=4096, episodes=1) if args.smoke else TASKS[name]
            rows.append(row_of(learn(name, side, seed, *settings, task)))
        if args.output or not args.smoke:
            add(rows)
    show(rows)
    return 0 if args.smoke or not any(row["passed"] == "False" for row in rows) else 1


if __name__ == "__main__":
    run_script(main)
