"""Parts of weights, and where they lie: engines read or serve them in place, in memory that all
ranks of a group have mapped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from unisono.comm.base import Communicator
from unisono.training.weights.shards import Box, Lengths, part_of


@dataclass(frozen=True)
class Place:
    """Where a trainer's tensor lies: `offset` bytes into its rank's part of the memory `number`."""

    number: int
    offset: int
    strides: Lengths

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int]], tensor: torch.Tensor) -> Place | None:
        """The place of one of this rank's tensors in `parts`, its own ones of the group's memories,
        in the order of their addresses; None: others do not have it mapped."""
        if not parts or tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        before = bisect_right(parts, address, key=itemgetter(1))
        number, start, size = parts[before - 1] if before else (0, address, 0)
        if address - start >= size:
            return None
        return cls(number, address - start, tuple(tensor.stride()))


@dataclass(frozen=True)
class Unit:
    """The elements of a `box` of a tensor, which rank `sender` holds as part of the box `held`, and
    which travel, or are read or served, in one piece."""

    name: str
    dtype: torch.dtype
    box: Box
    sender: int
    held: Box
    place: Place | None = None
    """Where other ranks can read it; None: it is sent, or served on a GPU."""
    gpu: str = ""
    """The GPU on which an engine serves it."""

    @property
    def bytes(self) -> int:
        """Its size on the way."""
        return self.box.count * self.dtype.itemsize


def bytes_of(units: Iterable[Unit]) -> int:
    """The size of all of these on the way."""
    return sum(unit.bytes for unit in units)


class MappedWeights:
    """The trainers' memory in this process, for as long as an update needs it."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def find(self, unit: Unit) -> torch.Tensor:
        """A view of a unit that has a place. RuntimeError: its owner has dropped it."""
        assert unit.place is not None
        view = torch.empty(0, dtype=unit.dtype)
        offset = unit.place.offset // unit.dtype.itemsize
        view.set_(self._storage_of(unit), offset, unit.held.shape, unit.place.strides)
        return part_of(view, unit.held, unit.box)

    def hold(self, units: Iterable[Unit]) -> None:
        """Have the memory of those that have a place. RuntimeError as above."""
        for unit in units:
            if unit.place is not None:
                self._storage_of(unit)

    def let_go(self) -> None:
        """Keep nothing mapped on their account."""
        self._storages.clear()

    def _storage_of(self, unit: Unit) -> torch.UntypedStorage:
        """All that a sender has in a memory."""
        assert unit.place is not None
        key = unit.place.number, unit.sender
        if key not in self._storages:
            memory = self._comm.transport.memory(unit.place.number)
            if memory is None:
                raise RuntimeError(
                    f"rank {unit.sender}'s weights are not in shared memory any more"
                )
            first: Any = memory.tensor(unit.sender, 0, (1,), torch.uint8)
            self._storages[key] = first.untyped_storage()
        return self._storages[key]
