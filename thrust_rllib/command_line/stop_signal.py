"""Ctrl-C while a run goes on."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrust_rllib.command_line.progress_view import View


class StopSignal:
    """Ctrl-C or SIGTERM: the first sets `requested`, the second raises `KeyboardInterrupt`.

    A context manager; install it after `ray.init`, which has a SIGTERM handler of its own.
    """

    def __init__(self, view: View) -> None:
        self.requested = False
        self._view = view
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._view.message("stopping after this iteration, with a checkpoint (again to stop at once)")
