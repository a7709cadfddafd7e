"""Signals deferred until a block that must not be interrupted is done."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = signal.valid_signals()  # looking them up takes longer than everything else


class _Deferring:
    """A handler in place of another. The first signal waits; a second one is handled at once. Once
    it no longer defers signals, it calls the other handler."""

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
    """A block that signals with a Python handler (such as Ctrl-C) do not interrupt; the handler
    runs at the end, and raises there. Signals interrupt only the main thread, so other threads do
    nothing."""
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
        with contextlib.ExitStack() as handlers:  # it calls all of them, even if one raises
            for deferred in deferring.values():
                if deferred.waiting is not None:
                    handlers.callback(deferred.handler, *deferred.waiting)
