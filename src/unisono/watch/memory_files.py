"""Anonymous files of watched processes, which other processes of the same user find in /proc; and
rings of numbers in such files, which can be read when the process has ended, too."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from unisono.errors import UnisonoError

_COUNT = struct.Struct("<Q40x")


@contextlib.contextmanager
def open_memory(pid: int, name: str) -> Iterator[int]:
    """An anonymous file of a process, by its name in /proc."""
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        path = f"{folder}/{entry}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{name} ("):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                break
    else:
        raise UnisonoError(f"process {pid} has no {name}")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class RingLayout(NamedTuple):
    """Rings of this name have the newest `kept` rows of `columns` numbers."""

    name: str
    columns: int
    kept: int

    def read(self, file: int) -> tuple[list[tuple[float, ...]], int]:
        """The rows in a file, the oldest first, and how many older ones are gone."""
        row = struct.Struct(f"<{self.columns}d")
        (count,) = _COUNT.unpack(os.pread(file, _COUNT.size, 0))
        size_bytes = min(count, self.kept) * row.size
        rows = list(row.iter_unpack(os.pread(file, size_bytes, _COUNT.size)))
        gone = max(0, count - self.kept)
        return rows[gone % self.kept :] + rows[: gone % self.kept], gone

    def read_process(self, pid: int) -> tuple[list[tuple[float, ...]], int] | None:
        """The same of a process of this host; None if it has no such ring, or has ended."""
        with contextlib.suppress(OSError, UnisonoError), open_memory(pid, self.name) as file:
            return self.read(file)
        return None


class Ring:
    """This process's own."""

    def __init__(self, layout: RingLayout) -> None:
        self._kept, self._row = layout.kept, struct.Struct(f"<{layout.columns}d")
        self.file = os.memfd_create(layout.name, os.MFD_CLOEXEC)
        os.truncate(self.file, _COUNT.size + self._kept * self._row.size)
        self._memory = mmap.mmap(self.file, 0)
        self._count = 0

    def add(self, *numbers: float) -> None:
        """One more row."""
        at = _COUNT.size + self._count % self._kept * self._row.size
        self._row.pack_into(self._memory, at, *numbers)
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)

    def close(self) -> None:
        self._memory.close()
        os.close(self.file)
