"""Memory that all ranks of a group have mapped: how they agree on it, and tensors over it.

Rank 0 makes a nameless file and tells the others where in /proc they find it; where one of them
cannot open it there (in another pid namespace, say), it hands a descriptor to each. Each rank
claims the pages of its own part and maps the whole, and only when all have done so it is used.
Whoever fails says so in the last agreement, and then all do.
"""

from __future__ import annotations

import errno
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from unisono.comm.engine import create_block, memory_room
from unisono.comm.rendezvous.handover import hand_out, receive_from
from unisono.comm.rendezvous.lobby import Lobby
from unisono.comm.rendezvous.membership import Membership
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.shared_tensors import Memory, is_of_torch
from unisono.errors import SegmentError

if TYPE_CHECKING:
    from unisono.comm.engine_types import Block
    from unisono.comm.tensors import Tensor

_OPENED, _NO_ROOM, _FAILED, _OUT_OF_REACH = range(4)


class _Ranges:
    """Where the blocks of this process lie. Whoever updates weights asks for each tensor."""

    def __init__(self) -> None:
        self._of_blocks: dict[weakref.ref[Block], tuple[int, int]] = {}
        self._changes = 0
        self._in_order: tuple[int, list[tuple[int, int]]] = (0, [])
        """As they were after so many changes."""

    def add(self, block: Block, start: int, end: int) -> None:
        self._of_blocks[weakref.ref(block, self._forget)] = start, end
        self._changes += 1

    def _forget(self, block: weakref.ref[Block]) -> None:
        self._of_blocks.pop(block, None)
        self._changes += 1

    def have(self, address: int) -> bool:
        changes, ranges = self._in_order
        if changes != self._changes:
            changes = self._changes
            ranges = sorted(self._of_blocks.values())
            self._in_order = changes, ranges
        index = bisect_right(ranges, address, key=itemgetter(0)) - 1
        return index >= 0 and address < ranges[index][1]


_ranges = _Ranges()


def is_in_a_block(address: int) -> bool:
    """Whether other processes may look at this memory: it lies in a block of some group."""
    return _ranges.have(address)


class BlockMemory(Memory):
    """A block of the engine's. Tensors keep the block alive, not this."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def tensor(
        self, rank: int, offset: int, shape: Sequence[int], dtype: Any, strides: Any = None
    ) -> Tensor:
        start, size = self._block.part(rank)
        if not size:
            raise ValueError(f"rank {rank} has nothing in this memory")
        if is_of_torch(dtype):
            import torch

            part = torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=start)
            view = torch.empty(0, dtype=dtype)
            if strides is None:
                strides = torch.empty(shape, dtype=dtype, device="meta").stride()
            _check_fits(rank, offset, shape, [s * dtype.itemsize for s in strides], dtype, size)
            storage = part.untyped_storage()
            return view.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(strides))
        import numpy

        array_part = numpy.frombuffer(memoryview(self._block), numpy.uint8, size, start)
        if strides is not None:
            _check_fits(rank, offset, shape, strides, dtype, size)
        return numpy.ndarray(tuple(shape), dtype, array_part, offset, strides)

    def find(self, address: int, ranks: int) -> int | None:
        """How far into a rank's part an address lies; None: in none."""
        for rank in range(ranks):
            start, size = self._block.part(rank)
            if 0 <= address - self._block.address - start < size:
                return address - self._block.address - start
        return None


def _check_fits(
    rank: int, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: Any, size: int
) -> None:
    if 0 in shape:
        return
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    first = offset + sum(step for step in steps if step < 0)
    end = offset + sum(step for step in steps if step > 0) + dtype.itemsize
    if first < 0 or end > size or offset % dtype.itemsize:
        raise ValueError(f"rank {rank} has only {size} bytes in this memory, and no counterpart")


