"""Every rank sends straight to every other, all at once: one step, many messages.

The obvious algorithm. It is the best where a switch connects all ranks and overhead is small, as
inside a node. For gather and scatter, where the root takes part in all messages, it is called
linear.

| collective                 | algorithm | steps | the busiest rank sends      |
|----------------------------|-----------|-------|-----------------------------|
| reduce_scatter, all_gather | direct    | 1     | (n - 1) / n, n - 1 messages |
| scatter                    | linear    | 1     | (n - 1) / n, the root       |
| gather                     | linear    | 1     | 1 / n                       |

(In all_gather a rank sends its own chunk n - 1 times.)
"""

import numpy as np
from numpy.typing import NDArray

from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step


@algorithm("all_gather", "direct", most_ranks=1024)
def all_gather(ranks: int) -> Schedule:
    source, destination = _pairs(ranks)
    step = Step.of(source, destination, source, "copy")
    return Schedule.from_steps("all_gather", "direct", ranks, ranks, [step])


@algorithm("reduce_scatter", "direct", most_ranks=1024)
def reduce_scatter(ranks: int) -> Schedule:
    source, destination = _pairs(ranks)
    step = Step.of(source, destination, destination, "reduce")
    return Schedule.from_steps("reduce_scatter", "direct", ranks, ranks, [step])


@algorithm_both_ways("scatter", "linear")
def scatter(ranks: int, root: int = 0) -> Schedule:
    other = (root + np.arange(1, ranks)) % ranks
    step = Step.of(root, other, other, "copy")
    return Schedule.from_steps("scatter", "linear", ranks, ranks, [step], root)


def _pairs(ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every rank with every other, the next one first, so that not all begin with rank 0."""
    rank, distance = np.arange(ranks)[:, None], np.arange(1, ranks)
    source, destination = np.broadcast_arrays(rank, (rank + distance) % ranks)
    return source.ravel(), destination.ravel()
