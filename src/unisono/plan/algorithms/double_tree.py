"""Two binary trees at once: the inner ranks of one are the leaves of the other.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009; the trees are those of NCCL 2.4 (Jeaugey, "Massively scale your deep learning training with
NCCL 2.4", 2019). Each tree carries one half of the tensor, in `pieces` pieces that follow each
other a step apart, so that all levels are busy. In a single tree the leaves, half of all ranks,
would send nothing down; with two of them nearly every rank sends and receives at full bandwidth.

| collective        | steps                     | a rank sends | all ranks send |
|-------------------|---------------------------|--------------|----------------|
| all_reduce        | 2 ceil(lg n) + pieces - 1 | at most 2    | 2(n - 1)       |
| broadcast, reduce | ceil(lg n) + pieces - 1   | at most 1    | n - 1          |
"""

from __future__ import annotations

import numpy as np

from unisono.plan.algorithms.reverse import backwards
from unisono.plan.algorithms.trees import Ranks, depths, pipelined
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule

SOURCE = "Sanders, Speck and Träff 2009; NCCL 2.4"


@algorithm("all_reduce", "double_tree", steps="2 ceil(lg n) + pieces - 1", sends="2", source=SOURCE)
def all_reduce(ranks: int, pieces: int = 1) -> Schedule:
    """Every rank ends with the sum of all: up to the roots of both trees, and down again."""
    trees = both_trees(ranks)
    height = max(int(depths(tree).max()) for tree in trees)
    moves = []
    for tree, chunk in zip(trees, (0, pieces), strict=True):
        child = np.flatnonzero(tree >= 0)
        parent, depth = tree[child], depths(tree)[child]
        moves.append((height - depth, child, parent, chunk, True))
        moves.append((height + depth - 1, parent, child, chunk, False))
    return Schedule.from_steps(
        "all_reduce", "double_tree", ranks, 2 * pieces, pipelined(moves, pieces)
    )


@algorithm("broadcast", "double_tree", steps="ceil(lg n) + pieces - 1", sends="1", source=SOURCE)
def broadcast(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Every rank ends with the root's tensor; both trees hang below the root."""
    moves = []
    for tree, chunk in zip(trees_below_root(ranks), (0, pieces), strict=True):
        child = np.flatnonzero(tree >= 0)
        parent, depth = tree[child], depths(tree)[child]
        moves.append((depth - 1, (parent + root) % ranks, (child + root) % ranks, chunk, False))
    return Schedule.from_steps(
        "broadcast", "double_tree", ranks, 2 * pieces, pipelined(moves, pieces), root
    )


@algorithm("reduce", "double_tree", steps="ceil(lg n) + pieces - 1", sends="1", source=SOURCE)
def reduce(ranks: int, root: int = 0, pieces: int = 1) -> Schedule:
    """The root ends with the sum of all."""
    return backwards(broadcast(ranks, root, pieces), "double_tree")


def binary_tree(ranks: int) -> Ranks:
    """Each rank's parent, -1 for the root.

    Rank 0 is the root and has one child; the others stand in order, odd ranks are leaves. The
    parent of r is found at its lowest set bit b: it is the neighbour with lowest bit 2b, on the
    side where there is one.
    """
    rank = np.arange(ranks)
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    parent = np.where(parent >= ranks, rank ^ bit, parent)
    parent[0] = -1
    return parent


def both_trees(ranks: int) -> tuple[Ranks, Ranks]:
    """The tree, and the tree in which its inner ranks are leaves: mirrored or shifted by one."""
    tree, rank = binary_tree(ranks), np.arange(ranks)
    label = ranks - 1 - rank if ranks % 2 == 0 else (rank - 1) % ranks
    return tree, _relabelled(tree, label)


def trees_below_root(ranks: int) -> tuple[Ranks, Ranks]:
    """The same with rank 0 as the root of both: only the others are mirrored or shifted."""
    tree, rank = binary_tree(ranks), np.arange(ranks)
    label = (ranks - rank) % ranks if ranks % 2 else (rank - 2) % max(ranks - 1, 1) + 1
    label[0] = 0
    return tree, _relabelled(tree, label)


def _relabelled(tree: Ranks, label: Ranks) -> Ranks:
    """The same tree where rank r takes the position of `label[r]`."""
    rank_at = np.argsort(label)
    parent = tree[label]
    return np.where(parent >= 0, rank_at[parent], -1)
