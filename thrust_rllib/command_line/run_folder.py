"""A folder with everything about one training run.

| in the folder | what |
|---|---|
| `config.json` | command, seed, versions and every option |
| `progress.csv`, `events.out.tfevents…` | RLlib's results of each iteration, as a table and for TensorBoard |
| `checkpoints/iteration_000100` | for `JointPPO.from_checkpoint` |
| `report/` | learning curves and final numbers, see `thrust_rllib.report` |
| `train.log` | warnings and notes of this package, Ray and RLlib |
"""

from __future__ import annotations

import csv
import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.csv"
CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
CHECKPOINTS = "checkpoints"
KEPT_CHECKPOINTS = 3
RAY_LOGGERS = ("ray", "ray.rllib", "ray.data")  # those with a handler of their own, which pass nothing on


def choose_folder(output: Path | None, env: str) -> Path:
    """The folder of a new run: `output`, or runs/<env>-<time>.

    Raises:
        ValueError: `output` is a file, or has something in it.
    """
    if output is None:
        start = Path("runs") / f"{_file_name(env)}-{datetime.now():%Y%m%d-%H%M%S}"
        candidates = itertools.chain([start], (start.with_name(f"{start.name}-{i}") for i in itertools.count(2)))
        return next(path for path in candidates if not path.exists())
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; give a folder that does not exist yet, or an empty one")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(
            f"--output {output} exists and is not empty; nothing is overwritten. Give another folder, remove it first "
            f"(rm -r {output}), or leave --output out: the run then goes to runs/{_file_name(env)}-<time>"
        )
    return output


def _file_name(env: str) -> str:
    return re.sub(r"\W+", "_", env).strip("_")


class RunFolder:
    """Creates the folder at `path` and writes what belongs into it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._log = ResultLog(self.path)
        self._log_handler = logging.FileHandler(self.path / LOG_FILE, encoding="utf-8")
        self._log_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("thrust_rllib", *RAY_LOGGERS):
            logging.getLogger(name).addHandler(self._log_handler)

    @property
    def shown(self) -> str:
        """The path as a person would type it here."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith("..") else relative

    def log(self, result: Mapping[str, Any]) -> None:
        """Writes a result of `JointPPO.train()`."""
        self._log.write(result)

    def save_checkpoint(self, algo: Any, iteration: int) -> Path:
        """Saves the algorithm, then removes all but the latest checkpoints; a half-written one has another name."""
        target = self.path / CHECKPOINTS / f"iteration_{iteration:06}"
        if target.exists():
            return target
        unfinished = target.with_name(f"unfinished_{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        algo.save_to_path(str(unfinished))
        unfinished.rename(target)
        for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
        return target

    def checkpoints(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted((self.path / CHECKPOINTS).glob("iteration_*"))

    def close(self) -> None:
        """Closes the files; the folder stays."""
        self._log.close()
        for name in ("thrust_rllib", *RAY_LOGGERS):
            logging.getLogger(name).removeHandler(self._log_handler)
        self._log_handler.close()


@dataclass(eq=False)
class _Trial:
    """What Tune's loggers ask of a trial; a real one belongs to a Tune experiment with its own folders."""

    local_path: str
    config: dict[str, Any] = field(default_factory=dict)
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    checkpoint: None = None

    def init_local_path(self) -> None:
        """The folder exists."""


class ResultLog:
    """Tune's loggers for CSV and TensorBoard without a Tune experiment.

    Tune's table has the columns of the first result only: returns would never appear in a run whose first iteration
    ends no episode. Here a new column rewrites the file with empty cells above.
    """

    def __init__(self, folder: Path) -> None:
        from ray.tune.logger import CSVLoggerCallback, TBXLoggerCallback

        self._trial = _Trial(str(folder))
        self._csv, self._tensorboard = CSVLoggerCallback(), TBXLoggerCallback()
        self._file = folder / PROGRESS_FILE
        self._columns: list[str] = []

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends one result."""
        from ray.tune.utils import flatten_dict

        row = {name: value for name, value in result.items() if name != "config"}
        # Tune's TensorBoard logger counts in this number where a result has it, else in iterations.
        row["timesteps_total"] = int(row.get("num_env_steps_sampled_lifetime", 0))
        flat = flatten_dict(row, delimiter="/")
        new = [name for name in flat if name not in self._columns]
        if new and self._columns:
            self._add_columns(new)
        self._columns += new
        iteration = int(result["training_iteration"])
        self._csv.log_trial_result(iteration, self._trial, {name: flat.get(name, "") for name in self._columns})
        self._tensorboard.log_trial_result(iteration, self._trial, flat)

    def _add_columns(self, new: list[str]) -> None:
        self._csv.log_trial_end(self._trial)  # closes the file; the next result opens it to append
        with self._file.open(newline="") as file:
            rows = list(csv.DictReader(file))
        unfinished = self._file.with_suffix(".tmp")
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*self._columns, *new], restval="")
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(self._file)

    def close(self) -> None:
        """Closes the files."""
        self._csv.log_trial_end(self._trial)
        self._tensorboard.log_trial_end(self._trial)
