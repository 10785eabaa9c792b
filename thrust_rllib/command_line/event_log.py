"""TensorBoard's events of a run, written by the process itself.

tensorboardX leaves that to a thread, which a full disk ends; the run then waits for it for ever.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thrust_rllib.command_line.whole_writes import append_whole

EVENTS = "events.out.tfevents."
_HEADER = struct.Struct("<QI")  # of an event: its length, and a checksum of that
_CHECKSUM = struct.Struct("<I")  # behind it


@dataclass(eq=False)
class _Trial:
    """What Tune's loggers ask of a trial; a real one belongs to a Tune experiment with its own folders."""

    local_path: str
    config: dict[str, Any] = field(default_factory=dict)
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    checkpoint: None = None

    def init_local_path(self) -> None:
        """The folder exists."""


class EventLog:
    """Tune's logger, with a writer that is no thread."""

    def __init__(self, folder: Path) -> None:
        from ray.tune.logger import TBXLoggerCallback

        self._trial = _Trial(str(folder))
        self._events = _Events(folder)
        self._logger = TBXLoggerCallback()
        self._logger._summary_writer_cls = lambda folder, flush_secs: _summary_writer(folder, self._events)

    def add(self, result: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        """Gathers a result, with its names flat."""
        self._logger.log_trial_result(int(result.get("training_iteration", 0)), self._trial, dict(flat))

    def flush(self) -> None:
        """Writes what was gathered.

        Raises:
            OSError: it cannot be written now, and is kept.
        """
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
        append_whole(self._path, self._waiting)
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


def events(path: Path) -> Iterator[tuple[int, bytes]]:
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
