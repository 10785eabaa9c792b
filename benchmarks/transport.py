"""What does an iteration send between processes, how often is a rollout copied, and do the formulas say so?

    python benchmarks/transport.py                       # all cases
    python benchmarks/transport.py --cases coupled       # some of them

Takes about 3 minutes. The formulas are those of docs/cluster.md; the script ends with 1 where a measured number is
further than 5 % from its formula.

| case     | modules                            | sampling | losses that couple agents |
|----------|------------------------------------|----------|---------------------------|
| mlp      | one of 2 × 64 for each agent       | arrays   | none                      |
| coupled  | the same                           | arrays   | `RedundancyPenalty`       |
| shared   | one of 2 × 64 for all              | arrays   | none                      |
| lstm     | one LSTM of 64 for each agent      | arrays   | none                      |
| episodes | one of 2 × 64 for each agent       | episodes | none                      |

4 agents that see 16 numbers and have 5 actions, 2 remote runners of 16 environments, 2 remote learners, 2,048 joint
rows, 4 epochs of joint minibatches of 256. Measured, the median of `--rounds` iterations:

- rollouts: the size of Ray's objects, of all runners; "in band" is what is pickled beside the arrays;
- weights: what the driver puts into the object store for the runners; the same bytes come to it from the first learner;
- connector states: what one runner hands to the driver, and gets back; metrics: of all runners, of all learners;
- collectives: what each learner gives into them, and their number.

Copies of the observations on their way, found in this process: whether the arrays of two stages share memory, and for
the learner's rows the peak of numpy's memory.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import pickle
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from common.drifting_team import ACTIONS, BATCH, EPOCHS, LENGTH, MINIBATCH, OBS, DriftingTeam, DriftingTeamVector
from common.results import Row, about, csv_path, merged, parse, parser, summary, write
from common.rounds import console, run_script, start_quietly
from common.tasks import new_table
from ray.rllib.core import COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR, COMPONENT_RL_MODULE

from thrust_rllib import JointEnvRunner, JointPPOConfig, RedundancyPenalty
from thrust_rllib.joint_rows import joint_rows
from thrust_rllib.sampling.rollout import RolloutRecorder

NAME = "transport"
CASE = ("case",)
TOLERANCE = 0.05
AGENTS, ENVS, RUNNERS, LEARNERS, HIDDEN, CELL, SEQUENCE = 4, 16, 2, 2, 64, 64, 32
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "coupled": {"couplings": {"redundancy": RedundancyPenalty()}},
    "shared": {"policies": "shared"},
    "lstm": {"model": {"cell": "lstm", "cell_size": CELL, "max_seq_len": SEQUENCE}},
    "episodes": {"sampling": "episodes"},
}


def config(case: str, runners: int = RUNNERS, learners: int = LEARNERS) -> JointPPOConfig:
    options, many = CASES[case], max(learners, 1)
    env = DriftingTeam if case == "episodes" else DriftingTeamVector
    built = JointPPOConfig().environment(env, env_config={"agents": AGENTS})
    built.env_runners(
        num_env_runners=runners,
        num_envs_per_env_runner=ENVS,
        normalize_observations=True,
        sampling=options.get("sampling", "arrays"),
    )
    built.learners(num_learners=learners).multi_agent(policies=options.get("policies", "per_agent"))
    built.rl_module(model_config=options.get("model", {"fcnet_hiddens": [HIDDEN, HIDDEN]}))
    return built.training(
        train_batch_size_per_learner=BATCH // many,
        minibatch_size=MINIBATCH // many,
        num_epochs=EPOCHS,
        iterate_all_minibatches=True,
        cross_agent_losses=options.get("couplings", {}),
    ).debugging(seed=0, log_level="ERROR")


# --- the formulas of docs/cluster.md ------------------------------------------------------------------------------


def network_numbers(case: str, acting: bool = False) -> int:
    """P, the parameters of all modules; `acting` leaves out the value head that runners do without."""
    modules = 1 if CASES[case].get("policies") == "shared" else AGENTS
    trunk = (OBS + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN
    if case == "lstm":
        trunk, acting = 4 * CELL * (OBS + CELL + 2), False  # the whole module goes to the runners
    return modules * (trunk + (HIDDEN + 1) * ACTIONS + (0 if acting else HIDDEN + 1))


def rollout_bytes(case: str, cut_rows: float) -> float:
    """Of all runners: M rows, K of which are followed by an observation, C training sequences."""
    obs, action, state = 4 * OBS, 8, 2 * 4 * CELL
    found = BATCH * (AGENTS * (obs + action + 11) + 2) + cut_rows * (AGENTS * obs + 8)
    if case == "lstm":
        found += BATCH / SEQUENCE * (AGENTS * state + 8)
    return found


def collective_bytes(case: str, cut_rows: float) -> tuple[float, int]:
    """What a learner gives into the collectives of an update, and their number."""
    modules = 1 if CASES[case].get("policies") == "shared" else AGENTS
    steps = EPOCHS * BATCH // MINIBATCH
    tensors = 8 * modules  # weights and biases of two layers, or of the cell, and of two heads
    width = 3 * AGENTS + ((HIDDEN + ACTIONS) * AGENTS if "couplings" in CASES[case] else 0)
    gradients = network_numbers(case) + tensors + 2 * modules + 1
    each = 4 * (MINIBATCH // LEARNERS * width + gradients)
    return 8 * (4 + RUNNERS) + 4 * AGENTS * (BATCH + cut_rows) + steps * each, 3 + 2 * steps


# --- what is measured ---------------------------------------------------------------------------------------------


def pickled(value: Any) -> tuple[int, int]:
    """Bytes of the pickle itself, and of the arrays beside it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(data), sum(buffer.raw().nbytes for buffer in buffers)


