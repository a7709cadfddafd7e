"""The exit status of this process: what the program asked for, and another at its very end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from typing import Any, NoReturn

STATUS = 3
"""Of a program that ends well although its numbers are proven wrong."""
_asked: list[Any] = []


def note_exits() -> None:
    """Remember from now on with what the program calls sys.exit."""
    original = sys.exit
    if hasattr(original, "is_noted"):
        return

    @functools.wraps(original)
    def noted(status: Any = None, /) -> NoReturn:
        _asked[:] = [status]
        original(status)

    noted.is_noted = True  # type: ignore[attr-defined]
    sys.exit = noted


def has_failed() -> bool:
    """Whether the program ends with an exception, or with a status of its own."""
    return getattr(sys, "last_value", None) is not None or any(_asked)


def end_with(status: int) -> NoReturn:
    """End the process as it would end now, but with this status."""
    run_others: Any = getattr(atexit, "_run_exitfuncs", lambda: None)
    run_others()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
