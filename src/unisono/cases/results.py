"""What each rank passes to a collective and has afterwards. The self-test, benchmark and demo check
results with it.

Inputs and outputs consist of parts: one per rank on a wide side, otherwise a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy

from unisono.cases.primitives import Primitive

Array = numpy.ndarray[Any, Any]

REDUCTIONS: dict[str, Any] = {
    "sum": numpy.add,
    "avg": numpy.add,
    "product": numpy.multiply,
    "min": numpy.minimum,
    "max": numpy.maximum,
    "band": numpy.bitwise_and,
    "bor": numpy.bitwise_or,
    "bxor": numpy.bitwise_xor,
}


@dataclass(frozen=True)
class Origin:
    """The source of a part of a result: part `part` of each of `ranks`, reduced if several."""

    part: int
    ranks: Sequence[int]


def origins(primitive: Primitive, rank: int, size: int, root: int = 0) -> list[Origin] | None:
    """The origins of a rank's result, part by part; None if the rank gets no result."""
    if primitive.is_empty or (primitive.is_to_root and rank != root):
        return None
    part = rank if "input" in primitive.wide else 0
    if primitive.reduces:
        return [Origin(part, range(size))]
    sources = [root] if primitive.is_from_root else range(size)
    return [Origin(part, [source]) for source in sources]


def compute(origin: Origin, contributed: Callable[[int, int], Array], op: str = "sum") -> Array:
    """A part of a result, where `contributed(rank, part)` is a rank's input."""
    values = [contributed(rank, origin.part) for rank in origin.ranks]
    total: Array = reduce(REDUCTIONS[op], values)
    return total / len(values) if op == "avg" and len(values) > 1 else total


@dataclass(frozen=True)
class Example:
    """A collective on `size` ranks, where `value(rank, index)` are the numbers of a rank's input
    at these places, `count` in each part."""

    primitive: Primitive
    size: int
    count: int
    value: Callable[[int, Array], Array]
    root: int = 0
    op: str = "sum"

    def input(self, rank: int) -> Array | None:
        """What a rank passes, in place as the output; None if it passes nothing."""
        side = "output" if self.primitive.is_in_place else "input"
        if not self.primitive.has_side(side, rank == self.root):
            return None
        parts = self.size if "input" in self.primitive.wide else 1
        return self._part(rank, 0, parts)

    def output(self, rank: int) -> Array | None:
        """What a rank receives the result in: in place its input, otherwise room for it."""
        if self.primitive.is_in_place:
            return self.input(rank)
        if not self.primitive.has_side("output", rank == self.root):
            return None
        parts = self.size if "output" in self.primitive.wide else 1
        return numpy.full(parts * self.count, -1, self._part(rank, 0).dtype)

    def result(self, rank: int) -> Array | None:
        """What the output must be afterwards."""
        parts = origins(self.primitive, rank, self.size, self.root)
        if parts is None:  # what has no result stays as it was
            return self.output(rank)
        return numpy.concatenate([compute(part, self._part, self.op) for part in parts])

    def _part(self, rank: int, part: int, parts: int = 1) -> Array:
        return self.value(rank, numpy.arange(part * self.count, (part + parts) * self.count))

    def bind(self, comm: Any, output: Any, input: Any, **how: Any) -> Callable[[], Any]:
        """The Communicator's method, with these tensors."""
        is_root = comm.rank == self.root
        arguments = self.primitive.arguments(output, input, self.root, self.op, is_root)
        return partial(getattr(comm, self.primitive.name), *arguments, **how)
