"""A ring in two dimensions: along the rows, along the columns, and back along the rows.

Mikami and others, "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018 (they
call it 2D-torus). The n ranks form a grid of h rows and w columns, as square as n allows; rank r
stands in row r // w. Each row reduces and scatters, each column all-reduces its share, each row
gathers. The bytes are those of a ring, the steps its square root. For a prime n it is a ring.

| steps                 | a rank sends |
|-----------------------|--------------|
| 2(w - 1) + 2(h - 1)   | 2(n - 1) / n |
"""

from __future__ import annotations

import math

import numpy as np

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step


@algorithm(
    "all_reduce",
    "ring_2d",
    steps="2(w - 1) + 2(h - 1), n = w h",
    sends="2(n-1)/n",
    source="Mikami and others 2018",
)
def all_reduce(ranks: int) -> Schedule:
    """Every rank ends with the sum of all. Chunk c * h + r belongs to column c and row r."""
    height = next(side for side in range(math.isqrt(ranks), 0, -1) if ranks % side == 0)
    width = ranks // height
    rank = np.arange(ranks)
    row, column = rank // width, rank % width
    right = row * width + (column + 1) % width
    below = (row + 1) % height * width + column
    share = column * height

    def rows(column_of_chunk: np.ndarray, reduces: bool) -> Phase:
        step = Step.of(rank, right, column_of_chunk % width * height, [reduces] * ranks, height)
        return Phase(step, times=width - 1, shift=-height, within=ranks)

    def columns(row_of_chunk: np.ndarray, reduces: bool) -> Phase:
        step = Step.of(rank, below, share + row_of_chunk % height, [reduces] * ranks)
        return Phase(step, times=height - 1, shift=-1, within=height)

    phases = [
        rows(column - 1, True),
        columns(row - 1, True),
        columns(row, False),
        rows(column, False),
    ]
    return Schedule.from_steps("all_reduce", "ring_2d", ranks, ranks, phases)
