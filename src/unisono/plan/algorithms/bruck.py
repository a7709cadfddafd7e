"""Bruck's algorithms: after ceil(lg n) steps every rank has everything, for any n.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997. all_gather: in step k every rank sends all that it has,
2^k chunks, to the rank 2^k before it. reduce_scatter is the same run backwards. all_to_all: a chunk
that has to travel d ranks travels 2^k of them in each step k whose bit is set in d: few steps, but
each chunk is sent lg n / 2 times.

| collective                 | steps      | a rank sends                    |
|----------------------------|------------|---------------------------------|
| all_gather, reduce_scatter | ceil(lg n) | (n - 1) / n                     |
| all_to_all                 | ceil(lg n) | (set bits of 1 to n - 1) / n    |

(The last is lg n / 2 for powers of two.)
"""

import numpy as np

from unisono.plan.algorithms.binomial import powers_of_two
from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step


@algorithm_both_ways("all_gather", "bruck")
def all_gather(ranks: int) -> Schedule:
    rank = np.arange(ranks)
    steps = [
        Step.wrapping(rank, (rank - far) % ranks, rank, "copy", min(far, ranks - far), chunks=ranks)
        for far in powers_of_two(ranks)
    ]
    return Schedule.from_steps("all_gather", "bruck", ranks, ranks, steps)


@algorithm("all_to_all", "bruck", most_ranks=512)
def all_to_all(ranks: int) -> Schedule:
    origin = np.arange(ranks)[:, None]
    steps = []
    for far in powers_of_two(ranks):
        distance = np.flatnonzero(np.arange(ranks) & far)
        position = (origin + distance % far) % ranks
        chunk = origin * ranks + (origin + distance) % ranks
        to = (position + far) % ranks
        steps.append(Step.of(position.ravel(), to.ravel(), chunk.ravel(), "copy"))
    return Schedule.from_steps("all_to_all", "bruck", ranks, ranks * ranks, steps)
