"""What scripts of several experiments share: a case is a dict of arguments, a run of it gives rows."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from ray.rllib.algorithms.algorithm import Algorithm
from rich.progress import track

from common.results import RESULTS, Row, command, read
from common.rounds import console, start_quietly
from common.runs import add_rows, as_text, run_each, versions
from thrust_rllib import JointPPOConfig

Case = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One subcommand of a script.

    script: its name, without ".py". name: of the subcommand; rows go to `results/{script}_{name}.csv`. key: columns
    that name a row. measure: a case's arguments to its rows. show: prints all rows and says whether the bars are met.
    draw: all rows.
    """

    script: str
    name: str
    key: tuple[str, ...]
    measure: Callable[..., list[Row]]
    show: Callable[[Sequence[Row]], bool]
    draw: Callable[[Sequence[Row]], Figure]

    def conduct(self, cases: Sequence[Case], jobs: int, output: Path | None) -> bool:
        """Measures the cases, one here, several in processes of their own, and adds them to the file and the plot."""
        path = output or RESULTS / f"{self.script}_{self.name}.csv"
        add = partial(add_rows, path, case=self.key)
        arguments = [[self.name, *options(case)] for case in cases]
        if len(cases) == 1:
            start_quietly()
            about = versions() | {"command": command(self.script, arguments[0])}
            add([as_text(row | about) for row in self.measure(**cases[0])])
        else:
            run_each(str(Path(__file__).parents[1] / f"{self.script}.py"), arguments, add, jobs)
        rows = read(path)
        self.draw(rows).savefig(path.with_suffix(".png"))
        return self.show(rows)


def options(case: Case) -> list[str]:
    """`--name value` of each argument; a tuple repeats its option."""
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in case.items()}
    return [text for name, each in values.items() for value in each for text in (f"--{name}", f"{value}")]


def product(**values: Iterable[Any]) -> list[Case]:
    """A case for each choice of one value per argument; the last argument changes fastest."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


@contextmanager
def trainer(config: JointPPOConfig) -> Iterator[Algorithm]:
    algo = config.build_algo()
    try:
        yield algo
    finally:
        algo.stop()


@dataclass
class Progress:
    """What training leaves: seconds, environment steps, and {metric: [(steps, number)]}."""

    seconds: float = 0.0
    env_steps: int = 0
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def late(self, name: str) -> float:
        """The mean over the last quarter of the updates; NaN where there is none."""
        values = [value for _, value in self.curves[name]]
        return statistics.fmean(values[-max(1, len(values) // 4) :]) if values else float("nan")


def train_through(algo: Algorithm, steps: int, metrics: Mapping[str, str]) -> Progress:
    """Trains as many whole batches as fit into that number of environment steps.

    Args:
        algo: is trained.
        steps: environment steps.
        metrics: {name: path in the result, parts separated by "/"}; where there is none the point is left out.
    """
    progress = Progress()
    batches = range(steps // algo.config.total_train_batch_size)
    for _ in track(batches, "training", console=console, transient=True):
        before = time.perf_counter()
        result = algo.train()
        progress.seconds += time.perf_counter() - before
        progress.env_steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        for name, path in metrics.items():
            if (found := look_up(result, path)) is not None:
                progress.curves[name].append((progress.env_steps, float(found)))
    return progress


def look_up(result: Any, path: str) -> Any:
    for part in path.split("/"):
        result = result.get(part) if isinstance(result, Mapping) else None
    return result


def points(curve: str) -> tuple[list[float], list[float]]:
    """Steps in thousands and scores of a stored curve."""
    pairs = [point.split(":") for point in curve.split()]
    return [float(x) / 1000 for x, _ in pairs], [float(y) for _, y in pairs]


def grouped(rows: Sequence[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """{values of the columns: rows}, in the order of the rows."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found
