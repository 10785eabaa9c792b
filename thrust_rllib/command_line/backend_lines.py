"""What Ray's C++ part writes past Python, to the process's own stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

OF_RESTARTS = b"has constructor arguments in the object store and max_restarts > 0"
"""A line of several hundred characters for each runner: RLlib hands the configuration to all of them in one object."""


@contextlib.contextmanager
def without_lines_of_restarts() -> Iterator[None]:
    """Leaves out what Ray says of each runner that may be started again; all other lines pass at once."""
    sys.stderr.flush()
    reader, writer = os.pipe()
    own = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    passing = threading.Thread(target=_pass, args=(reader, own), daemon=True)
    passing.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)  # the pipe's last end in this process; one that another process holds is not waited for
        passing.join(timeout=1.0)


def _pass(reader: int, to: int) -> None:
    with open(reader, "rb", buffering=0) as lines, contextlib.suppress(OSError):
        for line in lines:
            if OF_RESTARTS not in line:
                os.write(to, line)
    os.close(to)
