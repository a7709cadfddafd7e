"""A plain binary tree: rank 0 has ranks 1 and 2 below it, rank 1 has 3 and 4, rank 2 has 5 and 6.

The tree of a heap (Williams, "Algorithm 232: Heapsort", 1964): below rank r stand 2r + 1 and
2r + 2, counted from the root. A rank sends to both of its children in one step, where a binomial
tree's rank sends to one; so it has fewer levels than a binomial tree on as many ranks, and no rank
sends more than two tensors down, where the binomial root sends ceil(lg n). Half of all ranks are
leaves, which send nothing down: the double tree is there to use them. With d = floor(lg n) levels
below the root, and the tensor in `pieces` pieces that follow each other a step apart:

| collective        | steps          | the busiest rank sends          | all ranks send |
|-------------------|----------------|---------------------------------|----------------|
| broadcast         | d + pieces - 1 | 2                               | n - 1          |
| reduce            | d + pieces - 1 | 1                               | n - 1          |
| all_reduce        | 2d + pieces - 1| 3: two down, one up (root: two) | 2(n - 1)       |
"""

from __future__ import annotations

import numpy as np

from unisono.plan.algorithms.reverse import backwards
from unisono.plan.algorithms.trees import Ranks, depths, pipelined
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule

SOURCE = "folklore; the tree is Williams's heap, 1964"


@algorithm(
    "all_reduce", "binary_tree", steps="2 floor(lg n) + pieces - 1", sends="3", source=SOURCE
)
def all_reduce(ranks: int, pieces: int = 1) -> Schedule:
    """Every rank ends with the sum of all, which rank 0 had first."""
    child, parent, depth = _edges(ranks)
    height = int(depth.max(initial=0))
    moves = [
        (height - depth, child, parent, 0, True),
        (height + depth - 1, parent, child, 0, False),
    ]
    steps = pipelined(moves, pieces)
    return Schedule.from_steps("all_reduce", "binary_tree", ranks, pieces, steps)


@algorithm("broadcast", "binary_tree", steps="floor(lg n) + pieces - 1", sends="2", source=SOURCE)
def broadcast(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Every rank ends with the root's tensor."""
    child, parent, depth = _edges(ranks)
    moves = [(depth - 1, (parent + root) % ranks, (child + root) % ranks, 0, False)]
    steps = pipelined(moves, pieces)
    return Schedule.from_steps("broadcast", "binary_tree", ranks, pieces, steps, root)


@algorithm("reduce", "binary_tree", steps="floor(lg n) + pieces - 1", sends="1", source=SOURCE)
def reduce(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """The root ends with the sum of all."""
    return backwards(broadcast(ranks, root, pieces), "binary_tree")


def _edges(ranks: int) -> tuple[Ranks, Ranks, Ranks]:
    """Every rank but the root, its parent, and how deep it stands."""
    rank = np.arange(ranks)
    tree = np.where(rank > 0, (rank - 1) // 2, -1)
    return rank[1:], tree[1:], depths(tree)[1:]
