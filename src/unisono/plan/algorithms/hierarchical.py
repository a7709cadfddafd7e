"""First inside the nodes, then between them, so that as little as possible crosses the network.

The three stages are those of Horovod's hierarchical all-reduce (2018) and of BlueConnect (Cho and
others, 2019). The g ranks of a node reduce-scatter directly; then the ranks with the same local
rank all-reduce their share over the m nodes by halving and doubling; then each node all-gathers. It
needs nodes of equal size. With p the largest power of two up to m:

| steps                     | a rank sends inside   | and between nodes, m = p |
|---------------------------|-----------------------|--------------------------|
| 2 (if g > 1) + 2 lg p (+2)| 2(g - 1) / g          | 2(m - 1) / (m g)         |
"""

import numpy as np

from unisono.plan.algorithms import recursive
from unisono.plan.catalog import algorithm, check_nodes
from unisono.plan.schedule import Action, Schedule, Step


@algorithm("all_reduce", "hierarchical")
def all_reduce(ranks: int, node_size: int = 1) -> Schedule:
    """Ranks 0 to node_size - 1 are the first node. Raises ValueError if they do not fill nodes."""
    check_nodes("hierarchical needs", ranks, node_size)
    between = recursive.all_reduce_halving(ranks // node_size)
    share = between.chunks
    local = np.arange(node_size)
    steps = [_inside(ranks, node_size, share, "reduce")]
    for phase in between.phases:
        step = phase.step
        source = step.source[:, None] * node_size + local
        destination = step.destination[:, None] * node_size + local
        chunk = step.chunk[:, None] + local * share
        repeated = (np.repeat(column, node_size) for column in (step.reduces, step.count))
        steps.append(Step.of(source.ravel(), destination.ravel(), chunk.ravel(), *repeated))
    steps.append(_inside(ranks, node_size, share, "copy"))
    return Schedule.from_steps("all_reduce", "hierarchical", ranks, node_size * share, steps)


def _inside(ranks: int, node_size: int, share: int, action: Action) -> Step:
    """Each rank sends every neighbour that one's share, to be added, or its own, to be kept."""
    first = np.arange(0, ranks, node_size)[:, None, None]
    me, distance = np.arange(node_size)[:, None], np.arange(1, node_size)
    source, other = np.broadcast_arrays(first + me, first + (me + distance) % node_size)
    owner = other if action == "reduce" else source
    chunk = owner % node_size * share
    return Step.of(source.ravel(), other.ravel(), chunk.ravel(), action, share)
