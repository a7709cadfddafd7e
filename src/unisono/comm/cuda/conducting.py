"""Large calls: one rank, their conductor, carries them out in everybody's memory.

Every process that computes on a shared GPU waits for its turn, so only one does. Each rank's stream
raises a flag behind what it has to do so far, and the rank tells where its rows lie. The conductor
has its stream wait for those flags, gives it the work, and has it raise the flag that the others'
streams wait for. Processes wait for each other's calls only, never for the GPU.
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
"""Its rank, where a call does not choose another."""

_NUMBERS = 1 << 32
"""Of calls, which then begin anew."""

_LINE_BYTES = 64  # of the engine's flags
_RELEASED = 1 << 30


Place = tuple[int, int, int]
"""A rank, the index of its region, and the first byte in that."""


@dataclass(frozen=True)
class Task:
    """Copy `size` bytes from a place to others, or reduce rows of so many from several."""

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
    """How much memory the flags of so many ranks take."""
    return size * _LINE_BYTES


class Flags:
    """How streams of several processes wait for each other: a number per rank, in the CPUs' memory.

    A stream that has come to a call writes the call's number to its rank's flag, and streams of
    other processes wait until it is there. CUDA's own means, events between processes, would let a
    stream wait for ever for a process that has died; the flag of such a rank is raised by the
    engine, which watches the processes, and whoever waits goes on.

    They lie at the beginning of rank 0's part of `memory`. Raises DriverError where the GPU cannot
    have it."""

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
            self.write(0, 0)  # a driver that cannot do it says so now
            driver.synchronize(0)  # or this 0 might come after another stream's number
        except DriverError:
            self._memory.close()
            raise
        group.set_flags(self._memory.address)

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
        self._mappings = mappings_of_this_process()
        for owner in self._others():
            self._mappings.enter(owner)

    def _others(self) -> list[str]:
        return [owner for rank, owner in enumerate(self._owners) if rank != self._rank]

    def arrive(self, stream: int, conductor: int = CONDUCTOR) -> None:
        """What the stream has to do so far comes before this call."""
        self._number = (self._number + 1) % _NUMBERS
        if self._rank != conductor:
            self._flags.write(stream, self._number)

    def forget(self, memory: Sequence[RankMemory]) -> None:
        """Close what its owner has freed."""
        for owner, brought in zip(self._owners, memory, strict=True):
            if brought.gone:
                self._mappings.forget(owner, brought.gone)

    def locate(
        self, memory: Sequence[RankMemory], tasks: Sequence[Task]
    ) -> list[tuple[Task, list[int]]]:
        """On the conductor: where the tasks' memory lies in this process. Raises DriverError where
        some of it cannot be opened."""
        begin = functools.cache(functools.partial(self._address, memory))
        return [
            (
                task,
                [begin(*place) + first for *place, first in (*task.sources, *task.targets)],
            )
            for task in tasks
            if task.size
        ]

    def conduct(self, located: Sequence[tuple[Task, list[int]]], stream: int) -> None:
        """On the conductor: give the stream the tasks of a call, between everybody's arrival and
        the flag that the others wait for."""
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
        """On the others, once the conductor has done its part: what the stream is given next comes
        after the call."""
        if self._rank != conductor:
            self._flags.wait(stream, conductor, self._number)

    def release(self) -> None:
        """This rank's GPU has failed: nobody shall wait for its stream."""
        self._flags.release()

    def close(self) -> None:
        """Give flags and mappings back."""
        self._flags.close()
        for owner in self._others():
            self._mappings.leave(owner)
