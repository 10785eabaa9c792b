"""Does memory learn? Tasks that need it, with LSTM, GRU and without memory, and one of RLlib's beside RLlib's PPO.

    python benchmarks/recurrent.py --jobs 2                        # all runs of the table, two at a time
    python benchmarks/recurrent.py recall_32 --sides gru --seeds 0 # one run
    python benchmarks/recurrent.py multi_agent_stateless_cartpole --minutes 10

| task                           | environment                          | env steps | minutes | sides          | seeds |
|--------------------------------|--------------------------------------|-----------|---------|----------------|-------|
| recall_8                       | recall: a cue, 8 steps on its action | 150,000   | 4       | lstm, gru, mlp | 0, 1  |
| recall_32                      | the same, 32 steps on                | 300,000   | 4       | lstm, gru, mlp | 0, 1  |
| relay                          | relay: one sees, the other acts      | 150,000   | 4       | lstm           | 0     |
| stateless_cartpole             | CartPole-v1, no velocities           | 300,000   | 10      | lstm           | 0, 1  |
| multi_agent_stateless_cartpole | StatelessCartPole, two agents        | 3,000,000 | 10      | lstm, stock    | 0     |

Training ends with the steps or the minutes, whichever comes first. Bars: success >= 0.95 in recall and relay (of 1,000
episodes), and for the MLP chance, 0.25 within 0.05; stateless_cartpole >= 450 (of 100). The last task has none: both
curves are drawn.

Sides: "lstm", "gru" and "mlp" are JointPPO with `thrust_rllib.recipes.recipe` and `model_config={"cell": ...}`, no
other setting: a cell of 64, sequences of the whole rollout, which are 128 steps, two of them in a minibatch. "stock" is
RLlib's PPO with the settings of its own example, multi_agent_stateless_cartpole_ppo.py (LSTM of 256 behind an MLP of
2 x 256, max_seq_len 20, observations normalised, batches of 4,000), a policy for each agent as on our side, and as many
environments in the same process. RLlib's environment has no time limit, so that a good policy's episodes would never
end and the means would be those of the bad ones: here both have a limit of 500.

Score: the mean over agents of the return, last weights, mode of the policy (greedy). "training" is the mean over the
last 100 episodes of training, where actions are drawn; "crossed" the steps and seconds at which it was first at or
above the bar.

Takes about 20 minutes with --jobs 2; a run is a process with one torch thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
from common.results import RESULTS, Row, command, draw_bar, new_figure, panel, read
from common.rounds import console, run_script, start_quietly
from common.runs import add_rows, as_text, mean_and_error, run_each, versions
from common.tasks import EVALUATION_SEED, Task, curve_as_text, new_table, task_parser, train
from matplotlib.figure import Figure
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.examples.envs.classes.stateless_cartpole import StatelessCartPole

from thrust_rllib import JointPPOConfig
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe

NAME = "recurrent"
CASE = ("task", "side", "seed")
LIMIT = 500  # steps of a CartPole's episode
CHANCE_WITHIN = 0.05  # how far from chance a policy without memory may end


# RLlib's class of this name, but for the time limit.
MultiAgentStatelessCartPole = make_multi_agent(lambda config: gym.wrappers.TimeLimit(StatelessCartPole(config), LIMIT))


@dataclass(frozen=True)
class MemoryTask(Task):
    """`minutes` of training at most; `chance`: success without memory."""

    sides: tuple[str, ...]
    env_config: dict[str, Any] = field(default_factory=dict)
    minutes: float = 4.0
    episodes: int = 1000
    chance: float = float("nan")


def recall(delay: int, steps: int) -> MemoryTask:
    return MemoryTask("recall", steps, 0.95, (0, 1), ("lstm", "gru", "mlp"), {"delay": delay}, chance=0.25)


TASKS = {
    "recall_8": recall(8, 150_000),
    "recall_32": recall(32, 300_000),
    "relay": MemoryTask("relay", 150_000, 0.95, (0,), ("lstm",)),
    "stateless_cartpole": MemoryTask(
        "thrust_rllib.envs.memory_tasks:stateless_cartpole", 300_000, 450.0, (0, 1), ("lstm",),
        minutes=10.0, episodes=100,
    ),
    "multi_agent_stateless_cartpole": MemoryTask(
        MultiAgentStatelessCartPole, 3_000_000, float("nan"), (0,), ("lstm", "stock"), {"num_agents": 2},
        minutes=10.0, episodes=100,
    ),
}  # fmt: skip


@dataclass
class Outcome:
    """One run. score: mean over agents; curve, timeline: the mean of training by steps and by seconds."""

    task: str
    side: str
    seed: int
    env_steps: int = 0
    bar: float | None = None
    score: float = float("nan")
    standard_error: float = float("nan")
    passed: bool | None = None
    training: float = float("nan")
    crossed: int | None = None
    seconds_crossed: float | None = None
    training_seconds: float = 0.0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    timeline: list[tuple[int, float]] = field(default_factory=list)


def joint(task: MemoryTask, cell: str) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=task.steps)
    config.environment(task.env, env_config=task.env_config)
    return config if cell == "mlp" else config.rl_module(model_config={"cell": cell})


def stock(task: MemoryTask) -> PPOConfig:
    agents = [f"p{i}" for i in range(task.env_config["num_agents"])]
    config = PPOConfig().environment(task.env, env_config=task.env_config)
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=joint(task, "lstm").num_envs_per_env_runner,
        env_to_module_connector=lambda env, spaces, device: MeanStdFilter(multi_agent=True),
    )
    config.training(lr=3e-4, num_epochs=6, vf_loss_coeff=0.05)
    config.rl_module(model_config=DefaultModelConfig(use_lstm=True, max_seq_len=20))
    config.multi_agent(policies=set(agents), policy_mapping_fn=lambda agent, episode, **kwargs: f"p{agent}")
    return config.debugging(log_level="ERROR")


def play(algo: Algorithm, task: MemoryTask) -> tuple[float, float]:
    """Mean over greedy episodes of the agents' mean return, and its standard error.

    RLlib's runner stops when as many have ended anywhere, which favours short ones a little.
    """
    if isinstance(algo.config, JointPPOConfig):
        return mean_and_error(play_episodes(algo, task.episodes, seed=EVALUATION_SEED).returns.mean(axis=1).tolist())
    episodes = algo.env_runner.sample(num_episodes=task.episodes, explore=False, force_reset=True)
    returns = [[own.get_return() for own in episode.agent_episodes.values()] for episode in episodes]
    return mean_and_error([sum(own) / len(own) for own in returns])


def learn(name: str, side: str, seed: int, task: MemoryTask | None = None) -> Outcome:
    """Trains and evaluates one run in this process.

    Args:
        name: a key of `TASKS`.
        side: "lstm", "gru", "mlp" or "stock".
        seed: of everything.
        task: in place of the named one.
    """
    start = time.perf_counter()
    task = task or TASKS[name]
    outcome = Outcome(name, side, seed)
    config = stock(task) if side == "stock" else joint(task, side)
    algo = config.debugging(seed=seed).build_algo()
    try:
        for found, outcome.env_steps, outcome.training_seconds in train(algo, task.steps):
            if returns := found.get("agent_episode_returns_mean"):
                outcome.training = float(sum(returns.values()) / len(returns))
                outcome.curve.append((outcome.env_steps, outcome.training))
                outcome.timeline.append((round(outcome.training_seconds), outcome.training))
                if outcome.crossed is None and outcome.training >= task.bar:
                    outcome.crossed, outcome.seconds_crossed = outcome.env_steps, outcome.training_seconds
            if outcome.training_seconds >= 60 * task.minutes:
                break
        outcome.score, outcome.standard_error = play(algo, task)
    finally:
        algo.stop()
    judge(outcome, task)
    outcome.seconds = time.perf_counter() - start
    return outcome


def judge(outcome: Outcome, task: MemoryTask) -> None:
    """Sets bar and `passed`, where the task has a bar."""
    if outcome.side == "mlp":
        outcome.bar, outcome.passed = task.chance, abs(outcome.score - task.chance) <= CHANCE_WITHIN
    elif task.bar == task.bar:
        outcome.bar, outcome.passed = task.bar, outcome.score >= task.bar


def row_of(outcome: Outcome, options: Sequence[str]) -> Row:
    found = asdict(outcome) | {key: curve_as_text(getattr(outcome, key)) for key in ("curve", "timeline")}
    return as_text(found | versions() | {"command": command(NAME, arguments_of(*case_of(outcome), options))})


def case_of(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.task, outcome.side, outcome.seed


def arguments_of(name: str, side: str, seed: int, options: Sequence[str]) -> list[str]:
    return [name, "--sides", side, "--seeds", f"{seed}", *options]


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each task, a line for each run: by minutes where two trainers race, by steps elsewhere."""
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    figure = new_figure("Mean of the last 100 episodes of training", 4.2 * len(names), 4.2)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        race = "stock" in TASKS[name].sides
        panel(axes, name, "return of an agent")
        axes.set_xlabel("minutes of training" if race else "thousands of environment steps", fontsize=9)
        for row in (row for row in rows if row["task"] == name):
            points = [point.split(":") for point in row["timeline" if race else "curve"].split()]
            x = [float(at) / (60 if race else 1000) for at, _ in points]
            axes.plot(x, [float(y) for _, y in points], label=f"{row['side']}, seed {row['seed']}", linewidth=1.2)
        if TASKS[name].bar == TASKS[name].bar:
            draw_bar(axes, TASKS[name].bar)
        axes.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def add(path: Path, rows: Sequence[Row]) -> None:
    """Adds the rows to the file and draws all that stand there."""
    add_rows(path, rows, CASE)
    draw(read(path)).savefig(path.with_suffix(".png"))


