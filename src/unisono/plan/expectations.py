"""What each rank has after a collective. The self-test, benchmark and demo check results with it.

Inputs and outputs consist of parts: one per rank where the collective gives each rank its own,
otherwise a single one.
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
"""Collectives in which a rank, or the root, contributes a part for each rank."""


@dataclass(frozen=True)
class Origin:
    """The source of a part of a result: part `part` of each of `ranks`, reduced if several."""

    part: int
    ranks: Sequence[int]


def origins(collective: str, rank: int, size: int, root: int = 0) -> list[Origin] | None:
    """The origins of a rank's result, part by part; None if the rank gets no result."""
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
    raise ValueError(f"cannot compute the result of {collective!r}: unknown collective")


def compute(origin: Origin, contributed: Callable[[int, int], Array], op: str = "sum") -> Array:
    """A part of a result, where `contributed(rank, part)` is a rank's input."""
    values = [contributed(rank, origin.part) for rank in origin.ranks]
    total: Array = reduce(REDUCTIONS[op], values)
    return total / len(values) if op == "avg" and len(values) > 1 else total
