"""Inputs whose exact result is known, and how many elements of a result are not what they must be.

Values repeat after `PERIOD` elements, a prime number, so that no cut of a large tensor falls on a
repetition. They are small whole numbers: every sum, product or mean of them is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy

from unisono.bench.collectives import Collective, neighbour

if TYPE_CHECKING:
    import torch

PERIOD = 8191
REPETITIONS = 64
POISON = 119
"""What outputs are filled with before the call: no value that may be in a result."""

_COMBINE: dict[str, Any] = {
    "sum": numpy.add,
    "avg": numpy.add,
    "product": numpy.multiply,
    "min": numpy.minimum,
    "max": numpy.maximum,
    "band": numpy.bitwise_and,
    "bor": numpy.bitwise_or,
    "bxor": numpy.bitwise_xor,
}
OPS = tuple(_COMBINE)


@dataclass(frozen=True)
class Trial:
    """One checked call: on what, and which of several roots and sets of values it uses."""

    collective: Collective
    op: str
    rank: int
    size: int
    root: int
    phase: int

    # -- what goes in --------------------------------------------------------------------------

    def fill(self, input: torch.Tensor) -> None:
        """Write this rank's input."""
        for part, piece in _parts(self.collective, "input", input, self.size):
            _spread(self._sent(self.rank, part), piece)

    def _sent(self, rank: int, part: int) -> Any:
        """One period of what a rank has in a part of its input."""
        if self.collective.reduces:
            return _contribution(self.op, rank, self.size, self.phase + 3 * part)
        return _moved(rank * self.size + part, self.phase)

    # -- what comes out ------------------------------------------------------------------------

    @property
    def receives(self) -> bool:
        """Whether this rank has a result that is defined."""
        name = self.collective.name
        if name in ("reduce", "gather"):
            return self.rank == self.root
        if self.collective.pairwise:
            return self._source() is not None
        return self.collective.sized

    def wrong(self, output: torch.Tensor) -> int:
        """How many elements of this rank's output differ from the exact result."""
        if not self.receives:
            return 0
        return sum(
            _differing(self._expected(part), piece)
            for part, piece in _parts(self.collective, "output", output, self.size)
        )

    def _expected(self, part: int) -> Any:
        name, rank = self.collective.name, self.rank
        if self.collective.reduces:
            mine = rank if name == "reduce_scatter" else 0
            total = reduce(_COMBINE[self.op], (self._sent(one, mine) for one in range(self.size)))
            return total / self.size if self.op == "avg" else total
        if name == "broadcast":
            return self._sent(self.root, 0)
        if name in ("all_gather", "gather"):
            return self._sent(part, 0)
        if name == "scatter":
            return self._sent(self.root, rank)
        if name == "all_to_all":
            return self._sent(part, rank)
        source = self._source()
        assert source is not None
        return self._sent(source, 0)

    def _source(self) -> int | None:
        """Whose message this rank gets; in a stream they go one way."""
        other = neighbour(self.rank, self.size)
        if self.collective.name == "stream" and self.rank % 2 == 0:
            return None
        return other


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


def _parts(
    collective: Collective, side: str, tensor: torch.Tensor, size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    if side not in collective.wide:
        yield 0, tensor
    else:
        yield from enumerate(tensor.view(size, -1))


def _chunks(period: Any, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a tensor, each with the values that belong there."""
    import torch

    values = torch.from_numpy(period).to(tensor.dtype).to(tensor.device)
    long = values.repeat(REPETITIONS if tensor.numel() > PERIOD else 1)
    for piece in torch.split(tensor, long.numel()):
        yield piece, long[: piece.numel()]


def _spread(period: Any, tensor: torch.Tensor) -> None:
    for piece, values in _chunks(period, tensor):
        piece.copy_(values)


def _differing(period: Any, tensor: torch.Tensor) -> int:
    return sum(int((piece != values).sum()) for piece, values in _chunks(period, tensor))
