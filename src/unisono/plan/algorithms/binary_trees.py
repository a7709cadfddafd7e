"""Binary trees: one, or two at once, where the inner ranks of one are the leaves of the other.

`binary_tree` is the tree of a heap (Williams, "Algorithm 232: Heapsort", 1964): the children of
rank r are 2r + 1 and 2r + 2, counted from the root. A rank sends to both of its children in one
step, where a rank of a binomial tree sends to one. So it has fewer levels than a binomial tree on
as many ranks. No rank sends more than two tensors down, where the binomial root sends ceil(lg n).
Half of all ranks are leaves, which send nothing down.

`double_tree` is by Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", 2009; the trees are those of NCCL 2.4 (Jeaugey, "Massively scale your deep
learning training with NCCL 2.4", 2019). Each tree carries one half of the tensor, so that nearly
every rank sends and receives at full bandwidth.

A tree's share is cut into `pieces` pieces that follow each other one step apart, so all levels are
busy. With d = floor(lg n) levels below the root of a heap:

| algorithm   | collective        | steps                     | a rank sends     | all ranks send |
|-------------|-------------------|---------------------------|------------------|----------------|
| binary_tree | broadcast         | d + pieces - 1            | at most 2        | n - 1          |
| binary_tree | reduce            | d + pieces - 1            | at most 1        | n - 1          |
| binary_tree | all_reduce        | 2d + pieces - 1           | 3 (the root two) | 2(n - 1)       |
| double_tree | all_reduce        | 2 ceil(lg n) + pieces - 1 | at most 2        | 2(n - 1)       |
| double_tree | broadcast, reduce | ceil(lg n) + pieces - 1   | at most 1        | n - 1          |
"""

import numpy as np
from numpy.typing import NDArray

from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step

Ranks = NDArray[np.int64]  # as a tree: each rank's parent, -1 for the root


@algorithm("all_reduce", "binary_tree")
def all_reduce(ranks: int, pieces: int = 1) -> Schedule:
    return all_reduce_along([heap(ranks)], "binary_tree", pieces)


@algorithm_both_ways("broadcast", "binary_tree")
def broadcast(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    return broadcast_along([heap(ranks)], "binary_tree", root, pieces)


@algorithm("all_reduce", "double_tree")
def all_reduce_double(ranks: int, pieces: int = 1) -> Schedule:
    """Every rank ends up with the sum: up to the roots of both trees, and down again."""
    return all_reduce_along(both_trees(ranks), "double_tree", pieces)


@algorithm_both_ways("broadcast", "double_tree")
def broadcast_double(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Every rank ends up with the root's tensor; both trees have the same root."""
    return broadcast_along(trees_below_root(ranks), "double_tree", root, pieces)


# -- the trees -----------------------------------------------------------------------------------


def heap(ranks: int) -> Ranks:
    rank = np.arange(ranks)
    return np.where(rank > 0, (rank - 1) // 2, -1)


def binary_tree(ranks: int) -> Ranks:
    """Rank 0 is the root and has one child; the others are in order, and odd ranks are leaves. The
    parent of r, whose lowest set bit is b, is the neighbour whose lowest set bit is 2b."""
    rank = np.arange(ranks)
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    parent = np.where(parent >= ranks, rank ^ bit, parent)
    parent[0] = -1
    return parent


def both_trees(ranks: int) -> list[Ranks]:
    """The tree, and the tree in which its inner ranks are leaves: mirrored, or shifted by one."""
    tree, rank = binary_tree(ranks), np.arange(ranks)
    label = ranks - 1 - rank if ranks % 2 == 0 else (rank - 1) % ranks
    return [tree, _relabelled(tree, label)]


def trees_below_root(ranks: int) -> list[Ranks]:
    """The same with rank 0 as the root of both: only the others are mirrored or shifted."""
    tree, rank = binary_tree(ranks), np.arange(ranks)
    label = (ranks - rank) % ranks if ranks % 2 else (rank - 2) % max(ranks - 1, 1) + 1
    label[0] = 0
    return [tree, _relabelled(tree, label)]


def _relabelled(tree: Ranks, label: Ranks) -> Ranks:
    """The same tree with rank r in the position of `label[r]`."""
    rank_at = np.argsort(label)
    parent = tree[label]
    return np.where(parent >= 0, rank_at[parent], -1)


def depths(tree: Ranks) -> Ranks:
    """The number of steps from each rank to the root."""
    depth, ancestor = np.zeros(len(tree), np.int64), np.arange(len(tree))
    while np.any(tree[ancestor] >= 0):
        depth += tree[ancestor] >= 0
        ancestor = np.where(tree[ancestor] >= 0, tree[ancestor], ancestor)
    return depth


# -- what travels along them ---------------------------------------------------------------------


def all_reduce_along(trees: list[Ranks], name: str, pieces: int) -> Schedule:
    height = max(int(depths(tree).max()) for tree in trees)
    moves = []
    for number, tree in enumerate(trees):
        child = np.flatnonzero(tree >= 0)
        parent, depth = tree[child], depths(tree)[child]
        moves.append((height - depth, child, parent, number * pieces, True))
        moves.append((height + depth - 1, parent, child, number * pieces, False))
    steps, chunks = _pipelined(moves, pieces), len(trees) * pieces
    return Schedule.from_steps("all_reduce", name, len(trees[0]), chunks, steps)


def broadcast_along(trees: list[Ranks], name: str, root: int, pieces: int) -> Schedule:
    ranks = len(trees[0])
    moves = []
    for number, tree in enumerate(trees):
        child = np.flatnonzero(tree >= 0)
        source, destination = (tree[child] + root) % ranks, (child + root) % ranks
        moves.append((depths(tree)[child] - 1, source, destination, number * pieces, False))
    steps, chunks = _pipelined(moves, pieces), len(trees) * pieces
    return Schedule.from_steps("broadcast", name, ranks, chunks, steps, root)


def _pipelined(moves: list[tuple[Ranks, Ranks, Ranks, int, bool]], pieces: int) -> list[Step]:
    """Steps from moves (when, from, to, first chunk, reduces): piece p starts p steps later."""
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, not {pieces}")
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
