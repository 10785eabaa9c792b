"""What do several learners gain? Seconds of one remote learner's update divided by those of L learners.

    python benchmarks/learners.py                                # all cases of the table below
    python benchmarks/learners.py --cases large small --rounds 9
    python benchmarks/learners.py --learners 3                   # on a machine with as many cores

Takes about 7 minutes on two idle cores. Bar: the case "large" is at least 1.5 times as fast with two learners.

| case                 | networks of each agent      | losses that couple agents |
|----------------------|-----------------------------|---------------------------|
| large                | 2 × 512                     | none                      |
| large, redundancy    | 2 × 512                     | `RedundancyPenalty`       |
| large, divergence    | 2 × 512                     | `JensenShannon`           |
| lstm                 | LSTM of 128 behind 1 × 128  | none                      |
| small                | 2 × 64                      | none                      |

8 agents that see 64 numbers and have 5 actions; 8,192 joint rows (64 steps of 128 environments) and 2 epochs of joint
minibatches of 4,096: the one learner has `minibatch_size=4096`, each of L has 4096 / L. Training sequences are whole
rollouts. An update is `JointLearnerGroup.update_from_rollouts`: the rollout lies in Ray's object store, as those of
remote runners do; values, advantages, 4 gradient steps. Every learner is a process with one torch thread, so that L of
them need L idle cores. Couplings are computed whole by every learner, and their features travel.

Both sides of a case take turns, a ratio is made within a round; who goes first changes from round to round, and the
first `--warmup` rounds are thrown away. On a busy machine `--clock cpu` takes the CPU seconds of the learner that used
most: what idle cores would make of it, but for the waiting.

"collectives" is the share of the update's wall time that the first learner spends in calls that wait for the others
(`collective_seconds`). One more update, not among the rounds, has a barrier in front of each call: what passes there is
waiting for the slower learner, the rest is sending.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch.distributed as dist
from common.results import Row, draw_bar, draw_columns, new_figure, panel, parse, parser, save, summary, text
from common.rounds import Seconds, console, run_script, start_quietly, take_turns
from common.tasks import new_table
from matplotlib.figure import Figure
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from thrust_rllib import JensenShannon, JointEnvRunner, JointPPOConfig, JointPPOLearner, RedundancyPenalty
from thrust_rllib.ranks import Ranks

NAME = "learners"
BAR, BARRED = 1.5, "large"
CASE = ("case", "learners", "agents", "rows", "minibatch", "clock")
RATIO = "times as fast as one"
SHARE = "of the update"
AGENTS, OBS, ACTIONS = 8, 64, 5
ENVS, STEPS, MINIBATCH, EPOCHS = 128, 64, 4096, 2


@dataclass(frozen=True)
class Case:
    """Networks of each agent, and what couples the agents."""

    model: dict[str, Any]
    couplings: dict[str, Any] = field(default_factory=dict)


LARGE = {"fcnet_hiddens": [512, 512]}
CASES = {
    "large": Case(LARGE),
    "large, redundancy": Case(LARGE, {"redundancy": RedundancyPenalty()}),
    "large, divergence": Case(LARGE, {"divergence": JensenShannon("raise")}),
    "lstm": Case({"cell": "lstm", "cell_size": 128, "fcnet_hiddens": [128]}),
    "small": Case({"fcnet_hiddens": [64, 64]}),
}


class WatchedRanks(Ranks):
    """Tells waiting from sending, while `watched`: nobody sends before all have come."""

    watched = False
    waiting = 0.0

    def _wait(self) -> None:
        if self.watched:
            started = time.perf_counter()
            dist.barrier()
            self.waiting += time.perf_counter() - started

    def _all_reduce(self, x: Tensor) -> None:
        self._wait()
        super()._all_reduce(x)

    def _all_gather(self, gathered: Tensor, x: Tensor) -> None:
        self._wait()
        super()._all_gather(gathered, x)

    def _broadcast(self, x: Tensor) -> None:
        self._wait()
        super()._broadcast(x)


class WatchedLearner(JointPPOLearner):
    def make_ranks(self) -> Ranks:
        return WatchedRanks.of(self.config, self._device)


def config_of(case: Case, learners: int, args: argparse.Namespace) -> JointPPOConfig:
    config = JointPPOConfig().environment(
        "debug/random_observations", env_config={"agents": args.agents, "size": OBS, "num_actions": ACTIONS}
    )
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=args.envs)
    config.training(
        train_batch_size_per_learner=STEPS * args.envs // learners,
        minibatch_size=args.minibatch // learners,
        num_epochs=EPOCHS,
        iterate_all_minibatches=True,
        cross_agent_losses=dict(case.couplings),
        coupling_gradient_interval=0,  # a metric of every tenth update
    )
    config.rl_module(model_config=dict(case.model))
    config.learners(num_learners=learners, learner_class=WatchedLearner)
    config.debugging(seed=args.seed, log_level="ERROR").validate()
    return config


class Side:
    """Updates of a learner group on one rollout, and what the last one did."""

    def __init__(
        self, config: JointPPOConfig, spaces: dict[str, Any], rollout: ray.ObjectRef, rows: int, of_wall: bool
    ) -> None:
        self.config, self.rollout, self.rows, self.of_wall = config, rollout, rows, of_wall
        self.group = config.build_learner_group(spaces=spaces)
        threads = self.group.foreach_learner(lambda learner, *_: _torch_threads())
        assert [result.get() for result in threads] == [1] * config.num_learners
        self.work: dict[str, float] = {}

    def update(self) -> Seconds:
        before, started = [] if self.of_wall else self.clock(), time.perf_counter()
        (results,) = self.group.update_from_rollouts(
            [self.rollout],
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.rows},
            num_epochs=EPOCHS,
            minibatch_size=self.config.minibatch_size,
        )
        wall = time.perf_counter() - started
        seconds = wall if self.of_wall else max(np.subtract(self.clock(), before).tolist())
        self.work = {key: value.peek() for key, value in results["__all_modules__"].items() if hasattr(value, "peek")}
        return {"update": seconds, "collectives": self.work.get("collective_seconds", 0.0) / wall, "wall": wall}

    def clock(self) -> list[float]:
        """CPU seconds of each learner."""
        return [result.get() for result in self.group.foreach_learner(lambda learner, *_: time.process_time())]

    def waiting(self) -> Seconds:
        """Shares of one update that the first learner spends on waiting and on sending."""
        self.group.foreach_learner(lambda learner, *_: vars(learner.ranks).update(watched=True, waiting=0.0))
        seconds = self.update()
        found = self.group.foreach_learner(lambda learner, *_: learner.ranks.waiting)
        waiting = next(iter(found)).get() / seconds["wall"]
        return {"waiting": waiting, "sending": seconds["collectives"] - waiting}


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def measure(name: str, args: argparse.Namespace) -> list[Row]:
    """The rows of one case."""
    configs = {learners: config_of(CASES[name], learners, args) for learners in (1, args.learners)}
    runner = JointEnvRunner(config=configs[1], worker_index=0)
    rollout = runner.sample(num_timesteps=STEPS * args.envs)
    rows = sum(map(len, rollout))
    reference = ray.put(rollout)
    spaces, of_wall = runner.get_spaces(), args.clock == "wall"
    sides = {n: Side(config, spaces, reference, rows, of_wall) for n, config in configs.items()}
    runner.stop()
    measured = take_turns({learners: side.update for learners, side in sides.items()}, args.warmup, args.rounds)
    one, several = measured.values()
    shares = sides[args.learners].waiting()
    steps = {side.work["num_minibatch_steps"] for side in sides.values()}
    assert steps == {EPOCHS * rows // args.minibatch}, f"gradient steps {steps} of {rows} rows"
    for side in sides.values():
        side.group.shutdown()

    case = {"case": name, "learners": args.learners, "agents": args.agents, "rows": rows, "minibatch": args.minibatch}
    sent = sides[args.learners].work
    found: dict[tuple[str, str], Sequence[float]] = {
        ("update of one", "s"): [seconds["update"] for seconds in one],
        ("update", "s"): [seconds["update"] for seconds in several],
        ("update", RATIO): [a["update"] / b["update"] for a, b in zip(one, several, strict=True)],
        ("collectives", SHARE): [seconds["collectives"] for seconds in several],
        **{(key, SHARE): [value] for key, value in shares.items()},
        ("collectives", "calls"): [sent["num_collectives"]],
        ("collectives", "MB"): [sent["collective_bytes"] / 1e6],
    }
    return [
        {**case, "quantity": quantity, "unit": unit} | summary(values) for (quantity, unit), values in found.items()
    ]


def draw(rows: list[Row]) -> Figure:
    """The ratios of all cases, a column for each number of learners and clock."""
    ratios = [row for row in rows if row["unit"] == RATIO]
    cases = [name for name in CASES if any(row["case"] == name for row in ratios)]
    figure = new_figure("Several learners against one remote learner", 3.0 + 1.6 * len(cases), 4.6)
    axes = figure.add_subplot()
    panel(axes, "Median, minimum and maximum of the rounds", "times as fast as one learner")
    sides = list(dict.fromkeys((row["learners"], row["clock"]) for row in ratios))
    for k, (learners, clock) in enumerate(sides):
        mine = [row for row in ratios if (row["learners"], row["clock"]) == (learners, clock)]
        places = [cases.index(row["case"]) + 0.3 * (k - (len(sides) - 1) / 2) for row in mine]
        draw_columns(axes, places, mine, 0.28, f"{learners} learners, {clock} clock")
    draw_bar(axes, BAR, f'bar of "{BARRED}", {BAR:g}')
    axes.set_xticks(range(len(cases)), cases)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def show(rows: list[Row], args: argparse.Namespace) -> bool:
    """Prints the figures; whether the bar is met."""
    table = new_table(
        ["case", "one learner", f"{args.learners} learners", RATIO, "collectives", "waiting", "sending", "MB", "bar"]
    )
    table.columns[0].justify, table.columns[0].no_wrap = "left", True
    met = True
    for name in args.cases:
        mine = {(row["quantity"], row["unit"]): row for row in rows if row["case"] == name}
        ratio = mine["update", RATIO]
        barred = name == BARRED and args.learners == 2
        passed = not barred or ratio["median"] >= BAR
        met &= passed
        table.add_row(
            name,
            text(mine["update of one", "s"], " s"),
            text(mine["update", "s"], " s"),
            text(ratio),
            *(text(mine[key, SHARE]) for key in ("collectives", "waiting", "sending")),
            text(mine["collectives", "MB"]),
            "" if not barred else f">= {BAR:g} {'met' if passed else 'missed'}",
        )
    console.print(
        f"{args.agents} agents, {STEPS * args.envs} joint rows, {EPOCHS} epochs of joint minibatches of "
        f"{args.minibatch}: median (min to max); MB: what each learner gives to the others in an update"
    )
    console.print(table)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=4, warmup=1)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="of the table; default: all")
    options.add_argument("--learners", type=int, default=2, help="against one")
    options.add_argument("--agents", type=int, default=AGENTS)
    options.add_argument("--envs", type=int, default=ENVS)
    args = parse(options, argv, agents=2, envs=8, cases=["small"])
    args.minibatch = min(MINIBATCH, STEPS * args.envs)
    start_quietly(num_cpus=1 + args.learners)
    rows: list[Row] = []
    for name in args.cases:
        console.print(name)
        rows += (found := measure(name, args))
        save(NAME, found, args, CASE, draw)
    return 0 if show(rows, args) or args.smoke else 1


if __name__ == "__main__":
    run_script(main)
