"""Large calls: one rank, the conductor, carries them out in everybody's memory.

Every process that computes on a shared GPU waits for its turn, so only one does. Each rank records
an event behind what its stream has to do so far, and tells where its rows lie. The conductor has
its stream wait for those events, gives it the work, and records an event that the others' streams
wait for. Processes wait for each other's calls only, never for the GPU. An event whose process has
died is over for those who wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.comm.cuda.driver import Driver, DriverError, load_driver
from unisono.comm.cuda.kernels import Kernels
from unisono.comm.cuda.mappings import Mappings
from unisono.comm.cuda.regions import RankMemory

CONDUCTOR = 0
"""Its rank."""

EVENTS = 2
"""Of each rank, used in turn."""


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
    """One rank's part in the large calls of a group: its own events, and on the conductor the
    others' events and memory; on the others the conductor's events."""

    def __init__(self, driver: Driver, rank: int) -> None:
        self._driver = driver
        self._rank = rank
        self._turn = 0
        self._own = [driver.new_event() for _ in range(EVENTS)]
        self._theirs: dict[int, list[Any]] = {}
        self._owners: list[str] = []
        self._mappings: Mappings | None = None

    @property
    def is_conductor(self) -> bool:
        """Whether this rank does the work of all."""
        return self._rank == CONDUCTOR

    def export_events(self) -> list[bytes]:
        """By what the others open this rank's events."""
        return [self._driver.export_event(event) for event in self._own]

    def meet(self, owners: Sequence[str], events: Sequence[Sequence[bytes]]) -> None:
        """Open what the others have exported, by rank. Raises DriverError where that fails."""
        for rank, handles in enumerate(events):
            if rank != self._rank and (self.is_conductor or rank == CONDUCTOR):
                self._theirs[rank] = [self._driver.open_event(handle) for handle in handles]
        if self.is_conductor:
            self._mappings = mappings_of_this_process()
            self._owners = list(owners)
            for rank, owner in enumerate(owners):
                if rank != self._rank:
                    self._mappings.enter(owner)

    def arrive(self, stream: int) -> None:
        """What the stream has to do so far comes before this call."""
        self._turn = (self._turn + 1) % EVENTS
        if not self.is_conductor:
            self._driver.record(self._own[self._turn], stream)

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
        the event that the others wait for."""
        driver = self._driver
        for events in self._theirs.values():
            driver.await_event(stream, events[self._turn])
        for task, addresses in located:
            if isinstance(task, Reduce):
                count = len(task.sources)
                rows = addresses[:count], addresses[count:]
                how = task.reduction, task.factor, task.dtype
                _kernels().reduce(*how, *rows, task.size, stream)
            elif addresses[0] != addresses[1]:
                driver.copy_within(addresses[1], addresses[0], task.size, stream)
        driver.record(self._own[self._turn], stream)

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
            self._driver.await_event(stream, self._theirs[CONDUCTOR][self._turn])

    def close(self) -> None:
        """Give events and mappings back."""
        for event in itertools.chain(self._own, *self._theirs.values()):
            with contextlib.suppress(DriverError):  # the GPU may have failed
                self._driver.destroy_event(event)
        self._own, self._theirs = [], {}
        if self._mappings is not None:
            for rank, owner in enumerate(self._owners):
                if rank != self._rank:
                    self._mappings.leave(owner)
            self._mappings = None


def _places(task: Task) -> list[tuple[int, int, int]]:
    if isinstance(task, Copy):
        return [task.source, task.target]
    return [*task.sources, *task.targets]
