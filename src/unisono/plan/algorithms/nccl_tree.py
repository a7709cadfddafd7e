"""NCCL's tree: a chain in each node, and a double binary tree between the nodes.

Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019; src/graph/trees.cc and
connect.cc of NCCL 2.30. `double_tree` is one pair of trees over all ranks; here only the first rank
of each chain, the head, talks to other nodes. `channels` pairs of trees run at once, each with its
share of the tensor and its own heads: with a channel for each network card, all cards are busy.
With g ranks in each of m nodes:

| collective | steps                                   | all ranks send | a card sends, k channels |
|------------|-----------------------------------------|----------------|--------------------------|
| all_reduce | 2(g - 1 + ceil(lg m)) + pieces - 1      | 2(n - 1)       | at most 2 / k            |

The steps are for even m; an odd m may save two.
"""

import numpy as np

from unisono.plan.algorithms.binary_trees import Ranks, all_reduce_along, both_trees
from unisono.plan.algorithms.ring import check_size, far_first
from unisono.plan.catalog import algorithm, check_nodes
from unisono.plan.schedule import Schedule


@algorithm("all_reduce", "nccl_tree")
def all_reduce(ranks: int, node_size: int = 1, pieces: int = 1, channels: int = 1) -> Schedule:
    """Ranks 0 to node_size - 1 are the first node. Raises ValueError if they do not fill nodes."""
    check_nodes("nccl_tree needs", ranks, node_size)
    if channels < 1:
        raise ValueError(f"channels must be at least 1, not {channels}")
    if channels > 1:
        check_size("nccl_tree", ranks)
    between = both_trees(ranks // node_size)
    heads = [channel * node_size // channels for channel in range(channels)]
    trees = [_with_chains(tree, node_size, head) for head in heads for tree in between]
    steps = all_reduce_along(trees, "nccl_tree", pieces).steps
    listed = [far_first(step, node_size) for step in steps]
    chunks = len(trees) * pieces
    return Schedule.from_steps("all_reduce", "nccl_tree", ranks, chunks, listed)


def _with_chains(tree: Ranks, node_size: int, head: int) -> Ranks:
    """A tree over nodes as one over ranks: below the head of a node are its other ranks in
    order."""
    node, local = np.divmod(np.arange(len(tree) * node_size), node_size)
    above = np.where(tree[node] >= 0, tree[node] * node_size + head, -1)
    return np.where(local == head, above, node * node_size + (local - 1) % node_size)
