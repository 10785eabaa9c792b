"""Output that outlasts its reader: a terminal that is closed, a pipe that ends, a full disk behind `> file`."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # nobody will read any more


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """What cannot be written to stdout and stderr is dropped, and whoever prints goes on: we, rich, Ray."""
    out: Any = _LastingFile(sys.stdout)
    err: Any = _LastingFile(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _LastingFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Lets go into nothing what Python has kept, and would try to write again when it ends."""
        if error.errno not in GONE:
            return
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self._file.fileno())
