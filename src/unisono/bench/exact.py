"""Inputs whose exact result is known: small whole numbers that repeat after `PERIOD` elements, a
prime, so that no cut of a large tensor coincides with a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from unisono.bench.collectives import neighbour
from unisono.cases.primitives import Primitive
from unisono.cases.results import Origin, compute, origins

if TYPE_CHECKING:
    import torch

PERIOD = 8191
REPETITIONS = 64
POISON = 119
"""The value of outputs before the call: one that cannot be in a result."""


@dataclass(frozen=True)
class CheckedCall:
    """One checked call: its case, and which of several roots and sets of values it uses."""

    collective: Primitive
    op: str
    rank: int
    size: int
    root: int
    phase: int

    # -- what goes in --------------------------------------------------------------------------

    def fill(self, input: torch.Tensor) -> None:
        for part, piece in enumerate(self._parts("input", input)):
            for target, values in _chunks(self._sent(self.rank, part), piece):
                target.copy_(values)

    def _sent(self, rank: int, part: int) -> Any:
        """One period of what a rank has in a part of its input."""
        if self.collective.reduces:
            return _contribution(self.op, rank, self.size, self.phase + 3 * part)
        return _moved(rank * self.size + part, self.phase)

    # -- what comes out ------------------------------------------------------------------------

    def wrong(self, output: torch.Tensor) -> int:
        """How many elements of this rank's output differ from the exact result."""
        expected = self._origins()
        if expected is None:
            return 0
        return sum(
            int((found != right).sum())
            for origin, piece in zip(expected, self._parts("output", output), strict=True)
            for found, right in _chunks(compute(origin, self._sent, self.op), piece)
        )

    def _parts(self, side: str, tensor: torch.Tensor) -> torch.Tensor:
        """A row for each rank, if this side has a part for each."""
        return tensor.view(self.size if side in self.collective.wide else 1, -1)

    def _origins(self) -> list[Origin] | None:
        """Where the parts of this rank's output come from; None if its output is undefined."""
        if not self.collective.is_collective:
            source = neighbour(self.rank, self.size)
            if source is None or (self.collective.name == "stream" and self.rank % 2 == 0):
                return None  # no rank sends to this one: the messages of a stream go one way
            return [Origin(0, [source])]
        return origins(self.collective, self.rank, self.size, self.root)


def _moved(code: int, phase: int) -> Any:
    index = numpy.arange(PERIOD)
    return (5 * index * index + 3 * index + 13 * code + 29 * phase) % 113


def _contribution(op: str, rank: int, size: int, phase: int) -> Any:
    index = numpy.arange(PERIOD)
    mixed = (5 * index * index + 3 * index + phase) % 7
    if op == "sum":
        return mixed % 3 + rank % 2
    if op == "avg":
        return size * (mixed % 2) + rank
    if op == "product":
        return numpy.where(((mixed + rank) % 3 == 0) & (rank < 6), 2, 1)
    return (mixed * (rank + 3) + 11 * rank) % 113


def _chunks(period: Any, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a tensor, each with the values that belong there."""
    import torch

    values = torch.from_numpy(period).to(tensor.dtype).to(tensor.device)
    long = values.repeat(REPETITIONS if tensor.numel() > PERIOD else 1)
    for piece in torch.split(tensor, long.numel()):
        yield piece, long[: piece.numel()]