class Allocator:
    """Makes a group's blocks, in the order of its calls, and finds those in use."""

    def __init__(self, membership: Membership, name: str) -> None:
        self._membership = membership
        self._name = name
        self._serial = 0
        self._hands_over = False  # somebody could not open a file of rank 0's in /proc
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()

    def find(self, address: int) -> tuple[Memory, int] | None:
        """The memory in which an address lies, and how far into whose part."""
        for block in list(self._blocks.values()):
            memory = BlockMemory(block)
            offset = memory.find(address, self._membership.size)
            if offset is not None:
                return memory, offset
        return None

    def own_parts(self) -> list[tuple[int, int, int]]:
        """The number of each memory, and where this rank's part begins and how long it is; in the
        order of their addresses."""
        parts = []
        for number, block in list(self._blocks.items()):
            start, size = block.part(self._membership.rank)
            if size:
                parts.append((number, block.address + start, size))
        return sorted(parts, key=itemgetter(1))

    def memory(self, number: int) -> Memory | None:
        """The memory of this number, if a rank still has tensors there."""
        block = self._blocks.get(number)
        if block is None:
            block = self._membership.group.reopen_block(number)
            if block is not None:
                self._remember(number, block)
        return None if block is None else BlockMemory(block)

    def _remember(self, number: int, block: Block) -> None:
        self._blocks[number] = block
        _ranges.add(block, block.address, block.address + memoryview(block).nbytes)

    def allocate(
        self,
        sizes: list[int],
        exchange: Callable[[array[int]], list[int]],
        lobby: Lobby,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> Memory | None:
        """Memory in which each rank has so many bytes; None where no rank wants any. Raises
        SegmentError on every rank if one cannot have its part. `exchange` gives every rank's
        integers to all, as a call of the group; `check` raises once the group is over."""
        self._serial += 1
        if not any(sizes):
            return None
        block, outcomes = None, [_OUT_OF_REACH]
        with _Descriptor() as made:
            if not self._hands_over:
                shown = array("q", self._create(made, sizes))
                block, outcomes = self._open(
                    partial(_find_file, made, exchange(shown)[:3]), sizes, exchange
                )
            if _OUT_OF_REACH in outcomes[::2]:
                self._hands_over = True
                way = partial(self._hand_over, made, sizes, lobby, deadline, check)
                block, outcomes = self._open(way, sizes, exchange)
        if block is None or any(outcomes[::2]):
            raise SegmentError(_describe(self._name, sizes, outcomes))
        block.use(self._serial)
        self._remember(self._serial, block)
        return BlockMemory(block)

    def _open(
        self,
        get_file: Callable[[], int],
        sizes: list[int],
        exchange: Callable[[array[int]], list[int]],
    ) -> tuple[Block | None, list[int]]:
        """This rank's block, if it could open it, and how all ranks fared."""
        block, outcome = None, (_OPENED, 0)
        try:
            block = self._membership.group.open_block(get_file(), sizes)
        except MemoryError:
            outcome = _NO_ROOM, max(0, memory_room())
        except _OutOfReach:
            outcome = _OUT_OF_REACH, 0
        except OSError as error:
            outcome = _FAILED, error.errno or 0
        return block, exchange(array("q", outcome))

    def _create(self, made: _Descriptor, sizes: list[int]) -> tuple[int, int, int]:
        """On rank 0 make the file: its process, descriptor and inode, or what went wrong."""
        if self._membership.rank:
            return 0, 0, 0
        try:
            made.number = create_block(sizes)
            return os.getpid(), made.number, os.fstat(made.number).st_ino
        except OSError as error:
            return 0, -1, error.errno or 0

    def _hand_over(
        self,
        made: _Descriptor,
        sizes: list[int],
        lobby: Lobby,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> int:
        """The descriptor, on rank 0 once all others have it. `check` raises once the group is
        over."""
        membership = self._membership
        key = f"{membership.key}/memory/{self._serial}"
        if membership.rank:
            made.close()  # others may not have found it
            address = membership.members[0].address
            made.number = receive_from(address, key, membership.rank, deadline, check)
            if made.number < 0:
                raise OSError(0, "rank 0 has not made it")
            return made.number
        failure = 0
        if made.number < 0:
            _, _, failure = self._create(made, sizes)
        hand_out(made.number, lobby, key, membership.size, deadline, check)
        if made.number < 0:
            raise OSError(failure, os.strerror(failure))
        return made.number


class _OutOfReach(Exception):
    """The file is not where this process looks for it."""


class _Descriptor:
    """A file that is closed at the end of `with`."""

    def __init__(self) -> None:
        self.number = -1

    def __enter__(self) -> _Descriptor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self.number >= 0:
            number, self.number = self.number, -1
            os.close(number)


def _find_file(made: _Descriptor, shown: list[int]) -> int:
    """The file that rank 0 has shown: a process, one of its descriptors, and the inode."""
    process, number, inode = shown
    if number < 0:
        raise OSError(inode, os.strerror(inode))
    if made.number < 0:
        try:
            made.number = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise _OutOfReach from None
        if os.fstat(made.number).st_ino != inode:  # another namespace's process of this number
            made.close()
            raise _OutOfReach
    return made.number


def _describe(name: str, sizes: list[int], outcomes: list[int]) -> str:
    total = sum(sizes)
    lines = [f"no {total} bytes of shared memory for group {name} ({max(sizes)} for one rank)"]
    for rank, (outcome, detail) in enumerate(zip(outcomes[::2], outcomes[1::2], strict=True)):
        if outcome == _NO_ROOM:
            lines.append(f"rank {rank} wants {sizes[rank]}: its memory limits leave {detail}")
        elif outcome == _FAILED:
            why = os.strerror(detail) if detail else "there is nothing to map"
            lines.append(f"rank {rank} cannot map it: {why}")
    return "\n".join(lines)
