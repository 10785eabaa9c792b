"""What does a runner cost the others? Seconds, bytes and memory of an iteration with 1 to 32 light remote runners.

    python benchmarks/many_runners.py                        # 1, 2, 4, 8, 16, 32 runners
    python benchmarks/many_runners.py --no-merging           # and nothing normalised, no connector states on the way

Takes about 3 minutes on two cores, most of it for starting processes. Runners that do not fit into the machine's free
memory (twice what one takes is left over) are not started.

Each runner steps one environment of two agents 16 times; networks of 8 units; one gradient step on 16 joint rows, in
one remote learner; normalised observations, so that moments are merged (but for `--no-merging`). Almost nothing is left
but what an iteration costs anyway. The group grows while it runs (`EnvRunnerGroup.add_workers`).

On a machine with few cores runners wait for each other, which they do not on a cluster. So the CPU seconds of each kind
of process are measured beside the wall's: the driver's are those that grow with the number of runners anywhere.

| quantity                         | meaning                                                                           |
|----------------------------------|-----------------------------------------------------------------------------------|
| iteration, sampling, learner, …  | wall seconds of an iteration and of its parts; "states": of the connectors;       |
|                                  | "merging": the runners' metrics, a part of "sampling"; "rest": all other work     |
| CPU of the driver, learner, …    | CPU seconds of an iteration; of the runners their sum                             |
| metrics, states, rollouts        | bytes of an iteration, of all runners                                             |
| memory of a runner               | bytes that only this process has; "with shares": and its part of common ones      |
| late weights                     | samples with older weights than the learner's, over all iterations and runners    |

Lines `constant + slope * runners` are fitted to the medians by least squares. What 32 runners cannot show is done with
1,000 copies of what one of them sends ("copies", CPU seconds): their metrics and connector states are merged, their
answers are looked up as RLlib does it, and the learner takes in their rollouts.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import copy
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from common.drifting_team import DriftingTeamVector
from common.results import Row, new_figure, panel, parse, parser, save, summary, text
from common.rounds import Stopwatch, console, run_script, start_quietly
from common.tasks import new_table
from matplotlib.figure import Figure
from ray.rllib.core import COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR
from ray.rllib.utils.metrics import SYNCH_ENV_CONNECTOR_STATES_TIMER, SYNCH_WORKER_WEIGHTS_TIMER

from thrust_rllib import JointPPOConfig

NAME = "many_runners"
CASE = ("runners", "merging")
STEPS, AGENTS, HIDDEN = 16, 2, 8
COPIES, LOOKUPS = 1000, {True: 8, False: 4}
"""With and without merging RLlib calls all runners four or two times, and searches its calls twice for each answer."""
FITTED = (
    "iteration", "learner", "states", "weights", "merging", "rest", "CPU of the driver", "CPU of the learner",
    "metrics", "states, bytes", "rollouts",
)  # fmt: skip
CONNECTORS = [COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR]


def config(seed: int, merging: bool) -> JointPPOConfig:
    built = JointPPOConfig().environment(DriftingTeamVector, env_config={"agents": AGENTS})
    built.env_runners(
        num_env_runners=1,
        num_envs_per_env_runner=1,
        num_cpus_per_env_runner=0.01,
        rollout_fragment_length=STEPS,
        normalize_observations=merging,
        merge_env_runner_states="training_only" if merging else False,
        broadcast_env_runner_states=merging,
    )
    built.learners(num_learners=1, num_cpus_per_learner=0.01).reporting(metrics_num_episodes_for_smoothing=5)
    built.rl_module(model_config={"fcnet_hiddens": [HIDDEN]}).callbacks(on_sample_end=note_weights)
    built.training(train_batch_size_per_learner=STEPS, minibatch_size=STEPS, num_epochs=1)
    return built.debugging(seed=seed, log_level="ERROR")


def note_weights(env_runner: Any, **kwargs: Any) -> None:
    """Notes with which weights a runner has sampled."""
    env_runner.sampled_with = [*getattr(env_runner, "sampled_with", []), env_runner._weights_seq_no]


def cpu(*_: Any) -> float:
    return time.process_time()


def memory(*_: Any) -> tuple[float, float]:
    """Bytes that only this process has, and these with its share of what it has in common with others."""
    numbers: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_unit = line.split()
        numbers[name.rstrip(":")] = 1024 * int(size)
    return numbers["Private_Clean"] + numbers["Private_Dirty"], numbers["Pss"]


def available_memory() -> int:
    (line,) = (x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return 1024 * int(line.split()[1])


def size_of(value: Any) -> int:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(data) + sum(buffer.raw().nbytes for buffer in buffers)


class Watched:
    """An algorithm, and what its iterations cost."""

    def __init__(self, seed: int, merging: bool) -> None:
        self.algo = config(seed, merging).build_algo()
        self.group = self.algo.env_runner_group
        self.stopwatch = Stopwatch(self.algo, time.perf_counter)
        self._update = self.algo.learner_group.update_from_rollouts
        self.algo.learner_group.update_from_rollouts = self._watch_rollouts
        self._aggregate = self.algo.metrics.aggregate
        self.algo.metrics.aggregate = self._watch_metrics
        self.merging: dict[str, float] = {}

    def _watch_rollouts(self, references: Sequence[ray.ObjectRef], **kwargs: Any) -> Any:
        self.references = list(references)
        return self._update(references, **kwargs)

    def _watch_metrics(self, results: Any, key: Any = None, **kwargs: Any) -> None:
        began = time.perf_counter()
        self._aggregate(results, key=key, **kwargs)
        self.merging[key] = time.perf_counter() - began

    def grow_to(self, count: int) -> None:
        self.group.add_workers(count - self.group.num_remote_workers())
        self.group.foreach_env_runner(cpu, local_env_runner=False)  # they are up

    def of_runners(self, question: Any) -> list[Any]:
        return self.group.foreach_env_runner(question, local_env_runner=False)

    def cpu_seconds(self) -> dict[str, float]:
        return {
            "CPU of the learner": self.algo.learner_group.ask_first(cpu),
            "CPU of the runners": sum(self.of_runners(cpu)),
            "CPU of the driver": cpu(),
        }

    def measure(self, warmup: int, rounds: int) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Wall seconds of each iteration; CPU seconds, bytes and memory of one."""
        for _ in range(warmup):
            self.stopwatch.iteration()
        before, walls = self.cpu_seconds(), []
        driver = cpu()
        for _ in range(rounds):
            found = self.stopwatch.iteration()
            seconds = self.stopwatch.seconds
            parts = {
                "sampling": found["sampling"],
                "learner": found["learner"],
                "weights": seconds[SYNCH_WORKER_WEIGHTS_TIMER],
                "states": seconds[SYNCH_ENV_CONNECTOR_STATES_TIMER],
            }
            rest = found["iteration"] - sum(parts.values())
            walls.append(found | parts | {"rest": rest, "merging": self.merging["env_runners"]})
        driver = cpu() - driver
        after = self.cpu_seconds()
        once = {name: (after[name] - before[name]) / rounds for name in before} | {"CPU of the driver": driver / rounds}
        states = self.of_runners(lambda runner: runner.get_state(components=CONNECTORS))
        late = self.of_runners(lambda runner: runner.sampled_with)
        memories = self.of_runners(memory)
        newest = self.algo.iteration - 1
        once |= {
            "metrics": float(sum(map(size_of, self.of_runners(_metrics)))),
            "states, bytes": float(sum(map(size_of, states))),
            "rollouts": float(sum(size_of(part) for part in ray.get(self.references))),
            "memory of a runner": float(np.median([unique for unique, _ in memories])),
            "memory with shares": float(np.median([shared for _, shared in memories])),
            "late weights": float(
                sum(newest - back != seq for own in late for back, seq in enumerate(own[: -rounds - 1 : -1]))
            ),
        }
        return walls, once

    def of_copies(self) -> dict[str, float]:
        """CPU seconds that `COPIES` runners like the first would take of the driver and of the learner."""
        results = [copy.deepcopy(self.of_runners(_metrics)[0]) for _ in range(COPIES)]
        state = self.of_runners(lambda runner: runner.get_state(components=CONNECTORS))[0]
        pipeline = self.algo.env_to_module_connector or self.algo.env_runner._env_to_module
        references = [ray.put(ray.get(self.references[0])) for _ in range(COPIES)]
        before = self.algo.learner_group.ask_first(cpu)
        self._update(references, timesteps={}, num_epochs=1, minibatch_size=STEPS)
        return {
            "CPU of the learner": self.algo.learner_group.ask_first(cpu) - before,
            "merging metrics": seconds_of(lambda: self._aggregate(results, key="env_runners")),
            "merging states": seconds_of(lambda: pipeline.merge_states([state[CONNECTORS[0]]] * COPIES)),
            "looking up answers": LOOKUPS[self.algo.config.normalize_observations]
            * seconds_of(lambda: [references.index(call) for call in references]),
        }


