"""What each rank has after a collective: what self-test, benchmark and demo check results by.

Inputs and outputs consist of parts: one for each rank where the collective tells ranks apart, else
a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy

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
CUT_INPUTS = ("reduce_scatter", "scatter", "all_to_all")
"""Collectives to which a rank, or the root, brings a part for each rank."""


@dataclass(frozen=True)
class Origin:
    """Where a part of a result comes from: part `part` of each of `ranks`, combined if several."""

    part: int
    ranks: Sequence[int]


def origins(collective: str, rank: int, size: int, root: int = 0) -> list[Origin] | None:
    """The parts of a rank's result, in order; None where it has none."""
    everyone = range(size)
    if collective in ("reduce", "gather") and rank != root:
        return None
    if collective in ("all_reduce", "reduce"):
        return [Origin(0, everyone)]
    if collective == "reduce_scatter":
        return [Origin(rank, everyone)]
    if collective == "broadcast":
        return [Origin(0, [root])]
    if collective == "scatter":
        return [Origin(rank, [root])]
    if collective in ("all_gather", "gather"):
        return [Origin(0, [source]) for source in everyone]
    if collective == "all_to_all":
        return [Origin(rank, [source]) for source in everyone]
    if collective == "ring":
        return [Origin(0, [(rank - 1) % size])]
    raise ValueError(f"it is not known what {collective!r} delivers")


def compute(origin: Origin, brought: Callable[[int, int], Array], op: str = "sum") -> Array:
    """A part of a result, where `brought(rank, part)` is what a rank put in."""
    values = [brought(rank, origin.part) for rank in origin.ranks]
    total: Array = reduce(REDUCTIONS[op], values)
    return total / len(values) if op == "avg" and len(values) > 1 else total
