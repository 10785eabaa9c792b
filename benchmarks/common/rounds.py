"""Rounds in turn: every side runs once in each round, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import ENV_RUNNER_SAMPLING_TIMER, LEARNER_UPDATE_TIMER
from rich.console import Console
from rich.progress import track

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TIMERS = {"sampling": ENV_RUNNER_SAMPLING_TIMER, "learner": LEARNER_UPDATE_TIMER}
PHASES = (*TIMERS, "iteration")
Seconds = dict[str, float]
console = Console(width=None if sys.stdout.isatty() else 150)


class Stopwatch:
    """Runs training iterations of one algorithm and notes the seconds of each phase.

    Timers are put around the `log_time` sections of its `training_step`; "iteration" is all of `Algorithm.train`.
    """

    def __init__(self, algo: Algorithm, clock: Callable[[], float]) -> None:
        self.algo = algo
        self.clock = clock
        self.seconds: Seconds = {}
        self.result: dict[str, Any] = {}
        self.log_time = algo.metrics.log_time
        algo.metrics.log_time = self._log_time

    @contextmanager
    def _log_time(self, key: Any, **kwargs: Any) -> Iterator[None]:
        before = self.clock()
        with self.log_time(key, **kwargs):
            yield
        self.seconds[key[-1]] = self.clock() - before

    def iteration(self) -> Seconds:
        before = self.clock()
        self.result = self.algo.train()
        total = self.clock() - before
        return {**{phase: self.seconds[timer] for phase, timer in TIMERS.items()}, "iteration": total}


def take_turns(sides: Mapping[Any, Callable[[], Seconds]], warmup: int, rounds: int) -> dict[Any, list[Seconds]]:
    """Seconds {side: [one dict per round]}; the order turns round from round to round, warm-up rounds are left out."""
    measured: dict[Any, list[Seconds]] = {name: [] for name in sides}
    for number in track(range(warmup + rounds), "rounds", console=console, transient=True):
        for name in sides if number % 2 == 0 else reversed(sides):
            seconds = sides[name]()
            if number >= warmup:
                measured[name].append(seconds)
    return measured


def start_quietly(num_cpus: int = 1) -> None:
    """One torch thread, Ray in this process's own small cluster of so many CPUs, and none of their remarks."""
    warnings.filterwarnings("ignore")
    for name in ("ray", "ray.rllib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        ignore_reinit_error=True,
        logging_level="ERROR",
    )


def run_script(main: Callable[[], int]) -> NoReturn:
    """Ends this process with the exit code of `main`; Ctrl-C without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
