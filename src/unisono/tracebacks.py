"""Tracebacks of errors that unisono raises end at the user's line: its own frames are left out."""

from __future__ import annotations

import functools
import opcode
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from unisono import variables
from unisono.errors import UnisonoError

_FOLDER = os.path.dirname(__file__) + os.sep


def is_shortened(error: BaseException) -> bool:
    """Whether unisono raised it on purpose. Others may be bugs, for which every frame counts."""
    purpose = isinstance(error, UnisonoError)
    *_, last = [None, *_frames_of(error)]
    if isinstance(error, (TypeError, ValueError)) and last is not None and _is_ours(last):
        purpose = last.tb_frame.f_code.co_code[last.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
    return purpose and variables.TRACEBACK.read_or_warn() is None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those from which it was raised."""
    for _ in range(20):  # a chain may be a circle
        if error is not None:
            yield error
            error = error.__cause__


def shorten(error: BaseException) -> None:
    """Take unisono's frames out of an error that it raised on purpose, and of what led to it."""
    for link in causes(error) if is_shortened(error) else ():
        rest = None
        for frame in [frame for frame in _frames_of(link) if not _is_ours(frame)][::-1]:
            rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        link.__traceback__ = rest


@functools.cache
def shorten_uncaught() -> None:
    """From now on do so for what ends the program; a hook that was there is called as before."""

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
