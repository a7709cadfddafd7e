"""Weights in memory that all ranks of a group have mapped: engines read them where they lie, or
serve them there (aliasing.py)."""

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

    def plain(self) -> list[Any]:
        """As plain data."""
        return [self.number, self.offset, self.strides]

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
class PlacedPart:
    """The elements of a `box` of a tensor, which rank `sender` holds at `place` as the box
    `held`."""

    sender: int
    place: Place
    held: Box
    box: Box
    dtype: torch.dtype


class MappedWeights:
    """The trainers' memory in this process, for as long as an update needs it."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def find(self, part: PlacedPart) -> torch.Tensor:
        """A view of a part. RuntimeError: its owner has dropped it."""
        view = torch.empty(0, dtype=part.dtype)
        offset = part.place.offset // part.dtype.itemsize
        view.set_(self._storage_of(part), offset, part.held.shape, part.place.strides)
        return view if part.box == part.held else part_of(view, part.held, part.box)

    def hold(self, parts: Iterable[PlacedPart | None]) -> None:
        """Have the memory of all these. RuntimeError as above."""
        for part in parts:
            if part is not None:
                self._storage_of(part)

    def let_go(self) -> None:
        """Keep nothing mapped on their account."""
        self._storages.clear()

    def _storage_of(self, part: PlacedPart) -> torch.UntypedStorage:
        """All that a sender has in a memory."""
        key = part.place.number, part.sender
        storage = self._storages.get(key)
        if storage is None:
            memory = self._comm._memory(part.place.number)
            if memory is None:
                raise RuntimeError(
                    f"rank {part.sender}'s weights are not in shared memory any more"
                )
            first: Any = memory.tensor(part.sender, 0, (1,), torch.uint8)
            storage = self._storages[key] = first.untyped_storage()
        return storage
