"""Stock RLlib PPO against JointPPO on the same environment: seconds per iteration, for sampling and for learning.

    python benchmarks/compare_rllib.py                      # 4 agents, 16 environments, the table below
    python benchmarks/compare_rllib.py --envs 1 --rounds 5
    python benchmarks/compare_rllib.py --agents 16 --vectorized --memory

Both sides run in this process and take turns, so that whatever else the machine does hits both: a round is one
training iteration of each side (who goes first changes from round to round), a ratio is made within a round. The
first `--warmup` rounds are thrown away.

Equal on both sides: the class `DriftingTeam` (one object per environment, stepped one after another), spaces Box(16)
and Discrete(5), episodes of 100, one module of 2 × 64 tanh with a shared trunk per agent, one local runner, 2048 steps
per iteration, 4 epochs of minibatches of 256, the PPO constants, no KL loss, RLlib's environment checks, metrics and
statistics, one torch thread. What is left differs on purpose: the stock learner takes 1 to 4 more minibatches per
iteration (it keeps the artificial last row of each episode), JointPPO normalises value targets (its default).
`--vectorized` adds a third line: JointPPO on `DriftingTeamVector`, the same rules as a `VectorJointEnv`.

Timers are put around the same `log_time` sections of both `training_step`s; "iteration" is all of `Algorithm.train`. On
a busy machine `--clock cpu` takes this process's CPU seconds instead of the wall's. Memory (`--memory`) is the peak
resident set of a fresh process per side, imports included.
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
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.utils.metrics import ENV_RUNNER_SAMPLING_TIMER, LEARNER_UPDATE_TIMER
from rich.console import Console
from rich.progress import track
from rich.table import Table

import thrust_rllib
from thrust_rllib import JointPPOConfig, JointStepResult, VectorJointEnv

RESULTS = Path(__file__).parent / "results" / "compare_rllib.csv"
OBS, ACTIONS, LENGTH = 16, 5, 100
BATCH, MINIBATCH, EPOCHS = 2048, 256, 4
PHASES = {"sampling": ENV_RUNNER_SAMPLING_TIMER, "learner": LEARNER_UPDATE_TIMER}
CASE = ("agents", "envs", "side", "clock")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
console = Console()


# --- the environment --------------------------------------------------------------------------------------------------
# Each agent has a point in [-1, 1]^16 that drifts and is pushed by its action and by noise (drawn at the reset); it is
# paid for the action that its point asks for. Little work, but real: two products, one tanh.


def rules() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drift [16, 16], push of each action [5, 16] and what a point asks for [16, 5]."""
    rng = np.random.default_rng(0)
    drift = np.linalg.qr(rng.normal(size=(OBS, OBS)))[0]
    return tuple(
        m.astype(np.float32) for m in (drift, rng.normal(size=(ACTIONS, OBS)) / 4, rng.normal(size=(OBS, ACTIONS)))
    )


