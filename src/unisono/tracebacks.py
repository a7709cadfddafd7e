"""Tracebacks of errors that unisono raises end at the user's line: its own frames are left out."""

from __future__ import annotations

import functools
import opcode
import os
import sys
from types import TracebackType
from typing import Any

from unisono import variables
from unisono.errors import UnisonoError

_FOLDER = os.path.dirname(__file__) + os.sep
_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_shortened(error: BaseException) -> bool:
    """Whether unisono raised it on purpose: an error of ours, or an invalid argument. What else is
    raised within unisono may be a bug, for which every frame counts."""
    if variables.TRACEBACK.read_or_warn() is not None:
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return isinstance(error, UnisonoError) or (
        isinstance(error, (TypeError, ValueError))
        and last is not None
        and _is_ours(last)
        and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
    )


def shorten(error: BaseException) -> None:
    """Take unisono's frames out of an error that it raised on purpose, and of what led to it."""
    if not is_shortened(error):
        return
    link: BaseException | None = error
    for _ in range(20):  # a chain may be a circle
        if link is None:
            return
        frames = _without_ours(link.__traceback__)
        if frames is not None or link is not error:  # an error within unisono alone keeps them
            link.__traceback__ = frames
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


@functools.cache
def shorten_uncaught() -> None:
    """From now on do so for what ends the program; a hook that was there is called as before."""
    before = sys.excepthook

    @functools.wraps(before)
    def show(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        shorten(error)
        before(kind, error, error.__traceback__)

    sys.excepthook = show


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_FOLDER)


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    if frames is None:
        return None
    rest = _without_ours(frames.tb_next)
    if _is_ours(frames):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)
