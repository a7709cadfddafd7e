"""Signals to the launching process, kept until it can handle them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any


class Interrupts:
    """Within its context the given signals are only recorded.

    An exception from a signal handler could hit between the start of a rank and our record of it. A
    SIGINT handler of the program stays, and only the main thread gets signals. SIGINT counts even
    if a script's `&` ignores it, as with torchrun; SIGHUP does not. `fileno` becomes readable on a
    signal: the interpreter writes to it in the signal handler itself, so that none is missed.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.noted: list[signal.Signals] = []
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._other_wakeup = -1
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            plain = (signal.SIG_DFL, signal.default_int_handler)
            for number in self._signals:
                before = signal.getsignal(number)
                if before in plain or (number == signal.SIGINT and before == signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        if self._before:
            self._other_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            self.read()
            signal.set_wakeup_fd(self._other_wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """For a selector."""
        return self._reader

    def wake(self) -> None:
        """Make `fileno` readable without a signal; from any thread."""
        os.write(self._writer, b"\0")

    def read(self) -> None:
        """Make `fileno` unreadable again; an event loop that waits for signals gets its own."""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._reader, 4096)
            theirs = bytes(number for number in numbers if number and number not in self._before)
            if theirs and self._other_wakeup != -1:
                os.write(self._other_wakeup, theirs)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(signal.Signals(number))