def seconds_of(work: Callable[[], Any]) -> float:
    began = cpu()
    work()
    return cpu() - began


def _metrics(runner: Any) -> Any:
    """What a runner reports of an iteration: sampled once more, since a report empties it."""
    runner.sample()
    return runner.get_metrics()


UNITS = {"metrics": "bytes", "states, bytes": "bytes", "rollouts": "bytes", "late weights": "samples"}


def rows_of(case: Row, walls: list[dict[str, float]], once: dict[str, float]) -> list[Row]:
    rows = [case | {"quantity": name, "unit": "s"} | summary([wall[name] for wall in walls]) for name in walls[0]]
    for name, number in once.items():
        unit = UNITS.get(name, "bytes" if name.startswith("memory") else "s")
        rows.append(case | {"quantity": name, "unit": unit} | summary([number]))
    return rows


def fits(rows: Sequence[Row]) -> list[Row]:
    """Constant and slope of every quantity that is fitted, as rows of the case "fit"."""
    found: list[Row] = []
    for name in FITTED:
        mine = [row for row in rows if row["quantity"] == name]
        if len(mine) < 2:
            continue
        slope, constant = np.polyfit([row["runners"] for row in mine], [row["median"] for row in mine], 1)
        for what, number in (("constant", constant), ("of each runner", slope)):
            case = {"runners": "fit", "merging": mine[0]["merging"]}
            found.append(case | {"quantity": f"{name}, {what}", "unit": mine[0]["unit"]} | summary([number]))
    return found


