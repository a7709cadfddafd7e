"""Signals that wait until something is done that must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = signal.valid_signals()  # asking for them takes longer than all the rest


class _Deferring:
    """A handler in place of another. The first signal waits; whoever insists and sends a second is
    heard at once. Once it holds no signals back any more, it calls the other."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.holds = True
        self.waiting: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.holds and self.waiting is None:
            self.waiting = number, frame
            return None
        return self.handler(number, frame)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """A block in which a signal with a handler in Python (Ctrl-C has one) does not interrupt; its
    handler is called at the end, and what that raises is raised there. Only the main thread is
    interrupted by signals, so in others there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferring: dict[signal.Signals, _Deferring] = {}
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                deferring[number] = _Deferring(handler)
                signal.signal(number, deferring[number])
        yield
    finally:
        for deferred in deferring.values():
            deferred.holds = False
        for number, deferred in deferring.items():
            if signal.getsignal(number) is deferred:
                signal.signal(number, deferred.handler)
        with contextlib.ExitStack() as handlers:  # it calls all of them, though one raises
            for deferred in deferring.values():
                if deferred.waiting is not None:
                    handlers.callback(deferred.handler, *deferred.waiting)
