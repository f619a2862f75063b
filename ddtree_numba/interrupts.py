"""Ctrl-C and SIGTERM: the first ends decoding after the current round, the second ends at once."""

import os
import signal
import threading
from types import FrameType
from typing import Self


class Interrupted(BaseException):
    """A signal that came while nothing had been decoded."""


class Interrupts:
    """Handlers for the time of a command; `cancel` is what `Engine.generate` watches.

    Until `gentle` is set there is no round to wait for, and the first signal raises Interrupted.
    """

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.gentle = False
        self.signal = 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal

    def __enter__(self) -> Self:
        # Only the main thread may install handlers; elsewhere the caller's stay in force.
        watched = (signal.SIGINT, signal.SIGTERM)
        self._main = threading.current_thread() is threading.main_thread()
        self._before = {s: signal.signal(s, self._handle) for s in watched} if self._main else {}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)  # no clean-up that could wait for anything
        self.signal = number
        self.cancel.set()
        if not self.gentle:
            raise Interrupted
