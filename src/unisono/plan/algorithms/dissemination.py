"""The dissemination barrier: in step k every rank signals the rank 2^k after it.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. After ceil(lg n)
steps each rank has heard from every other, directly or not. The messages are empty.

| steps      | a rank sends        |
|------------|---------------------|
| ceil(lg n) | ceil(lg n) messages |
"""

import numpy as np

from unisono.plan.algorithms.binomial import powers_of_two
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step


@algorithm("barrier", "dissemination")
def barrier(ranks: int) -> Schedule:
    rank = np.arange(ranks)
    steps = [Step.of(rank, (rank + far) % ranks, 0, "reduce") for far in powers_of_two(ranks)]
    return Schedule.from_steps("barrier", "dissemination", ranks, 1, steps)
