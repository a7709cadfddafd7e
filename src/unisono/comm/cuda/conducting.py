"""Large calls: one rank, the conductor, carries them out in everybody's memory.

Every process that computes on a shared GPU waits for its turn, so only one does. Each rank's stream
raises a flag behind what it has to do so far, and the rank tells where its rows lie. The conductor
has its stream wait for those flags, gives it the work, and has it raise the flag that the others'
streams wait for. Processes wait for each other's calls only, never for the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.comm.cuda.driver import Driver, load_driver
from unisono.comm.cuda.flags import Flags
from unisono.comm.cuda.kernels import Kernels
from unisono.comm.cuda.mappings import Mappings
from unisono.comm.cuda.regions import RankMemory

CONDUCTOR = 0
"""Its rank."""

_NUMBERS = 1 << 32
"""Of calls, which then begin anew."""


@dataclass(frozen=True)
class Reduce:
    """Combine the same region of rows: (rank, index of its region, first byte)."""

    reduction: str
    factor: float
    dtype: str
    sources: Sequence[tuple[int, int, int]]
    targets: Sequence[tuple[int, int, int]]
    size: int


@dataclass(frozen=True)
class Copy:
    """Copy `size` bytes between regions: (rank, index of its region, first byte)."""

    source: tuple[int, int, int]
    target: tuple[int, int, int]
    size: int


Task = Reduce | Copy


@functools.cache
def mappings_of_this_process() -> Mappings:
    """The memory of other processes that this one has open."""
    return Mappings(load_driver())


@functools.cache
def _kernels() -> Kernels:
    return Kernels(load_driver())


class Orchestra:
    """One rank's part in the large calls of a group: `flags` of all ranks, and on the conductor the
    others' memory. `owners` are the processes of the ranks."""

    def __init__(self, driver: Driver, rank: int, owners: Sequence[str], flags: Flags) -> None:
        self._driver = driver
        self._rank = rank
        self._owners = owners
        self._flags = flags
        self._number = 0
        self._mappings: Mappings | None = None
        if self.is_conductor:
            self._mappings = mappings_of_this_process()
            for owner in self._others():
                self._mappings.enter(owner)

    def _others(self) -> list[str]:
        return [owner for rank, owner in enumerate(self._owners) if rank != self._rank]

    @property
    def is_conductor(self) -> bool:
        """Whether this rank does the work of all."""
        return self._rank == CONDUCTOR

    def arrive(self, stream: int) -> None:
        """What the stream has to do so far comes before this call."""
        self._number = (self._number + 1) % _NUMBERS
        if not self.is_conductor:
            self._flags.write(stream, self._number)

    def locate(
        self, memory: Sequence[RankMemory], tasks: Sequence[Task]
    ) -> list[tuple[Task, list[int]]]:
        """On the conductor: where the tasks' memory lies in this process. Raises DriverError where
        some of it cannot be opened."""
        assert self._mappings is not None
        for rank, brought in enumerate(memory):
            if brought.gone and rank != self._rank:
                self._mappings.forget(self._owners[rank], brought.gone)
        begin = functools.cache(functools.partial(self._address, memory))
        return [
            (task, [begin(rank, index) + first for rank, index, first in _places(task)])
            for task in tasks
            if task.size
        ]

    def conduct(self, located: Sequence[tuple[Task, list[int]]], stream: int) -> None:
        """On the conductor: give the stream the tasks of a call, between everybody's arrival and
        the flag that the others wait for."""
        driver = self._driver
        for rank in range(len(self._owners)):
            if rank != self._rank:
                self._flags.wait(stream, rank, self._number)
        for task, addresses in located:
            if isinstance(task, Reduce):
                count = len(task.sources)
                rows = addresses[:count], addresses[count:]
                how = task.reduction, task.factor, task.dtype
                _kernels().reduce(*how, *rows, task.size, stream)
            elif addresses[0] != addresses[1]:
                driver.copy_within(addresses[1], addresses[0], task.size, stream)
        self._flags.write(stream, self._number)

    def _address(self, memory: Sequence[RankMemory], rank: int, index: int) -> int:
        region = memory[rank].regions[index]
        if rank == self._rank or not region.size:
            return region.address
        assert self._mappings is not None
        return self._mappings.address_of(self._owners[rank], region)

    def follow(self, stream: int) -> None:
        """On the others, once the conductor has done its part: what the stream is given next comes
        after the call."""
        if not self.is_conductor:
            self._flags.wait(stream, CONDUCTOR, self._number)

    def release(self) -> None:
        """This rank's GPU has failed: nobody shall wait for its stream."""
        self._flags.release()

    def close(self) -> None:
        """Give flags and mappings back."""
        self._flags.close()
        if self._mappings is not None:
            for owner in self._others():
                self._mappings.leave(owner)
            self._mappings = None


def _places(task: Task) -> list[tuple[int, int, int]]:
    if isinstance(task, Copy):
        return [task.source, task.target]
    return [*task.sources, *task.targets]
