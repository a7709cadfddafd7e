"""Memory that all ranks of a group map: how they agree on it.

Rank 0 makes an anonymous file and tells the others where in /proc to find it. A rank that fails
says so in the last agreement, and then all fail. If a rank cannot look there (it is in another PID
namespace), the group has no shared memory for tensors.
"""

from __future__ import annotations

import errno
import math
import os
import weakref
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from unisono.comm.engine import native
from unisono.comm.meeting.membership import Membership
from unisono.comm.shared_tensors import Memory
from unisono.errors import SegmentError

if TYPE_CHECKING:
    from unisono.comm.engine.group_types import Block

_OPENED, _NO_ROOM, _FAILED, _OUT_OF_REACH = range(4)

_ranges: list[tuple[int, int]] = []
"""Where the blocks of this process begin and end, sorted."""


def is_in_a_block(address: int) -> bool:
    """Whether other processes can see this memory: it is in a block of some group."""
    index = bisect_right(_ranges, (address, math.inf)) - 1
    return index >= 0 and address < _ranges[index][1]


class Allocator:
    """Makes a group's blocks, in the order of its calls, and finds those in use."""

    def __init__(self, membership: Membership, name: str) -> None:
        self._rank, self._size, self._group = membership.rank, membership.size, membership.group
        self._name = name
        self._serial = 0
        self._is_possible = True
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()

    def find(self, address: int) -> tuple[Memory, int] | None:
        """The memory that contains an address, and the offset into which rank's part."""
        for block in list(self._blocks.values()):
            memory = Memory(block)
            offset = memory.find(address, self._size)
            if offset is not None:
                return memory, offset
        return None

    def own_parts(self) -> list[tuple[int, int, int]]:
        """The number of each memory, and where this rank's part begins and how long it is;
        sorted by address."""
        parts = []
        for number, block in list(self._blocks.items()):
            start, size = block.part(self._rank)
            if size:
                parts.append((number, block.address + start, size))
        return sorted(parts, key=itemgetter(1))

    def memory(self, number: int) -> Memory | None:
        """The memory of this number, if a rank still has tensors there."""
        block = self._blocks.get(number)
        if block is None:
            block = self._group.reopen_block(number)
            if block is None:
                return None
            self._remember(number, block)
        return Memory(block)

    def allocate(
        self, sizes: list[int], exchange: Callable[[array[int]], list[int]]
    ) -> Memory | None:
        """Memory in which each rank has this many bytes; None if no rank wants any, or they cannot
        share memory. Raises SegmentError on every rank if one cannot get its part. `exchange`
        shares every rank's integers with all, as a call of the group."""
        self._serial += 1
        if not any(sizes) or not self._is_possible:
            return None
        made, shown = self._create(sizes) if self._rank == 0 else (-1, (0, 0, 0))
        try:
            where = exchange(array("q", shown))[:3]
            block, outcome = self._open(made, where, sizes)
            outcomes = exchange(array("q", outcome))
        finally:
            if made >= 0:  # not before the others have opened it
                os.close(made)
        if _OUT_OF_REACH in outcomes[::2]:
            self._is_possible = False
            return None
        if block is None or any(outcomes[::2]):
            raise SegmentError(_describe(self._name, sizes, outcomes))
        block.use(self._serial)
        self._remember(self._serial, block)
        return Memory(block)

    def _create(self, sizes: list[int]) -> tuple[int, tuple[int, int, int]]:
        """Make the file. Returns its descriptor, and what to tell the others: this process, the
        descriptor and the inode, or what went wrong."""
        try:
            made = native.create_block(sizes)
        except OSError as error:
            return -1, (0, -1, error.errno or 0)
        return made, (os.getpid(), made, os.fstat(made).st_ino)

    def _open(
        self, made: int, where: list[int], sizes: list[int]
    ) -> tuple[Block | None, tuple[int, int]]:
        """This rank's block, if it could open it, and the result for the others."""
        opened = -1
        try:
            if made < 0:
                made = opened = _open_shown(*where)
            return self._group.open_block(made, sizes), (_OPENED, 0)
        except MemoryError:
            return None, (_NO_ROOM, max(0, native.memory_room()))
        except LookupError:
            return None, (_OUT_OF_REACH, 0)
        except OSError as error:
            return None, (_FAILED, error.errno or 0)
        finally:
            if opened >= 0:
                os.close(opened)

    def _remember(self, number: int, block: Block) -> None:
        self._blocks[number] = block
        extent = block.address, block.address + memoryview(block).nbytes
        insort(_ranges, extent)
        weakref.finalize(block, _ranges.remove, extent).atexit = False


def _open_shown(process: int, number: int, inode: int) -> int:
    """Open the file of rank 0. Raises LookupError if this process cannot find it, OSError if
    rank 0 could not make it or this rank may not open more files."""
    if number < 0:
        raise OSError(inode, os.strerror(inode))
    try:
        opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise LookupError from None
    if os.fstat(opened).st_ino != inode:  # another namespace's process with this PID
        os.close(opened)
        raise LookupError
    return opened


def _describe(name: str, sizes: list[int], outcomes: list[int]) -> str:
    total = sum(sizes)
    lines = [f"group {name} cannot share {total} bytes (up to {max(sizes)} per rank)"]
    for rank, (outcome, detail) in enumerate(zip(outcomes[::2], outcomes[1::2], strict=True)):
        if outcome == _NO_ROOM:
            lines.append(f"rank {rank} needs {sizes[rank]} bytes: its memory limits leave {detail}")
        elif outcome == _FAILED:
            why = os.strerror(detail) if detail else "there is nothing to map"
            lines.append(f"rank {rank} cannot map it: {why}")
    return "\n".join(lines)
