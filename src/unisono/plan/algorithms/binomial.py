"""Binomial trees: every rank that has the data sends it on, so every step doubles their number.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005; the tree is older than MPI. Ranks are counted from the root. reduce and gather are broadcast
and scatter run backwards; all_reduce is a reduction to rank 0 and a broadcast from it.

| collective          | steps        | the busiest rank sends            | all ranks send    |
|---------------------|--------------|-----------------------------------|-------------------|
| broadcast           | ceil(lg n)   | ceil(lg n), the root              | n - 1             |
| reduce              | ceil(lg n)   | 1                                 | n - 1             |
| scatter             | ceil(lg n)   | (n - 1) / n, the root             | lg n / 2, n = 2^k |
| gather              | ceil(lg n)   | at most 1/2                       | lg n / 2, n = 2^k |
| all_reduce          | 2 ceil(lg n) | ceil(lg n), rank 0                | 2(n - 1)          |
"""

import numpy as np

from unisono.plan.algorithms.reverse import algorithm_both_ways, backwards
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step


@algorithm_both_ways("broadcast", "binomial")
def broadcast(ranks: int, root: int = 0) -> Schedule:
    """Every rank ends up with the root's tensor. Near ranks come last, which stay inside a node."""
    steps = []
    for distance in reversed(powers_of_two(ranks)):
        sender = np.arange(0, ranks - distance, 2 * distance)
        source, destination = (sender + root) % ranks, (sender + distance + root) % ranks
        steps.append(Step.of(source, destination, 0, "copy"))
    return Schedule.from_steps("broadcast", "binomial", ranks, 1, steps, root)


@algorithm_both_ways("scatter", "binomial")
def scatter(ranks: int, root: int = 0) -> Schedule:
    """Rank r ends up with chunk r of the root: each sender sends the far half of what it has."""
    steps = []
    for distance in reversed(powers_of_two(ranks)):
        sender = np.arange(0, ranks - distance, 2 * distance)
        receiver = sender + distance
        count = np.minimum(distance, ranks - receiver)
        source, chunk = (sender + root) % ranks, (receiver + root) % ranks
        steps.append(Step.wrapping(source, chunk, chunk, "copy", count, chunks=ranks))
    return Schedule.from_steps("scatter", "binomial", ranks, ranks, steps, root)


@algorithm("all_reduce", "binomial")
def all_reduce(ranks: int) -> Schedule:
    down = broadcast(ranks)
    phases = backwards(down).phases + down.phases
    return Schedule("all_reduce", "binomial", ranks, 1, phases)


def powers_of_two(ranks: int) -> list[int]:
    """Those below `ranks`, the smallest first."""
    return [1 << bit for bit in range((ranks - 1).bit_length())]
