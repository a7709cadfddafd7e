"""What a rank tells the conductor of its memory: regions of allocations, and how to open these."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.comm.cuda.driver import Driver, DriverError

_HEADER = struct.Struct("<IIQQ")
_REGION = struct.Struct("<64sQQQQQ")
_NO_HANDLE = bytes(64)


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
    """What one rank brings to a call: its regions, in the order of the call. `bytes` is how much
    it moves; `gone` the number of an allocation that is no more, or 0. Where its memory cannot be
    opened by others, `can_map` is False."""

    regions: tuple[Region, ...]
    bytes: int
    gone: int
    can_map: bool


def encoded_bytes(regions: int) -> int:
    """How long an encoded RankMemory of so many regions is."""
    return _HEADER.size + regions * _REGION.size


def encode_memory(memory: RankMemory, most_regions: int) -> bytes:
    """As bytes, of the same length for every rank of a call."""
    head = _HEADER.pack(len(memory.regions), memory.can_map, memory.bytes, memory.gone)
    rows = [
        _REGION.pack(each.handle, each.number, each.base, each.extent, each.address, each.size)
        for each in memory.regions
    ]
    return b"".join([head, *rows]).ljust(encoded_bytes(most_regions), b"\0")


def decode_memory(data: bytes, most_regions: int) -> RankMemory:
    """The reverse of `encode_memory`, with so many regions at most."""
    count, can_map, size, gone = _HEADER.unpack_from(data)
    regions = tuple(
        Region(*_REGION.unpack_from(data, _HEADER.size + index * _REGION.size))
        for index in range(min(count, most_regions))
    )
    return RankMemory(regions, size, gone, bool(can_map))


class ExportedMemory:
    """The allocations of this rank that the conductor of one group knows of.

    A rank that frees an allocation keeps nobody else from holding on to it: so with every call it
    asks the driver after one of them, and tells when it has gone.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles: dict[int, bytes] = {}
        self._known: deque[tuple[int, int]] = deque()
        self.refusal: DriverError | None = None
        """Why others cannot open memory of this process, once the driver has said so."""

    def describe(self, rows: Sequence[tuple[int, int]]) -> RankMemory:
        """What these rows of memory, as addresses and sizes, are for other processes."""
        regions = []
        can_map = self.refusal is None
        for address, size in rows:
            region = Region(_NO_HANDLE, 0, 0, 0, address, size)
            if size and can_map:
                try:
                    region = self._region(address, size)
                except DriverError as error:  # expandable segments, MIG, a sandbox
                    self.refusal = error
                    can_map = False
            regions.append(region)
        return RankMemory(tuple(regions), 0, self._find_gone(), can_map)

    def _region(self, address: int, size: int) -> Region:
        allocation = self._driver.allocation_of(address)
        handle = self._handles.get(allocation.number)
        if handle is None:
            handle = self._driver.export_memory(allocation.base)
            self._handles[allocation.number] = handle
            self._known.append((allocation.number, allocation.base))
        return Region(handle, allocation.number, allocation.base, allocation.size, address, size)

    def _find_gone(self) -> int:
        """Ask after the allocation that nobody has asked after for longest: its number, if it has
        gone; else 0."""
        if not self._known:
            return 0
        number, base = self._known.popleft()
        try:
            if self._driver.number_of(base) == number:
                self._known.append((number, base))
                return 0
        except DriverError:
            pass  # nothing lies there any more
        del self._handles[number]
        return number
