"""Large calls: one rank, their conductor, runs them in all ranks' memory.

Every process that computes on a shared GPU waits for its turn, so only one does. Each rank's stream
raises a flag after its work so far, and the rank publishes where its rows lie. The conductor's
stream waits for those flags, does the work, and raises the flag that the others' streams wait for.
Processes wait only for each other's calls, never for the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from unisono.comm.cuda.driver import Driver, DriverError, load_driver
from unisono.comm.cuda.kernels import Kernels
from unisono.comm.cuda.regions import Mappings, RankMemory
from unisono.comm.cuda.staging import CommonMemory
from unisono.comm.engine.group_types import Group
from unisono.comm.reductions import Reduction
from unisono.comm.shared_tensors import Memory

CONDUCTOR = 0
"""Its rank, unless a call chooses another."""

_NUMBERS = 1 << 32
"""Of calls; then they start over."""

_LINE_BYTES = 64  # of the engine's flags
_RELEASED = 1 << 30


Place = tuple[int, int, int]
"""A rank, the index of its region, and the first byte in that."""


@dataclass(frozen=True)
class Task:
    """Copy `size` bytes from one place to others, or reduce rows of that size from several."""

    sources: Sequence[Place]
    targets: Sequence[Place]
    size: int
    reduction: Reduction | None = None
    dtype: str = ""


@functools.cache
def mappings_of_this_process() -> Mappings:
    """The memory of other processes that this one has open."""
    return Mappings(load_driver())


@functools.cache
def _kernels() -> Kernels:
    return Kernels(load_driver())


def flags_bytes(size: int) -> int:
    """The memory that the flags of this many ranks take."""
    return size * _LINE_BYTES


class Flags:
    """How streams of several processes wait for each other: a number per rank, in the CPUs' memory.

    A stream that reaches a call writes the call's number to its rank's flag, and streams of other
    processes wait until it is there. With CUDA's own events between processes a stream would wait
    forever for a process that has died; here the engine, which watches the processes, raises the
    flag of a dead rank, and the waiting streams continue.

    They lie at the beginning of rank 0's part of `memory`. Raises DriverError if the GPU cannot
    map it."""

    def __init__(self, driver: Driver, group: Group, rank: int, size: int, memory: Memory) -> None:
        self._driver = driver
        self._group = group
        self._rank = rank
        self._memory = CommonMemory(driver, memory, flags_bytes(size))
        self._shared: Any = self._memory.array.view("uint32").reshape(size, -1)
        self._first = self._memory.on_gpu
        self._number = 0
        self._stream: int | None = None
        try:
            self.write(0, 0)  # fails now if the driver does not support it
            driver.synchronize(0)  # or this 0 might overwrite another stream's number
        except DriverError:
            self._memory.close()
            raise
        group.set_flags(self._memory.address)

    def write(self, stream: int, number: int) -> None:
        """This rank's flag becomes `number` once the stream gets here. Calls may be on different
        streams: their numbers still appear in order."""
        mine = self._first + self._rank * _LINE_BYTES
        if self._stream is not None and stream != self._stream:
            self._driver.await_flag(stream, mine, self._number)
        self._driver.write_flag(stream, mine, number)
        self._stream, self._number = stream, number

    def wait(self, stream: int, rank: int, number: int) -> None:
        """Let the stream continue once a rank's flag has reached `number`, or the rank has died."""
        self._driver.await_flag(stream, self._first + rank * _LINE_BYTES, number)

    def release(self) -> None:
        """This rank's GPU has failed, and will not write any more: let the others continue."""
        self._shared[self._rank, 0] += numpy.uint32(_RELEASED)

    def close(self) -> None:
        """Release the memory; the stream no longer uses it."""
        self._group.set_flags(0)
        with contextlib.suppress(DriverError):  # the GPU may have failed
            self._memory.close()


class Orchestra:
    """One rank's part in the large calls of a group: `flags` of all ranks, and the memory of others
    in which it has conducted. `owners` are the processes of the ranks."""

    def __init__(self, driver: Driver, rank: int, owners: Sequence[str], flags: Flags) -> None:
        self._driver = driver
        self._rank = rank
        self._owners = owners
        self._flags = flags
        self._number = 0
        self._latest: tuple[Any, Any, list[tuple[Task, list[int]]]] = None, None, []
        self._mappings = mappings_of_this_process()
        for owner in self._others():
            self._mappings.enter(owner)

    def _others(self) -> list[str]:
        return [owner for rank, owner in enumerate(self._owners) if rank != self._rank]

    def arrive(self, stream: int, conductor: int = CONDUCTOR) -> None:
        """Work queued on the stream so far comes before this call."""
        self._number = (self._number + 1) % _NUMBERS
        if self._rank != conductor:
            self._flags.write(stream, self._number)

    def forget(self, memory: Sequence[RankMemory]) -> None:
        """Close mappings of memory that its owner has freed."""
        for owner, brought in zip(self._owners, memory, strict=True):
            if brought.gone:
                self._mappings.forget(owner, brought.gone)

    def locate(
        self, memory: Sequence[RankMemory], tasks: Sequence[Task]
    ) -> list[tuple[Task, list[int]]]:
        """On the conductor: where the tasks' memory is in this process. Raises DriverError if
        some of it cannot be opened."""
        of, what, located = self._latest
        if memory is of and tasks == what:
            return located
        begin = functools.cache(functools.partial(self._address, memory))
        located = [
            (
                task,
                [begin(*place) + first for *place, first in (*task.sources, *task.targets)],
            )
            for task in tasks
            if task.size
        ]
        self._latest = memory, tasks, located
        return located

    def conduct(self, located: Sequence[tuple[Task, list[int]]], stream: int) -> None:
        """On the conductor: queue the tasks of a call on the stream, after all ranks' arrival
        and before the flag that the others wait for."""
        for rank in range(len(self._owners)):
            if rank != self._rank:
                self._flags.wait(stream, rank, self._number)
        for task, addresses in located:
            count = len(task.sources)
            sources, targets = addresses[:count], addresses[count:]
            if task.reduction is not None:
                how = task.reduction, task.dtype
                _kernels().reduce(*how, sources, targets, task.size, stream)
                continue
            for target in targets:
                if target != sources[0]:
                    self._driver.copy_within(target, sources[0], task.size, stream)
        self._flags.write(stream, self._number)

    def _address(self, memory: Sequence[RankMemory], rank: int, index: int) -> int:
        region = memory[rank].regions[index]
        if rank == self._rank or not region.size:
            return region.address
        return self._mappings.address_of(self._owners[rank], region)

    def follow(self, stream: int, conductor: int = CONDUCTOR) -> None:
        """On the others, once the conductor has done its part: later work on the stream comes
        after the call."""
        if self._rank != conductor:
            self._flags.wait(stream, conductor, self._number)

    def release(self) -> None:
        """This rank's GPU has failed: let no rank wait for its stream."""
        self._flags.release()

    def close(self) -> None:
        """Release flags and mappings."""
        self._flags.close()
        for owner in self._others():
            self._mappings.leave(owner)
