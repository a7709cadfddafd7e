"""Trees as arrays of parents, and what travels along them as steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.plan.schedule import Step

Ranks = NDArray[np.int64]


def depths(tree: Ranks) -> Ranks:
    """How many steps each rank is away from the root."""
    depth, ancestor = np.zeros(len(tree), np.int64), np.arange(len(tree))
    while np.any(tree[ancestor] >= 0):
        depth += tree[ancestor] >= 0
        ancestor = np.where(tree[ancestor] >= 0, tree[ancestor], ancestor)
    return depth


def pipelined(moves: list[tuple[Ranks, Ranks, Ranks, int, bool]], pieces: int) -> list[Step]:
    """Steps from moves (when, from, to, first chunk, reduces): piece p sets out p steps later."""
    if pieces < 1:
        raise ValueError(f"a tree cuts into at least one piece, not {pieces}")
    last = max((int(when.max()) for when, *_ in moves if len(when)), default=-1)
    steps = []
    for step in range(last + pieces):
        columns: list[list[Ranks]] = [[], [], [], []]
        for when, source, destination, chunk, reduces in moves:
            piece = step - when
            now = (piece >= 0) & (piece < pieces)
            parts = (source[now], destination[now], chunk + piece[now], np.full(now.sum(), reduces))
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
        steps.append(Step.of(*(np.concatenate(column) for column in columns)))
    return steps
