"""When a process collected garbage: its newest long collections, in an anonymous file that other
processes of its user can read."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import struct
import time
from typing import Any

from unisono.errors import UnisonoError
from unisono.watch.memory_files import open_memory

_NAME = "unisono-collections"
_SPAN = struct.Struct("<dd")
_KEPT = 256
_LONG_S = 0.0005


class Collections:
    """This process's own: it notes them until `close`."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, _KEPT * _SPAN.size)
        self._memory = mmap.mmap(self._file, _KEPT * _SPAN.size)
        self._count, self._since_s = 0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._since_s = now_s
        elif now_s - self._since_s > _LONG_S:
            at = self._count % _KEPT * _SPAN.size
            _SPAN.pack_into(self._memory, at, self._since_s, now_s)
            self._count += 1

    def close(self) -> None:
        """Stop."""
        gc.callbacks.remove(self._note)
        self._memory.close()
        os.close(self._file)


def collections_of(pid: int) -> list[tuple[float, float]]:
    """When a process last collected garbage: begin and end, by time.monotonic; nothing
    of one that is not watched."""
    with contextlib.suppress(OSError, UnisonoError), open_memory(pid, _NAME) as file:
        return list(_SPAN.iter_unpack(os.pread(file, _KEPT * _SPAN.size, 0)))
    return []
