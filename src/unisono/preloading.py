"""Modules that a failure needs, imported before there is one.

Once something fails, files may be out of reach: the process has no descriptors left, or a file
system hangs. So a thread imports what words the exceptions, a moment after the first group is
made, which does not wait for it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import importlib
import os
import sys
import time

DELAY_S = 0.1
"""How long a process is left to its start."""

_names: list[str] = []
_importing = _thread.allocate_lock()
"""Held during an import. A fork and the end of the interpreter wait for it: the thread would be
gone, and the lock of the module that it was importing would never be released."""


def load_soon(*names: str) -> None:
    """Have these modules imported by a thread. Where that fails, whoever needs one tries again."""
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
