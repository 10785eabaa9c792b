"""What came of a sweep's trials, read from its folder or while it runs."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.experiment import Trial
from ray.tune.result import TRAINING_ITERATION
from ray.tune.utils import flatten_dict

from thrust_rllib.algorithm_state import OWN_NAMES
from thrust_rllib.checkpoints import whole_folder
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweep_trial import SCORE

RECORD, SPACE, TRIALS, CURVES, TABLE = "sweep.json", "space.pkl", "trials", "curves.csv", "trials.csv"
BEST, BEST_RECORD = "best", "best.json"
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Args:
        number: counted from 1 as they began.
        trial_id: Tune's, the name of its folder.
        state: "waiting", "running", "paused", "finished", "stopped" early by the scheduler, or "failed".
        values: {parameter: value}, in a population of now.
        iteration: of the newest result, in a finished sweep of the newest checkpoint; so are all numbers.
        env_steps: sampled.
        score: return of all agents, mean of the latest episodes; NaN before the first has ended.
        checkpoint: the newest.
        error: what ended a failed one.
        curve: [(env_steps, score)] over its iterations; only read from a folder.
    """

    number: int
    trial_id: str
    state: str
    values: dict[str, Any]
    iteration: int = 0
    env_steps: int = 0
    score: float = math.nan
    checkpoint: Path | None = None
    error: str | None = None
    curve: Curve = ()

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state in ("finished", "stopped")


_STATES = {Trial.PENDING: "waiting", Trial.RUNNING: "running", Trial.PAUSED: "paused", Trial.ERROR: "failed"}


def trial_row(
    number: int,
    trial: Any,
    parameters: tuple[Parameter, ...],
    steps: int,
    folder: Path | None = None,
    curve: Curve = (),
) -> TrialRow:
    """A row of a trial.

    Args:
        number: see `TrialRow`.
        trial: Tune's.
        parameters: of the sweep.
        steps: of a whole trial; one that has ended before was stopped.
        folder: of the experiment, if it has ended: then the newest checkpoint counts.
        curve: see `TrialRow`.
    """
    saved = trial.latest_checkpoint_result if folder is not None else None
    result = flatten_dict(dict(trial.run_metadata.last_result if saved is None else saved.metrics or {}))
    env_steps = int(result.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))
    ended = "finished" if env_steps >= steps else "stopped"
    checkpoint = error = None
    if folder is not None and saved is not None:
        # The folder may have been moved; a trial of a population may stand on another one's checkpoint.
        checkpoint = folder.joinpath(*Path(saved.checkpoint.path).parts[-2:])
    if folder is not None and trial.status == Trial.ERROR:
        lines = str(trial.get_error() or "").strip().splitlines()
        error = lines[-1] if lines else "no message was left"
    return TrialRow(
        number=number,
        trial_id=str(trial.trial_id),
        state=_STATES.get(trial.status, ended),
        values={p.name: p.of(trial.config) for p in parameters},
        iteration=int(result.get(TRAINING_ITERATION, 0)),
        env_steps=env_steps,
        score=float(result.get(SCORE, math.nan)),
        checkpoint=checkpoint if checkpoint is not None and checkpoint.is_dir() else None,
        error=error,
        curve=curve,
    )


def numbered(trials: list[Any]) -> list[tuple[int, Any]]:
    """(number, trial) in the order in which the search made them, counted from 1."""
    return list(enumerate(sorted(trials, key=lambda trial: int(trial.experiment_tag.partition("_")[0])), 1))


def log_result(folder: Path, trial: Any, result: dict[str, Any], parameters: tuple[Parameter, ...]) -> None:
    """Appends an iteration to the sweep's table of them.

    Tune's own files of a trial's results lose lines whenever it pauses or goes on: they are copied back as they were
    when they were last synced.
    """
    path, flat = folder / CURVES, flatten_dict(result)
    names = (TRAINING_ITERATION, NUM_ENV_STEPS_SAMPLED_LIFETIME, SCORE)
    row = {"trial": trial.trial_id, **{n: flat.get(n, "") for n in names}}
    # The trial may have been given others for its next iteration by now.
    row |= {p.name: p.of(result["config"]) for p in parameters}
    begins = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if begins:
            writer.writeheader()
        writer.writerow(row)


