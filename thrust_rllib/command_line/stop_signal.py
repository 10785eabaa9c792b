"""Ctrl-C while a run goes on, and a terminal that is closed."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrust_rllib.command_line.progress_view import View


class StopSignal:
    """Ctrl-C, SIGTERM or SIGHUP: the first sets `requested`, a second Ctrl-C or SIGTERM raises `KeyboardInterrupt`.

    A terminal that is closed may send more than one SIGHUP. Where it is ignored, by `nohup`, say, it stays so.

    A context manager; install it after `ray.init`, which has a SIGTERM handler of its own.
    """

    def __init__(self, view: View) -> None:
        self.requested = False
        self._view = view
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        self.requested = True
        self._view.message("stopping after this iteration, with a checkpoint (again to stop at once)")
