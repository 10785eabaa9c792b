"""Results of a run, iteration by iteration: `progress.csv`, `result.json` and TensorBoard's events.

Tune's loggers need a Tune experiment, and a disk that is never full; their table has the columns of the first result
only.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from thrust_rllib.command_line.event_log import EVENTS, EventLog, events
from thrust_rllib.command_line.whole_writes import append_whole, replace_whole

PROGRESS_FILE = "progress.csv"
RESULT_FILE = "result.json"
_ITERATION, _STEPS = "training_iteration", "timesteps_total"


class _File(Protocol):
    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class ResultLog:
    """Writes results into the files of a folder, and goes on where they end.

    What a full disk refuses is kept, and written with the next result that finds room.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[_File, ...] = (_Table(folder), _Lines(folder), EventLog(folder))

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends a result of `JointPPO.train()`.

        Raises:
            OSError: a file could not be written; the others have been.
        """
        from ray.tune.utils import flatten_dict

        row = {name: value for name, value in result.items() if name != "config"}
        # Tune's TensorBoard logger counts in this number where a result has it, else in iterations.
        row[_STEPS] = int(row.get("num_env_steps_sampled_lifetime", 0))
        flat = flatten_dict(row, delimiter="/")
        for file in self._files:
            file.add(row, flat)
        self.flush()

    def flush(self) -> None:
        """Writes what an earlier `write` could not.

        Raises:
            OSError: it cannot be written now, either.
        """
        errors = []
        for file in self._files:
            try:
                file.flush()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def cut_behind(self, iteration: int) -> None:
        """Leaves out what lies behind an iteration, that of a checkpoint; and lines that were cut off."""
        rows = [row for row in read_results(self._folder) if iteration_of(row) <= iteration]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        replace_whole(self._folder / PROGRESS_FILE, _as_csv(columns, rows, header=True) if rows else b"")
        lines = [line for line in _lines(self._folder / RESULT_FILE) if 0 < iteration_of(_parsed(line)) <= iteration]
        replace_whole(self._folder / RESULT_FILE, b"".join(lines))
        steps = int(float(rows[-1].get(_STEPS) or 0)) if rows else 0
        for path in self._folder.glob(f"{EVENTS}*") if rows else ():
            replace_whole(path, b"".join(record for step, record in events(path) if step <= steps))
        self._files = (_Table(self._folder), _Lines(self._folder), EventLog(self._folder))


def read_table(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's `progress.csv` as texts; a last one that was cut off is left out."""
    path = folder / PROGRESS_FILE
    text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
    whole = text if text.endswith("\n") else text[: text.rfind("\n") + 1]
    rows: list[dict[str, str]] = []
    with contextlib.suppress(csv.Error):  # what stands behind a quotation mark that is never closed
        rows.extend(csv.DictReader(io.StringIO(whole, newline="")))
    return [row for row in rows if None not in row and None not in row.values()]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `progress.csv` in order; one that it lacks, cut off by a full disk, say, of `result.json`."""
    from ray.tune.utils import flatten_dict

    rows: dict[int, dict[str, Any]] = {iteration_of(row): row for row in read_table(folder)}
    for line in _lines(folder / RESULT_FILE):
        result = _parsed(line)
        if iteration_of(result) not in rows:
            rows[iteration_of(result)] = flatten_dict(dict(result), delimiter="/")
    return [rows[number] for number in sorted(rows) if number > 0]


def iteration_of(row: Mapping[str, Any]) -> int:
    """The number of the iteration; 0 where there is none."""
    try:
        return int(float(row.get(_ITERATION) or 0))
    except (TypeError, ValueError):
        return 0


class _Table:
    """A column that appears late gets empty cells above."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS_FILE
        self._waiting: list[Mapping[str, Any]] = []
        self._columns: list[str] = []
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                self._columns = next(csv.reader(file), [])

    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        self._waiting.append(flat)

    def flush(self) -> None:
        if not self._waiting:
            return
        columns = list(dict.fromkeys([*self._columns, *(name for row in self._waiting for name in row)]))
        if columns == self._columns:
            append_whole(self._path, _as_csv(columns, self._waiting, header=False))
        else:
            rows = [*read_table(self._path.parent), *self._waiting]
            replace_whole(self._path, _as_csv(columns, rows, header=True))
        self._columns, self._waiting = columns, []


class _Lines:
    """One line of JSON per result, as Tune's."""

    def __init__(self, folder: Path) -> None:
        self._path, self._waiting = folder / RESULT_FILE, b""

    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        from ray.tune.utils.util import SafeFallbackEncoder

        self._waiting += json.dumps(result, cls=SafeFallbackEncoder).encode() + b"\n"

    def flush(self) -> None:
        append_whole(self._path, self._waiting)
        self._waiting = b""


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _as_csv(columns: list[str], rows: list[Any], header: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
