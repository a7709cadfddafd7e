"""How streams of several processes wait for each other: a number per rank, in the CPUs' memory.

A stream that has come to a call writes the call's number to its rank's flag, and streams of other
processes wait until it is there. CUDA's own means, events between processes, would let a stream
wait for ever for a process that has died; the flag of such a rank is raised by the engine, which
watches the processes, and whoever waits goes on.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy

from unisono.comm.cuda.driver import Driver, DriverError
from unisono.comm.engine.group_types import Group
from unisono.comm.shared_tensors import Memory

_LINE_BYTES = 64  # of the engine's flags
_RELEASED = 1 << 30


def flags_bytes(size: int) -> int:
    """How much memory the flags of so many ranks take."""
    return size * _LINE_BYTES


class Flags:
    """The flags of a group on one rank. They lie at the beginning of rank 0's part of `memory`.
    Raises DriverError where the GPU cannot have it."""

    def __init__(self, driver: Driver, group: Group, rank: int, size: int, memory: Memory) -> None:
        self._driver = driver
        self._group = group
        self._rank = rank
        words = _LINE_BYTES // 4
        array: Any = memory.tensor(0, 0, (size, words), numpy.dtype("uint32"))
        self._shared = array
        first = array.ctypes.data
        self._page = first - first % mmap.PAGESIZE
        end = -(-(first + flags_bytes(size)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._first = driver.open_host_memory(self._page, end - self._page) + first - self._page
        self._number = 0
        self._stream: int | None = None
        try:
            self.write(0, 0)  # a driver that cannot do it says so now
            driver.synchronize(0)  # or this 0 might come after another stream's number
        except DriverError:
            driver.close_host_memory(self._page)
            raise
        group.set_flags(first)

    def write(self, stream: int, number: int) -> None:
        """This rank's flag comes to `number` once the stream has come here. Calls may come on
        different streams: their numbers appear in order all the same."""
        mine = self._first + self._rank * _LINE_BYTES
        if self._stream is not None and stream != self._stream:
            self._driver.await_flag(stream, mine, self._number)
        self._driver.write_flag(stream, mine, number)
        self._stream, self._number = stream, number

    def wait(self, stream: int, rank: int, number: int) -> None:
        """Let the stream go on once a rank's flag has come to `number`, or the rank has died."""
        self._driver.await_flag(stream, self._first + rank * _LINE_BYTES, number)

    def release(self) -> None:
        """This rank's GPU has failed, and will write nothing any more: let the others go on."""
        self._shared[self._rank, 0] += numpy.uint32(_RELEASED)

    def close(self) -> None:
        """Give the memory back; the stream has no more use for it."""
        self._group.set_flags(0)
        with contextlib.suppress(DriverError):  # the GPU may have failed
            self._driver.close_host_memory(self._page)