def show(rows: Sequence[Row]) -> None:
    columns = (
        "task", "side", "seed", "env_steps", "score", "standard_error", "bar", "passed", "training", "crossed",
        "seconds_crossed", "training_seconds", "seconds",
    )  # fmt: skip
    rounded = ("score", "standard_error", "training", "seconds_crossed", "training_seconds", "seconds")
    table = new_table([column.replace("_", " ") for column in columns])
    for row in rows:
        table.add_row(*(f"{float(row[key]):.4g}" if key in rounded and row[key] else row[key] for key in columns))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = task_parser(__doc__, TASKS)
    parser.add_argument("--sides", nargs="+", choices=("lstm", "gru", "mlp", "stock"), help="in place of the table's")
    parser.add_argument("--steps", type=int, help="environment steps in place of the table's")
    parser.add_argument("--minutes", type=float, help="of training at most, in place of the table's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, help=f"CSV file, the picture beside it (default: results/{NAME}.csv)")
    parser.add_argument("--smoke", action="store_true", help="seed 0, some iterations; saved with --output only")
    args = parser.parse_args(argv)
    given = {key: getattr(args, key) for key in ("steps", "minutes") if getattr(args, key) is not None}
    options = [text for key, value in given.items() for text in (f"--{key}", f"{value:g}")]
    if args.smoke:
        given = {"steps": 8192, "minutes": 0.1, "episodes": 16}
    runs = [
        (name, side, seed)
        for name in args.tasks or TASKS
        for side in args.sides or TASKS[name].sides
        for seed in ((0,) if args.smoke else args.seeds or TASKS[name].seeds)
    ]
    to_file = partial(add, args.output or RESULTS / f"{NAME}.csv")
    if len(runs) > 1 and not args.smoke:
        rows = run_each(__file__, [arguments_of(*run, options) for run in runs], to_file, args.jobs)
    else:
        start_quietly()
        rows = [row_of(learn(*run, replace(TASKS[run[0]], **given)), options) for run in runs]
        if args.output or not args.smoke:
            to_file(rows)
    show(rows)
    return 0 if args.smoke or not any(row["passed"] == "False" for row in rows) else 1


if __name__ == "__main__":
    run_script(main)