def draw(rows: list[Row]) -> Figure:
    """Wall and CPU seconds of an iteration over the number of runners, with the fitted lines."""
    figure = new_figure("An iteration with light remote runners", 10.5, 4.4)
    rows = [row for row in rows if str(row["merging"]) == str(rows[-1]["merging"])]  # those of the latest run
    lines = {row["quantity"]: row["median"] for row in rows if row["runners"] == "fit"}
    rows = [row for row in rows if row["runners"] not in ("fit", "copies")]
    for axes, title, names in zip(
        figure.subplots(1, 2),
        ("Wall: all processes share this machine's cores", "CPU seconds of single processes"),
        (
            ("iteration", "sampling", "learner", "states", "weights", "rest"),
            ("CPU of the driver", "CPU of the learner"),
        ),
        strict=True,
    ):
        panel(axes, title, "seconds of an iteration")
        for name in names:
            mine = sorted((float(row["runners"]), row["median"]) for row in rows if row["quantity"] == name)
            x, y = np.array(mine).T
            (drawn,) = axes.plot(x, y, marker="o", markersize=3.5, linewidth=1, label=name)
            if f"{name}, of each runner" in lines:
                fitted = lines[f"{name}, constant"] + lines[f"{name}, of each runner"] * x
                axes.plot(x, fitted, linestyle="--", linewidth=1, color=drawn.get_color())
        axes.set_xlabel("runners", fontsize=9)
        axes.legend(frameon=False, fontsize=8.5)
    return figure


def show(rows: Sequence[Row]) -> bool:
    """Prints the figures; whether every sample was taken with the latest weights."""
    counts = list(dict.fromkeys(row["runners"] for row in rows))
    found = {(row["runners"], row["quantity"]): row for row in rows}
    measured = [count for count in counts if count not in ("fit", "copies")]
    names = list(dict.fromkeys((row["quantity"], row["unit"]) for row in rows if row["runners"] in measured))
    table = new_table(["quantity", "unit", *(f"{count} runner(s)" for count in measured)])
    for name, unit in names:
        table.add_row(name, unit, *(text(found[count, name]) for count in measured))
    lines = new_table(["", "quantity", "unit", "number"])
    for row in rows:
        if row["runners"] not in measured:
            case = f"{COPIES} copies" if row["runners"] == "copies" else "fit"
            lines.add_row(case, row["quantity"], row["unit"], f"{row['median']:.4g}")
    console.print(table, lines)
    return all(found[count, "late weights"]["median"] == 0 for count in measured)


def measure(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    watched = Watched(args.seed, not args.no_merging)
    try:
        for count in sorted(args.runners):
            if rows:
                each = next(row["median"] for row in reversed(rows) if row["quantity"] == "memory with shares")
                needed = (count - watched.group.num_remote_workers() + 2) * each
                if needed > available_memory():
                    console.print(f"{count} runners need {needed / 1e9:.1f} GB more, which this machine has not free")
                    break
            watched.grow_to(count)
            case = {"runners": count, "merging": not args.no_merging}
            rows += rows_of(case, *watched.measure(args.warmup, args.rounds))
        copies = [
            {"runners": "copies", "merging": not args.no_merging, "quantity": name, "unit": "s"} | summary([seconds])
            for name, seconds in watched.of_copies().items()
        ]
    finally:
        watched.algo.stop()
    return rows + fits(rows) + copies


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=25, warmup=5)
    options.add_argument("--runners", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options.add_argument("--no-merging", action="store_true", help="no normalisation, no connector states")
    args = parse(options, argv, runners=[1, 2])
    start_quietly(2)
    rows = measure(args)
    save(NAME, rows, args, CASE, draw)
    return 0 if show(rows) else 1


if __name__ == "__main__":
    run_script(main)
