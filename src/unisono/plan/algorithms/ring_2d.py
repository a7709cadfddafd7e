"""A ring in two dimensions: along the rows, along the columns, and back along the rows.

Mikami and others, "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018 (they
call it 2D-torus). The n ranks form a grid of h rows and w columns; rank r is in row r // w. Each
row reduce-scatters, each column all-reduces its share, each row all-gathers. If the nodes are
known, a row is a node, or the largest part of one that divides n: rows then stay inside nodes, and
a rank sends only 2(h - 1) / n of the tensor to other nodes. Without nodes the grid is as square as
n allows, and the steps grow with the square root of n; for a prime n it is a ring. It always moves
as many bytes as a ring.

| steps                 | a rank sends |
|-----------------------|--------------|
| 2(w - 1) + 2(h - 1)   | 2(n - 1) / n |
"""

import math

import numpy as np

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step


@algorithm("all_reduce", "ring_2d")
def all_reduce(ranks: int, node_size: int = 0) -> Schedule:
    """Chunk c * h + r belongs to column c and row r. `node_size` is 0 if the nodes are unknown."""
    width = _width(ranks, node_size)
    height = ranks // width
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


def _width(ranks: int, node_size: int) -> int:
    """The number of ranks in a row: those of a node, or for as square a grid as possible."""
    if node_size < 0:
        raise ValueError(f"a node needs at least one rank, not {node_size}")
    inside = math.gcd(ranks, node_size)
    if 0 < node_size < ranks and inside > 1:
        return inside
    return next(ranks // side for side in range(math.isqrt(ranks), 0, -1) if ranks % side == 0)
