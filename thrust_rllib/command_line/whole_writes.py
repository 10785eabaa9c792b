"""Writing to a file all of some bytes, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def append_whole(path: Path, data: bytes) -> None:
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


def replace_whole(path: Path, data: bytes) -> None:
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
