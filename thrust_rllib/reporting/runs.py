"""A finished or interrupted run, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrust_rllib.command_line.result_log import PROGRESS_FILE
from thrust_rllib.command_line.run_folder import CONFIG_FILE
from thrust_rllib.reporting.correlation_file import CORRELATION_FILE, FeatureCorrelation
from thrust_rllib.reporting.run_curves import NoIterationError, RunCurves, read_curves

REPORT = "report"
SUMMARY = "summary.json"


@dataclass(frozen=True, eq=False)
class Run:
    """What a report knows of one run.

    Args:
        folder: as it was given.
        record: `config.json`, see `command_line.run_record`.
        curves: `progress.csv`.
        evaluation: of the end, as in `report/summary.json`; None if there was none.
        correlation: of the last weights' features; None where the run wrote none.
    """

    folder: Path
    record: Mapping[str, Any]
    curves: RunCurves
    evaluation: Mapping[str, Any] | None
    correlation: FeatureCorrelation | None

    @property
    def seed(self) -> Any:
        """As recorded."""
        return self.record.get("seed")

    @property
    def env(self) -> str:
        """Name of the environment."""
        return str(self.record.get("environment", {}).get("name", "an environment without a name"))


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
        NoIterationError: it is no run (says what is missing).
        ValueError: there is no such folder, or a file in it cannot be read.
    """
    if folder.is_file():
        raise NoIterationError(f"{folder} is a file; give the folders of runs that thrust-rllib train has written")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give the folders of runs that thrust-rllib train has written")
    missing = [name for name in (CONFIG_FILE, PROGRESS_FILE) if not (folder / name).is_file()]
    if missing:
        inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
        hint = f" Runs in it, such as {inside[0]}: {len(inside)}; give those." if inside else ""
        raise NoIterationError(
            f"{folder} is not the folder of a run: it has no {' and no '.join(missing)}; needed: a folder that "
            f"thrust-rllib train has written, after one iteration at least.{hint}"
        )
    report = folder / REPORT
    return Run(
        folder=folder,
        record=_read_object(folder / CONFIG_FILE),
        curves=read_curves(folder / PROGRESS_FILE),
        evaluation=_read_object(report / SUMMARY).get("evaluation") if (report / SUMMARY).is_file() else None,
        correlation=FeatureCorrelation.read(report / CORRELATION_FILE),
    )


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Reads each folder once; of several, those that are no run or have no iteration are skipped.

    Returns:
        The runs, and what a reader has to be told about them.

    Raises:
        ValueError: no folder, no run among them, or see `read_run`.
    """
    if not folders:
        raise ValueError("no run was given; needed: the folder of one run at least")
    once = {folder.resolve(): folder for folder in reversed(folders)}
    unique = [folder for folder in folders if once[folder.resolve()] is folder]
    notes = [f"{folder} was given more than once and counts once" for folder in unique if _times(folder, folders) > 1]
    runs: list[Run] = []
    skipped: list[str] = []
    for folder in unique:
        try:
            runs.append(read_run(folder))
        except NoIterationError as error:
            if len(unique) == 1:
                raise
            skipped.append(str(error))
    if not runs:
        raise ValueError(f"none of the {len(unique)} folders is a run with an iteration: {'; '.join(skipped)}")
    cut = [f"{run.folder}: {note}" for run in runs for note in run.curves.notes]
    return runs, [*notes, *cut, *(f"skipped: {why}" for why in skipped)]


def _times(folder: Path, folders: Sequence[Path]) -> int:
    return sum(other.resolve() == folder.resolve() for other in folders)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}; needed: an object, as thrust-rllib train writes it")
    return content