def read_curves(folder: Path) -> dict[str, Curve]:
    """{trial: its iterations} out of what `log_result` wrote.

    Iterations that were run again after an interruption count once; so do those that a trial of a population took over.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    path = folder / CURVES
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            curve, steps = curves.setdefault(row["trial"], []), int(float(row[NUM_ENV_STEPS_SAMPLED_LIFETIME]))
            while curve and curve[-1][0] >= steps:
                curve.pop()
            curve.append((steps, float(row[SCORE])))
    return {trial: tuple(curve) for trial, curve in curves.items()}


@dataclass(frozen=True)
class SweepResults:
    """All trials of a sweep.

    Args:
        folder: of the sweep.
        parameters: what was varied.
        num_trials: how many there are to be.
        steps: environment steps of a whole trial.
        rows: the trials, as they began.
    """

    folder: Path
    parameters: tuple[Parameter, ...]
    num_trials: int
    steps: int
    rows: tuple[TrialRow, ...]

    @classmethod
    def read(cls, folder: Path) -> SweepResults:
        """From a sweep's folder.

        Raises:
            ValueError: no sweep is there, or it had not begun.
        """
        record = read_record(folder)
        try:
            trials = tune.ExperimentAnalysis(str((folder / TRIALS).absolute())).trials
        except ValueError as error:
            raise ValueError(f"the sweep {folder} ended before its first trial; start it anew in another folder") from (
                error
            )
        parameters = tuple(
            Parameter(**{**entry, "path": tuple(entry["path"]), "choices": tuple(entry["choices"])})
            for entry in record["parameters"]
        )
        curves, steps = read_curves(folder), record["steps"]
        rows = tuple(
            trial_row(k, trial, parameters, steps, folder / TRIALS, curves.get(trial.trial_id, ()))
            for k, trial in numbered(trials)
        )
        return cls(folder, parameters, record["num_trials"], steps, rows)

    @cached_property
    def ranked(self) -> list[TrialRow]:
        """The best score first, those without one last."""
        return sorted(self.rows, key=lambda row: (math.isnan(row.score), -row.score if row.score == row.score else 0.0))

    @property
    def best(self) -> TrialRow | None:
        """The best one with a checkpoint."""
        return next((r for r in self.ranked if r.checkpoint is not None and not math.isnan(r.score)), None)

    @property
    def failed(self) -> list[TrialRow]:
        """Those that an error has ended."""
        return [row for row in self.rows if row.state == "failed"]

    @property
    def unfinished(self) -> int:
        """Trials that resuming goes on with, but for failed ones."""
        return self.num_trials - sum(row.over for row in self.rows) - len(self.failed)

    def write(self) -> None:
        """Writes the table, and the best trial's checkpoint with what it is."""
        with (self.folder / TABLE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = ("state", "score", "iteration", "env_steps")
            writer.writerow(["trial", "folder", *names, *(p.name for p in self.parameters), "checkpoint", "error"])
            for row in self.ranked:
                cells = [getattr(row, name) for name in names]
                where = "" if row.checkpoint is None else row.checkpoint.relative_to(self.folder)
                writer.writerow([row.number, row.trial_id, *cells, *row.values.values(), where, row.error or ""])
        if self.best is not None:
            self._copy_best(self.best)

    def _copy_best(self, row: TrialRow) -> None:
        assert row.checkpoint is not None
        with whole_folder(self.folder / BEST, OWN_NAMES) as unfinished:
            shutil.copytree(row.checkpoint, unfinished)
        record = {
            "trial": row.number,
            "folder": f"{TRIALS}/{row.trial_id}",
            "parameters": row.values,
            "score": row.score,
            "metric": SCORE,
            "iteration": row.iteration,
            "env_steps": row.env_steps,
            "checkpoint": str(row.checkpoint.relative_to(self.folder)),
        }
        (self.folder / BEST_RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """What was asked for.

    Raises:
        ValueError: `folder` has no sweep in it.
    """
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text("utf-8"))
        return record
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no folder of a sweep: it has no readable {RECORD}") from error


def read_space(folder: Path) -> dict[str, Any]:
    """What Tune draws from.

    Raises:
        ValueError: it cannot be read: the file is not there, or needs code that is not.
    """
    try:
        space: dict[str, Any] = cloudpickle.loads((folder / SPACE).read_bytes())
        return space
    except Exception as error:  # a pickle may raise anything
        raise ValueError(f"{folder / SPACE} cannot be read, so that the sweep cannot go on: {error!r}") from error
