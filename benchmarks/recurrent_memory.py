"""How much memory does an update of whole-rollout sequences take, against what back-propagation through time must hold?

    python benchmarks/recurrent_memory.py                                   # all cases, each in a process of its own
    python benchmarks/recurrent_memory.py --cells lstm --sequences 16

One agent, 16 environments, 2,048 steps that no episode's end interrupts, a cell of 128, sequences of the whole rollout,
one epoch. A minibatch holds all 16 sequences (32,768 rows), or one (2,048 rows).

"needed" is what must be held until the backward pass, for each row of a minibatch, in float32 (inputs and heads aside):

    LSTM  i, f, g, o, c, h        6 H numbers    3,072 bytes at H = 128
    GRU   r, z, n, U_n h, h       5 H numbers    2,560 bytes

"bare" is the peak of forward and backward pass of torch's own layer on as many sequences, alone: its LSTM on the CPU,
oneDNN's, keeps about 15 H numbers a row. "peak" is that of the learner's update, which also holds the features that
heads and couplings read, their gradients, and the values of all 32,768 rows before the first minibatch.

A peak is the highest resident memory of the process during the call (`VmHWM`, which the kernel counts, so that nothing
is missed between samples), less the resident memory just before it; freed memory is given back before (`malloc_trim`).
Each call goes ahead once unmeasured, for what is made once. Linux with glibc only. Takes about a minute.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import copy
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.results import RESULTS, Row, command
from common.rounds import console, run_script, start_quietly
from common.runs import add_rows, as_text, run_each, versions
from common.tasks import new_table
from torch import nn

from thrust_rllib import JointPPOConfig

NAME = "recurrent_memory"
CASE = ("cell", "cell_size", "steps", "envs", "sequences")
NUMBERS_PER_UNIT = {"lstm": 6, "gru": 5}  # see above
FLOAT32 = 4
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
MIB = 2**20


@dataclass
class Outcome:
    """One measured update; memory in MiB, `bytes_per_row` of the peak, `seconds` of the update."""

    cell: str
    cell_size: int
    steps: int
    envs: int
    sequences: int
    needed: float = 0.0
    bare: float = 0.0
    peak: float = 0.0
    peak_by_needed: float = 0.0
    peak_by_bare: float = 0.0
    bytes_per_row: float = 0.0
    seconds: float = 0.0


def config_of(cell: str, cell_size: int, steps: int, envs: int, sequences: int) -> JointPPOConfig:
    """A rollout of `steps` by `envs`, trained on in minibatches of that many whole sequences."""
    return (
        JointPPOConfig()
        .environment("debug/random_observations", env_config={"agents": 1, "episode_length": 1000 * steps})
        .env_runners(num_envs_per_env_runner=envs)
        .training(train_batch_size_per_learner=steps * envs, minibatch_size=steps * sequences, num_epochs=1)
        .training(iterate_all_minibatches=True)
        .rl_module(model_config={"cell": cell, "cell_size": cell_size})
        .debugging(seed=0)
    )


def resident(name: str) -> float:
    """MiB of a line of /proc/self/status: "VmRSS" now, "VmHWM" at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError(f"/proc/self/status has no {name}; this benchmark needs Linux")


def peak_of(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `call` returns, the highest resident memory above that before it (MiB), and its seconds."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before, start = resident("VmRSS"), time.perf_counter()
    result = call()
    return result, resident("VmHWM") - before, time.perf_counter() - start


def bare_peak(cell: nn.Module, sequences: int, steps: int, num_inputs: int) -> float:
    """MiB of forward and backward pass of the layer alone."""
    inputs = torch.randn(sequences, steps, num_inputs)

    def both() -> None:
        cell(inputs)[0].sum().backward()
        cell.zero_grad()

    both()
    return peak_of(both)[1]


def measure(cell: str, cell_size: int, steps: int, envs: int, sequences: int) -> Outcome:
    """Measures the second update of a fresh process."""
    rows = steps * sequences
    outcome = Outcome(cell, cell_size, steps, envs, sequences)
    outcome.needed = rows * NUMBERS_PER_UNIT[cell] * cell_size * FLOAT32 / MIB
    algo = config_of(cell, cell_size, steps, envs, sequences).build_algo()
    try:
        update = algo.learner_group.update_from_rollouts

        def measured(*args: Any, **kwargs: Any) -> Any:
            results, outcome.peak, outcome.seconds = peak_of(lambda: update(*args, **kwargs))
            return results

        algo.train()
        algo.learner_group.update_from_rollouts = measured
        algo.train()
        layer = copy.deepcopy(algo.get_module("agent_0").cell)
    finally:
        algo.stop()
    outcome.bare = bare_peak(layer, sequences, steps, layer.input_size)
    outcome.peak_by_needed, outcome.peak_by_bare = outcome.peak / outcome.needed, outcome.peak / outcome.bare
    outcome.bytes_per_row = outcome.peak * MIB / rows
    return outcome


def arguments_of(cell: str, sequences: int, args: argparse.Namespace) -> list[str]:
    sizes = ["--cell-size", f"{args.cell_size}", "--steps", f"{args.steps}", "--envs", f"{args.envs}"]
    return ["--cells", cell, "--sequences", f"{sequences}", *sizes]


def show(rows: Sequence[Row]) -> None:
    columns = (
        *CASE, "needed", "bare", "peak", "peak_by_needed", "peak_by_bare", "bytes_per_row", "seconds",
    )  # fmt: skip
    table = new_table([column.replace("_", " ") for column in columns])
    for row in rows:
        table.add_row(*(row[key] if key in CASE else f"{float(row[key]):.4g}" for key in columns))
    console.print(table, "needed, bare, peak: MiB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=NUMBERS_PER_UNIT, default=list(NUMBERS_PER_UNIT))
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1], help="sequences in a minibatch")
    parser.add_argument("--cell-size", type=int, default=128, help="H")
    parser.add_argument("--steps", type=int, default=2048, help="of an environment in a rollout")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.csv", help="CSV file")
    args = parser.parse_args(argv)
    cases = [(cell, sequences) for cell in args.cells for sequences in args.sequences]
    add = partial(add_rows, args.output, case=CASE)
    if len(cases) > 1:
        rows = run_each(__file__, [arguments_of(*case, args) for case in cases], add)
    else:
        start_quietly()
        ((cell, sequences),) = cases
        outcome = measure(cell, args.cell_size, args.steps, args.envs, sequences)
        rows = [as_text(asdict(outcome) | versions() | {"command": command(NAME, arguments_of(cell, sequences, args))})]
        add(rows)
    show(rows)
    return 0


if __name__ == "__main__":
    run_script(main)
