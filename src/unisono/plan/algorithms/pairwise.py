"""All-to-all one partner at a time: in step k every rank sends to the rank k after it.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005. Every chunk is sent once and all links are used evenly, at the cost of n - 1 steps.

| steps | a rank sends |
|-------|--------------|
| n - 1 | (n - 1) / n  |
"""

import numpy as np

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step


@algorithm("all_to_all", "pairwise")
def all_to_all(ranks: int) -> Schedule:
    rank = np.arange(ranks)
    next_rank = (rank + 1) % ranks
    first = Step.of(rank, next_rank, rank * ranks + next_rank, "copy")
    phase = Phase(first, times=ranks - 1, shift=1, within=ranks, turn=1)
    return Schedule.from_steps("all_to_all", "pairwise", ranks, ranks * ranks, [phase])
