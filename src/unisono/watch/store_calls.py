"""Calls of torch's Store: the key that a thread waits for, and keys that this process has set."""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.watch.replacements import Replacements

_WRITES = ("set", "add", "compare_set")
awaited: dict[int, str] = {}
"""By the ident of a thread, the key of the call that it is in."""
written: deque[str] = deque(maxlen=32)
"""The newest keys that were set, with # in place of numbers."""


def without_numbers(key: str) -> str:
    """ "checkpoint-#" of "checkpoint-3" """
    return re.sub(r"\d+", "#", key)


def follow_store() -> Callable[[], None]:
    """Note these calls from now on; returns what stops it."""
    store = getattr(sys.modules.get("torch.distributed"), "Store", None)
    names = ("get", "wait", "multi_get", *_WRITES) if store else ()
    replacements = Replacements()

    def follow(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Any, key: Any, *more: Any, **named: Any) -> Any:
            thread, text = threading.get_ident(), key if isinstance(key, str) else ", ".join(key)
            awaited[thread] = text
            if name in _WRITES and without_numbers(text) not in written:
                written.append(without_numbers(text))
            try:
                return method(store, key, *more, **named)
            finally:
                awaited.pop(thread, None)

        return call

    for name in names:
        replacements.replace(store, name, partial(follow, name))
    return replacements.undo
