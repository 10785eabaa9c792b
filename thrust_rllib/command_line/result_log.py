"""Results of a run, iteration by iteration: `progress.csv`, `result.json` and TensorBoard's events.

Tune's loggers need a Tune experiment, and a disk that is never full: the table has the columns of the first result
only, and the thread that writes events dies of an error, after which the run waits for it for ever.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PROGRESS_FILE = "progress.csv"
RESULT_FILE = "result.json"
EVENTS = "events.out.tfevents."
_ITERATION, _STEPS = "training_iteration", "timesteps_total"
_HEADER = struct.Struct("<QI")  # of an event: its length, and a checksum of that
_CHECKSUM = struct.Struct("<I")  # behind it


class _File(Protocol):
    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class ResultLog:
    """Writes results into the files of a folder, and goes on where they end.

    What a full disk refuses is kept, and written with the next result that finds room.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[_File, ...] = (_Table(folder), _Lines(folder), _TensorBoard(folder))

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
        _replace(self._folder / PROGRESS_FILE, _as_csv(columns, rows, header=True) if rows else b"")
        lines = [line for line in _lines(self._folder / RESULT_FILE) if 0 < iteration_of(_parsed(line)) <= iteration]
        _replace(self._folder / RESULT_FILE, b"".join(lines))
        steps = int(float(rows[-1].get(_STEPS) or 0)) if rows else 0
        for path in self._folder.glob(f"{EVENTS}*") if rows else ():
            _replace(path, b"".join(record for step, record in _events(path) if step <= steps))
        self._files = (_Table(self._folder), _Lines(self._folder), _TensorBoard(self._folder))


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
            _append(self._path, _as_csv(columns, self._waiting, header=False))
        else:
            rows = [*read_table(self._path.parent), *self._waiting]
            _replace(self._path, _as_csv(columns, rows, header=True))
        self._columns, self._waiting = columns, []


class _Lines:
    """One line of JSON per result, as Tune's."""

    def __init__(self, folder: Path) -> None:
        self._path, self._waiting = folder / RESULT_FILE, b""

    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        from ray.tune.utils.util import SafeFallbackEncoder

        self._waiting += json.dumps(result, cls=SafeFallbackEncoder).encode() + b"\n"

    def flush(self) -> None:
        _append(self._path, self._waiting)
        self._waiting = b""


@dataclass(eq=False)
class _Trial:
    """What Tune's loggers ask of a trial; a real one belongs to a Tune experiment with its own folders."""

    local_path: str
    config: dict[str, Any] = field(default_factory=dict)
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    checkpoint: None = None

    def init_local_path(self) -> None:
        """The folder exists."""


class _TensorBoard:
    """Tune's logger, with a writer that is no thread."""

    def __init__(self, folder: Path) -> None:
        from ray.tune.logger import TBXLoggerCallback

        self._trial = _Trial(str(folder))
        self._events = _Events(folder)
        self._logger = TBXLoggerCallback()
        self._logger._summary_writer_cls = lambda folder, flush_secs: _summary_writer(folder, self._events)

    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        self._logger.log_trial_result(iteration_of(result), self._trial, dict(flat))

    def flush(self) -> None:
        self._events.write()


class _Events:
    """What tensorboardX hands its events to, in place of the thread: they are gathered, then appended at once."""

    def __init__(self, folder: Path) -> None:
        number = len(list(folder.glob(f"{EVENTS}*")))  # a run that goes on within the second needs another name
        self._path = folder / f"{EVENTS}{int(time.time())}.{socket.gethostname()}.{number}"
        self._waiting = b""

    def add_event(self, event: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if not self._waiting and not self._path.exists():
            self._waiting = _as_record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._waiting += _as_record(event)

    def write(self) -> None:
        _append(self._path, self._waiting)
        self._waiting = b""

    def flush(self) -> None:
        """Called by tensorboardX, which expects no error; see `write`."""

    def close(self) -> None:
        """See `flush`."""


def _summary_writer(folder: str, events: _Events) -> Any:
    from tensorboardX import SummaryWriter
    from tensorboardX.writer import FileWriter

    file_writer = object.__new__(FileWriter)  # its own __init__ starts the thread
    file_writer.event_writer, file_writer._default_metadata = events, {}
    writer = SummaryWriter(folder, write_to_disk=False)
    writer._get_file_writer = lambda: file_writer
    writer.file_writer, writer.all_writers = file_writer, {folder: file_writer}
    return writer


def _as_record(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + _CHECKSUM.pack(masked_crc32c(length)) + data + _CHECKSUM.pack(masked_crc32c(data))


def _events(path: Path) -> Iterator[tuple[int, bytes]]:
    """(step, record) of each event, up to one that is cut off or damaged: TensorBoard, too, reads no further."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, start = path.read_bytes(), 0
    while start + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, start)
        end = start + _HEADER.size + length + _CHECKSUM.size
        if end > len(data) or checksum != masked_crc32c(struct.pack("<Q", length)):
            return
        try:
            event = Event.FromString(data[start + _HEADER.size : end - _CHECKSUM.size])
        except DecodeError:
            return
        yield int(event.step), data[start:end]
        start = end


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


def _append(path: Path, data: bytes) -> None:
    """All of `data` or nothing of it."""
    if not data:
        return
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            _write_all(file.write, data)
        except OSError:
            file.truncate(before)
            raise


def _replace(path: Path, data: bytes) -> None:
    """In place of what stands there, at once."""
    if not data and not path.exists():
        return
    unfinished = path.with_name(f".unfinished-{path.name}-{os.getpid()}")
    try:
        with unfinished.open("wb", buffering=0) as file:
            _write_all(file.write, data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(rest) or 0 :]