class DriftingTeam(MultiAgentEnv):
    """The environment of both sides."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.agents = self.possible_agents = [f"agent_{i}" for i in range(config["agents"])]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (OBS,), np.float32) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(ACTIONS) for a in self.agents}
        self.drift, self.push, self.asks = rules()
        self.rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        self.points = self.rng.uniform(-1, 1, (len(self.agents), OBS)).astype(np.float32)
        self.noise = 0.1 * self.rng.standard_normal((LENGTH, len(self.agents), OBS), np.float32)
        return dict(zip(self.agents, self.points, strict=True)), {}

    def step(self, action_dict: dict) -> tuple[dict, dict, dict, dict, dict]:
        actions = np.fromiter((action_dict[a] for a in self.agents), np.int64, len(self.agents))
        right = (self.points @ self.asks).argmax(axis=1) == actions
        self.points = np.tanh(self.points @ self.drift + self.push[actions] + self.noise[self.t])
        self.t += 1
        rewards = dict(zip(self.agents, right.astype(float).tolist(), strict=True))
        observations = dict(zip(self.agents, self.points, strict=True))
        return observations, rewards, {"__all__": False}, {"__all__": self.t >= LENGTH}, {}


class DriftingTeamVector(VectorJointEnv):
    """The same rules for all environments at once."""

    stacked = True

    def __init__(self, num_envs: int, agents: int) -> None:
        self.num_envs = num_envs
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (OBS,), np.float32) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(ACTIONS) for a in self.possible_agents}
        self.drift, self.push, self.asks = rules()
        self.rngs = [np.random.default_rng() for _ in range(num_envs)]
        self.t = np.zeros(num_envs, np.int64)
        self.points = np.zeros((agents, num_envs, OBS), np.float32)
        self.noise = np.zeros((LENGTH, agents, num_envs, OBS), np.float32)
        self.everywhere = np.arange(num_envs)

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> np.ndarray:
        for e, seed in enumerate(seeds or []):
            if seed is not None:
                self.rngs[e] = np.random.default_rng(seed)
        self._start(range(self.num_envs))
        return self.points.copy()

    def _start(self, envs: Any) -> None:
        for e in envs:
            self.t[e] = 0
            self.points[:, e] = self.rngs[e].uniform(-1, 1, (len(self.points), OBS))
            self.noise[:, :, e] = 0.1 * self.rngs[e].standard_normal((LENGTH, len(self.points), OBS), np.float32)

    def step_joint(self, actions: np.ndarray) -> JointStepResult:
        right = (self.points @ self.asks).argmax(axis=2) == actions
        noise = self.noise[self.t, :, self.everywhere].swapaxes(0, 1)
        self.points = np.tanh(self.points @ self.drift + self.push[actions] + noise)
        self.t += 1
        over = self.t >= LENGTH
        final = self.points.copy() if over.any() else None
        self._start(np.flatnonzero(over))
        return JointStepResult(
            rewards=right.astype(np.float32),
            observations=self.points.copy(),
            terminated=np.zeros(self.num_envs, bool),
            truncated=over,
            final_observations=final,
        )


# --- the sides --------------------------------------------------------------------------------------------------------


def stock(args: argparse.Namespace) -> Algorithm:
    agents = [f"agent_{i}" for i in range(args.agents)]
    config = (
        PPOConfig()
        .environment(DriftingTeam, env_config={"agents": args.agents})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=args.envs)
        .multi_agent(policies=set(agents), policy_mapping_fn=lambda agent, episode, **kwargs: agent)
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True)
        )
        .training(vf_clip_param=float("inf"), vf_loss_coeff=0.5, entropy_coeff=0.01, clip_param=0.2)
    )
    return _shared(config, args)


def joint(args: argparse.Namespace) -> Algorithm:
    config = JointPPOConfig().environment(DriftingTeam, env_config={"agents": args.agents})
    return _shared(_joint(config, args), args)


def vectorized(args: argparse.Namespace) -> Algorithm:
    config = JointPPOConfig().environment(DriftingTeamVector, env_config={"agents": args.agents})
    return _shared(_joint(config, args), args)


def _joint(config: JointPPOConfig, args: argparse.Namespace) -> JointPPOConfig:
    return config.env_runners(num_env_runners=0, num_envs_per_env_runner=args.envs).training(
        iterate_all_minibatches=True
    )


def _shared(config: PPOConfig, args: argparse.Namespace) -> Algorithm:
    config.training(
        train_batch_size_per_learner=BATCH,
        minibatch_size=MINIBATCH,
        num_epochs=EPOCHS,
        lr=3e-4,
        gamma=0.99,
        lambda_=0.95,
        grad_clip=0.5,
        use_kl_loss=False,
    ).debugging(seed=args.seed, log_level="ERROR")
    return config.build_algo()


SIDES: dict[str, Callable[[argparse.Namespace], Algorithm]] = {"stock": stock, "joint": joint, "vectorized": vectorized}


# --- measuring --------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Runs training iterations of one algorithm and notes the seconds of each phase."""

    def __init__(self, algo: Algorithm, clock: Callable[[], float]) -> None:
        self.algo = algo
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.log_time = algo.metrics.log_time
        algo.metrics.log_time = self._log_time

    @contextmanager
    def _log_time(self, key: Any, **kwargs: Any) -> Iterator[None]:
        before = self.clock()
        with self.log_time(key, **kwargs):
            yield
        self.seconds[key[-1]] = self.clock() - before

    def iteration(self) -> dict[str, float]:
        before = self.clock()
        self.algo.train()
        total = self.clock() - before
        return {**{phase: self.seconds[timer] for phase, timer in PHASES.items()}, "iteration": total}


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Seconds {side: [one dict per round]}."""
    names = ["stock", "joint"] + (["vectorized"] if args.vectorized else [])
    sides = {name: Stopwatch(SIDES[name](args), CLOCKS[args.clock]) for name in names}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in track(range(args.warmup + args.rounds), "rounds", console=console, transient=True):
        for name in names if number % 2 == 0 else reversed(names):
            seconds = sides[name].iteration()
            if number >= args.warmup:
                rounds[name].append(seconds)
    for side in sides.values():
        side.algo.stop()
    return rounds


def peak_memory(args: argparse.Namespace) -> dict[str, float]:
    """Peak resident set in MB of one fresh process per side."""
    peaks = {}
    for name in ["stock", "joint"] + (["vectorized"] if args.vectorized else []):
        command = [sys.executable, __file__, "--side", name, "--rounds", str(args.rounds), "--seed", str(args.seed)]
        command += ["--agents", str(args.agents), "--envs", str(args.envs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = float(done.stdout.split()[-1])
    return peaks


def run_one_side(args: argparse.Namespace) -> None:
    """What `--side` does: train, then print the peak resident set in MB."""
    algo = SIDES[args.side](args)
    for _ in range(args.warmup + args.rounds):
        algo.train()
    # VmHWM and not getrusage, whose maximum a child takes over from the process that started it.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


# --- reporting --------------------------------------------------------------------------------------------------------


def rows_of(
    args: argparse.Namespace, rounds: dict[str, list[dict[str, float]]], memory: dict[str, float]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(side: str, quantity: str, unit: str, values: Sequence[float]) -> None:
        numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rounded = {k: float(f"{v:.4g}") for k, v in numbers.items()}
        rows.append(
            {"agents": args.agents, "envs": args.envs, "side": side, "quantity": quantity, "unit": unit} | rounded
        )

    for side, measured in rounds.items():
        for phase in (*PHASES, "iteration"):
            add(side, phase, "s", [seconds[phase] for seconds in measured])
            if side != "stock":
                pairs = zip(rounds["stock"], measured, strict=True)
                add(side, phase, "times faster than stock", [a[phase] / b[phase] for a, b in pairs])
    for side, peak in memory.items():
        add(side, "peak memory", "MB", [peak])
        if side != "stock":
            add(side, "peak memory", "times stock", [peak / memory["stock"]])
    return rows


def save(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Writes the rows; they replace earlier ones of the same agents, environments, side and clock."""
    about = {
        "clock": args.clock,
        "rounds": args.rounds,
        "seed": args.seed,
        "thrust_rllib": thrust_rllib.__version__,
        "ray": ray.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "command": shlex.join(["python", "benchmarks/compare_rllib.py", *args.given]),
    }
    new = [{key: str(value) for key, value in {**row, **about}.items()} for row in rows]
    case = {tuple(row[key] for key in CASE) for row in new}
    old = []
    if path.exists():
        with path.open(newline="") as file:
            old = [row for row in csv.DictReader(file) if tuple(row[key] for key in CASE) not in case]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(new[0]))
        writer.writeheader()
        writer.writerows(old + new)


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.agents} agents, {args.envs} environments, {args.clock} clock: median (min to max)")
    for column in ("side", "quantity", "value", "against stock"):
        table.add_column(column, justify="left" if column in ("side", "quantity") else "right")

    def text(row: dict[str, Any], unit: str) -> str:
        spread = "" if row["min"] == row["max"] else f" ({row['min']:.3g} to {row['max']:.3g})"
        return f"{row['median']:.3g}{unit}{spread}"

    ratios = {(row["side"], row["quantity"]): row for row in rows if "stock" in row["unit"]}
    for row in rows:
        if row["unit"] in ("s", "MB"):
            ratio = ratios.get((row["side"], row["quantity"]))
            against = "" if ratio is None else text(ratio, ratio["unit"].removesuffix(" than stock")[5:] and "x")
            table.add_row(row["side"], row["quantity"], text(row, " " + row["unit"]), against)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--envs", type=int, default=16, help="environments in the one runner")
    parser.add_argument("--rounds", type=int, default=9, help="measured iterations of each side")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before these, not counted")
    parser.add_argument("--vectorized", action="store_true", help="add JointPPO on the vectorised environment")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--memory", action="store_true", help="also measure the peak memory, in one process per side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file")
    parser.add_argument("--side", choices=SIDES, help="train this side only and print its peak memory in MB")
    args = parser.parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)

    warnings.filterwarnings("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True, logging_level="ERROR")
    if args.side:
        return run_one_side(args)
    rows = rows_of(args, measure(args), peak_memory(args) if args.memory else {})
    save(args.output, rows, args)
    show(rows, args)


if __name__ == "__main__":
    main()
