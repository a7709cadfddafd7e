"""Weights in memory that all ranks of a group have mapped: engines read them where they lie, or
serve them there (aliasing.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm.base import Communicator
from unisono.comm.shared_tensors import Memory
from unisono.training.weights.shards import Box, Lengths, part_of


@dataclass(frozen=True)
class Place:
    """Where a trainer's tensor lies: `offset` bytes into its rank's part of the memory `number`."""

    number: int
    offset: int
    strides: Lengths

    @classmethod
    def of(cls, comm: Communicator, tensor: torch.Tensor) -> Place | None:
        """The place of one of this rank's tensors; None: others do not have it mapped."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        found = comm._place_of(tensor.data_ptr())
        return None if found is None else cls(*found, tuple(tensor.stride()))


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
        self._memories: dict[int, Memory] = {}

    def find(self, part: PlacedPart) -> torch.Tensor:
        """A view of a part. RuntimeError: its owner has dropped it."""
        number = part.place.number
        memory = self._memories.get(number) or self._comm._memory(number)
        if memory is None:
            raise RuntimeError(f"rank {part.sender}'s weights are not in shared memory any more")
        self._memories[number] = memory
        whole: Any = memory.tensor(
            part.sender, part.place.offset, part.held.shape, part.dtype, part.place.strides
        )
        return part_of(whole, part.held, part.box)

    def hold(self, parts: Iterable[PlacedPart | None]) -> None:
        """Have the memory of all these. RuntimeError as above."""
        for part in parts:
            if part is not None:
                self.find(part)

    def let_go(self) -> None:
        """Keep nothing mapped on their account."""
        self._memories.clear()
