"""What a rank tells the conductor about its memory: regions of allocations, and how to open
them; and what the conductor has opened."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.comm.cuda.driver import Allocation, Driver, DriverError
from unisono.comm.cuda.passing import HANDLE_BYTES, export_memory, open_memory

_HEADER = struct.Struct("<IIQQ")
_REGION = struct.Struct(f"<{HANDLE_BYTES}sQQQQQ")
_NO_HANDLE = bytes(HANDLE_BYTES)


@dataclass(frozen=True)
class Region:
    """Memory of one rank: `size` bytes at `address`, in the allocation `number`, which begins at
    `base` and which others open by `handle`."""

    handle: bytes
    number: int
    base: int
    extent: int
    address: int
    size: int


@dataclass(frozen=True)
class RankMemory:
    """What one rank contributes to a call: its regions, in the order of the call. `bytes` is how
    much it moves; `gone` the number of an allocation that was freed, or 0. If others cannot open
    its memory, `can_map` is False."""

    regions: tuple[Region, ...]
    bytes: int
    gone: int
    can_map: bool


def encode_memory(memory: RankMemory, most_regions: int) -> bytes:
    """As bytes, of the same length for every rank of a call."""
    head = _HEADER.pack(len(memory.regions), memory.can_map, memory.bytes, memory.gone)
    rows = [
        _REGION.pack(each.handle, each.number, each.base, each.extent, each.address, each.size)
        for each in memory.regions
    ]
    return b"".join([head, *rows]).ljust(_HEADER.size + most_regions * _REGION.size, b"\0")


def decode_memory(data: bytes, most_regions: int) -> RankMemory:
    """The reverse of `encode_memory`, with at most this many regions."""
    count, can_map, size, gone = _HEADER.unpack_from(data)
    regions = tuple(
        Region(*_REGION.unpack_from(data, _HEADER.size + index * _REGION.size))
        for index in range(min(count, most_regions))
    )
    return RankMemory(regions, size, gone, bool(can_map))


class ExportedMemory:
    """The allocations of this rank that the conductor of one group knows.

    Freeing an allocation does not unmap it in other processes: so with every call a rank asks the
    driver about one of them, and tells the conductor if it is gone.
    """

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self._handles: dict[int, bytes] = {}
        self._known: deque[Allocation] = deque()
        self.refusal: DriverError | None = None
        """Why others cannot open this process's memory, once the driver has refused."""

    def describe(
        self, rows: Sequence[tuple[int, int]], moved_bytes: int = 0, can_map: bool = True
    ) -> RankMemory:
        """These rows of memory, as addresses and sizes, described for other processes, which
        open none of it without `can_map`."""
        regions = []
        driver = self._driver if can_map else None
        can_map = driver is not None and self.refusal is None
        for address, size in rows:
            region = Region(_NO_HANDLE, 0, 0, 0, address, size)
            if size and can_map and driver is not None:
                try:
                    region = self._region(driver, address, size)
                except DriverError as error:  # MIG, a sandbox
                    self.refusal = error
                    can_map = False
            regions.append(region)
        gone = self._find_gone(driver) if driver is not None else 0
        return RankMemory(tuple(regions), moved_bytes, gone, can_map)

    def _region(self, driver: Driver, address: int, size: int) -> Region:
        allocation = driver.allocation_of(address, size)
        handle = self._handles.get(allocation.number)
        if handle is None:
            handle = export_memory(driver, allocation)
            self._handles[allocation.number] = handle
            self._known.append(allocation)
        return Region(handle, allocation.number, allocation.base, allocation.size, address, size)

    def _find_gone(self, driver: Driver) -> int:
        """Check the allocation that was checked longest ago: its number if it is gone, else 0."""
        if not self._known:
            return 0
        known = self._known.popleft()
        with contextlib.suppress(DriverError):  # freed
            if driver.allocation_of(known.base, known.size) == known:
                self._known.append(known)
                return 0
        del self._handles[known.number]
        return known.number


class Mappings:
    """Memory of other processes mapped into this one: opened once, closed when its owner or its
    group is gone and nothing holds it. An owner is a token unique to a process.

    A handle may be open only once in a process, however many groups use it: so the mappings of all
    groups are in one place. An allocation is identified by its owner and its number, which the
    driver never reuses: memory that was freed and reallocated at the same address has another one.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._bases: dict[tuple[str, int], int] = {}
        self._groups: Counter[str] = Counter()
        self._held: Counter[tuple[str, int]] = Counter()
        self._gone: set[tuple[str, int]] = set()  # no group needs them, but something holds them
        self._lock = threading.RLock()  # the garbage collector may release a mapping

    def __len__(self) -> int:
        return len(self._bases)

    def enter(self, owner: str) -> None:
        """One more group has this process as a member."""
        with self._lock:
            self._groups[owner] += 1

    def leave(self, owner: str) -> None:
        """One group fewer; with the last one its memory is closed."""
        with self._lock:
            self._groups[owner] -= 1
            if self._groups[owner] > 0:
                return
            del self._groups[owner]
            for key in [key for key in self._bases if key[0] == owner]:
                self._close(key)

    def address_of(self, owner: str, region: Region) -> int:
        """The address of another process's region here. Raises DriverError if the driver does
        not open it."""
        key = owner, region.number
        with self._lock:
            self._gone.discard(key)
            base = self._bases.get(key)
            if base is None:
                told = region.handle, region.base, region.extent
                base = self._bases[key] = open_memory(self._driver, *told)
        return base + region.address - region.base

    def find(self, owner: str, region: Region) -> int | None:
        """The address of a region here; None: it is not open."""
        base = self._bases.get((owner, region.number))
        return None if base is None else base + region.address - region.base

    def hold(self, owner: str, region: Region) -> int:
        """The same, and keep the memory open until it is released as often as it was held, even
        after its owner is gone."""
        key = owner, region.number
        with self._lock:
            self._held[key] += 1
            try:
                return self.address_of(owner, region)
            except DriverError:
                del self._held[key]  # not open, so nothing else holds it
                raise

    def let_go(self, owner: str, number: int) -> None:
        """Release one hold of an allocation; the last one closes it, unless a group may use it."""
        key = owner, number
        with self._lock:
            self._held[key] -= 1
            if self._held[key] > 0:
                return
            del self._held[key]
            if key in self._gone or not self._groups[owner]:
                self._close(key)

    def forget(self, owner: str, number: int) -> None:
        """An allocation is gone: close it, unless it is held."""
        with self._lock:
            if (owner, number) in self._bases:
                self._close((owner, number))

    def _close(self, key: tuple[str, int]) -> None:
        if self._held[key]:
            self._gone.add(key)
            return
        self._gone.discard(key)
        base = self._bases.pop(key)
        with contextlib.suppress(DriverError):  # the GPU may have failed, or this process ends
            self._driver.close_memory(base)
