"""What makes failures readable, prepared before anything fails.

Tracebacks of errors that unisono raises end at the user's line: its own frames are removed. Modules
that word exceptions are imported early: once something fails, files may be out of reach, because
the process has no descriptors left or a file system hangs. So a thread imports them a moment after
the first group is made, which does not wait for it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from unisono import variables
from unisono.errors import UnisonoError

_FOLDER = os.path.dirname(__file__) + os.sep


def is_shortened(error: BaseException) -> bool:
    """Whether unisono raised it on purpose. Others may be bugs, for which every frame matters."""
    purpose = isinstance(error, UnisonoError)
    *_, last = [None, *_frames_of(error)]
    if isinstance(error, (TypeError, ValueError)) and last is not None and _is_ours(last):
        import opcode  # slow to import at every start

        purpose = last.tb_frame.f_code.co_code[last.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
    return purpose and variables.TRACEBACK.read_or_warn() is None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    for _ in range(20):  # a chain may be circular
        if error is not None:
            yield error
            error = error.__cause__


def shorten(error: BaseException) -> None:
    """Remove unisono's frames from an error that it raised on purpose, and from its causes."""
    for link in causes(error) if is_shortened(error) else ():
        rest = None
        for frame in [frame for frame in _frames_of(link) if not _is_ours(frame)][::-1]:
            rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        link.__traceback__ = rest


@functools.cache
def shorten_uncaught() -> None:
    """From now on do so for uncaught exceptions; an existing hook is called as before."""

    @functools.wraps(before := sys.excepthook)
    def show(kind: type[BaseException], error: BaseException, frames: object) -> None:
        shorten(error)
        before(kind, error, error.__traceback__)

    sys.excepthook = show


def _frames_of(error: BaseException) -> Iterator[TracebackType]:
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_FOLDER)


# -- modules imported early ----------------------------------------------------------------------

DELAY_S = 0.1
"""How long a process may start up undisturbed."""

_names: list[str] = []
_importing = _thread.allocate_lock()
"""Held during an import. A fork and the end of the interpreter wait for it: otherwise the thread
would be gone, and the import lock of its module would never be released."""


def load_soon(*names: str) -> None:
    """Let a thread import these modules. If that fails, they are imported when needed."""
    missing = [name for name in names if name not in sys.modules and name not in _names]
    _names.extend(missing)
    if missing:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _thread.start_new_thread(_load, ())


def _load() -> None:
    time.sleep(DELAY_S)
    while _names:
        with _importing, contextlib.suppress(Exception):
            importlib.import_module(_names.pop(0))


def _finish() -> None:
    _names.clear()
    with _importing:
        pass


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    go_on = _importing.release
    os.register_at_fork(before=_importing.acquire, after_in_parent=go_on, after_in_child=go_on)
    os.register_at_fork(after_in_child=_names.clear)