class Watched:
    """An algorithm whose transport is looked at: what the driver hands over, puts and merges in an iteration."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.algo = config(case).build_algo()
        self.found: dict[str, list[float]] = {}
        self._update = self.algo.learner_group.update_from_rollouts
        self.algo.learner_group.update_from_rollouts = self._watch_rollouts
        self._aggregate = self.algo.metrics.aggregate
        self.algo.metrics.aggregate = self._watch_metrics
        self._put = ray.put
        self._now: dict[str, float] = {}

    def _watch_rollouts(self, references: Sequence[ray.ObjectRef], **kwargs: Any) -> Any:
        self._references = list(references)
        return self._update(references, **kwargs)

    def _watch_metrics(self, results: Any, key: Any = None, **kwargs: Any) -> Any:
        self._now[f"metrics of {'learners' if key == 'learners' else 'runners'}"] = sum(pickled(results))
        return self._aggregate(results, key=key, **kwargs)

    def _watch_put(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, dict) and COMPONENT_RL_MODULE in value:
            self._now["weights"] = sum(pickled(value))
        return self._put(value, *args, **kwargs)

    def iteration(self) -> None:
        self._now = {}
        ray.put = self._watch_put
        try:
            result = self.algo.train()["learners"]["__all_modules__"]
        finally:
            ray.put = self._put
        parts = ray.get(self._references)
        sizes = ray.experimental.get_object_locations(self._references)
        state = self.algo.env_runner_group.foreach_env_runner(_connector_states, local_env_runner=False)[0]
        self._now |= {
            "rollouts": sum(found["object_size"] for found in sizes.values()),
            "rollouts, in band": sum(pickled(part)[0] for part in parts),
            "connector states, a runner": sum(pickled(state)),
            "collectives, a learner": float(result["collective_bytes"]),
            "collectives, calls": float(result["num_collectives"]),
        }
        if self.case == "episodes":
            self.cut_rows = ENVS * RUNNERS * (1 + BATCH / RUNNERS / ENVS / LENGTH)
        else:
            self.cut_rows = sum(len(batch.bootstrap_rows) for part in parts for batch in part)
        for name, number in self._now.items():
            self.found.setdefault(name, []).append(number)

    def rows(self) -> list[Row]:
        collectives, calls = collective_bytes(self.case, self.cut_rows)
        formulas: dict[str, float] = {
            "rollouts": rollout_bytes(self.case, self.cut_rows),
            "weights": 4 * network_numbers(self.case, acting=True),
            "collectives, a learner": collectives,
            "collectives, calls": calls,
        }
        if self.case == "episodes":  # RLlib's episodes: many small arrays of which the package knows nothing
            del formulas["rollouts"]
        rows = []
        for name, numbers in self.found.items():
            row = {"case": self.case, "quantity": name, "unit": "calls" if "calls" in name else "bytes"}
            formula = formulas.get(name)
            row |= summary(numbers) | {"formula": "" if formula is None else f"{formula:.6g}"}
            rows.append(row | {"of formula": "" if formula is None else f"{np.median(numbers) / formula:.4f}"})
        return rows


def _connector_states(runner: Any) -> dict[str, Any]:
    return runner.get_state(components=[COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR])


# --- copies -------------------------------------------------------------------------------------------------------


def copies(case: str) -> list[Row]:
    """How often the observations of a rollout are written anew from the runner's arrays to the learner's tensors."""
    settings = config(case, runners=0, learners=0)
    settings.validate()
    runner = JointEnvRunner(config=settings, worker_index=0)
    recorders: list[RolloutRecorder] = []
    finish = RolloutRecorder.finish

    def watched(recorder: RolloutRecorder, *args: Any, **kwargs: Any) -> Any:
        recorders.append(recorder)
        return finish(recorder, *args, **kwargs)

    RolloutRecorder.finish = watched  # type: ignore[method-assign]
    try:
        (batch,) = runner.sample(num_timesteps=BATCH)
    finally:
        RolloutRecorder.finish = finish  # type: ignore[method-assign]
    streams = next(iter(batch.modules.values()))
    reference = ray.put([batch])
    (first,), (second,) = ray.get(reference), ray.get(reference)
    arrived = next(iter(first.modules.values())).obs
    same = np.shares_memory(arrived, next(iter(second.modules.values())).obs) and not arrived.flags.writeable
    total = sum(streams.obs.nbytes for streams in first.modules.values())
    tracemalloc.start()
    rows = joint_rows(
        [first],
        values_of=lambda module_id, obs, sequences: obs[:, 0] * 0,
        memories={},
        normalizers={},
        gamma=dict.fromkeys(first.modules, 0.99),
        lambda_=dict.fromkeys(first.modules, 0.95),
        bootstrap=True,
        standardize_rollout=True,
        device="cpu",
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensors = next(iter(rows.modules.values())).obs.numpy()
    numbers = {
        "copies: runner's arrays to batch": int(not np.shares_memory(recorders[0].array(0, "obs"), streams.obs)),
        "copies: batch to shared memory": int(not np.shares_memory(streams.obs, arrived)),
        "copies: shared memory to the learner's batch": int(not same),
        "copies: the learner's batch to rows": int(not np.shares_memory(arrived, tensors)),
        "peak of numpy's memory for the rows": peak / total,
    }
    units = {name: "times" if name.startswith("copies") else "of the observations" for name in numbers}
    blank = {"formula": "", "of formula": ""}
    return [
        {"case": case, "quantity": name, "unit": units[name], **summary([number]), **blank}
        for name, number in numbers.items()
    ]


def measure(case: str, args: argparse.Namespace) -> list[Row]:
    watched = Watched(case)
    try:
        for _ in range(args.warmup):
            watched.algo.train()
        for _ in range(args.rounds):
            watched.iteration()
    finally:
        watched.algo.stop()
    return watched.rows() + (copies(case) if case in ("mlp", "shared") else [])


def show(rows: Sequence[Row]) -> bool:
    """Prints the figures; whether all formulas hold."""
    table = new_table(["case", "quantity", "unit", "measured", "formula", "of formula"])
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("case", "quantity", "unit")), f"{row['median']:,.4g}",
                      f"{float(row['formula']):,.4g}" if row["formula"] else "", row["of formula"])  # fmt: skip
    console.print(table)
    return all(abs(float(row["of formula"]) - 1) <= TOLERANCE for row in rows if row["of formula"])


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=3, warmup=1)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parse(options, argv)
    start_quietly(RUNNERS + LEARNERS)
    rows = [row for case in args.cases for row in measure(case, args)]
    if (path := csv_path(NAME, args)) is not None:
        new = [{key: str(value) for key, value in (row | about(NAME, args)).items()} for row in rows]
        write(path, merged(path, new, CASE), list(new[0]))
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return 0 if show(rows) else 1


if __name__ == "__main__":
    run_script(main)
