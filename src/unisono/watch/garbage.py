"""When a process collected garbage: its newest long collections, which other processes can read."""

from __future__ import annotations

import gc
import time
from typing import Any

from unisono.watch.memory_files import Ring, RingLayout

_LAYOUT = RingLayout("unisono-collections", columns=2, kept=256)
_LONG_S = 0.0005


class Collections:
    """This process's own: it notes them until `close`."""

    def __init__(self) -> None:
        self._ring, self._since_s = Ring(_LAYOUT), 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._since_s = now_s
        elif now_s - self._since_s > _LONG_S:
            self._ring.add(self._since_s, now_s)

    def close(self) -> None:
        """Stop."""
        gc.callbacks.remove(self._note)
        self._ring.close()


def collections_of(pid: int) -> list[tuple[float, float]]:
    """When a process last collected garbage: begin and end, by time.monotonic; nothing
    of one that is not watched."""
    rows, _ = _LAYOUT.read_process(pid) or ([], 0)
    return [(begin_s, end_s) for begin_s, end_s in rows]
