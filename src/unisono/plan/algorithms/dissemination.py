"""The dissemination barrier: in step k every rank signals the rank 2^k after it.

Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. After ceil(lg n)
steps each rank has heard from every other, directly or not. The messages are empty.

| steps      | a rank sends        |
|------------|---------------------|
| ceil(lg n) | ceil(lg n) messages |
"""

from __future__ import annotations

import numpy as np

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule, Step


@algorithm("barrier", "dissemination")
def barrier(ranks: int) -> Schedule:
    rank = np.arange(ranks)
    steps = [
        Step.of(rank, (rank + (1 << bit)) % ranks, 0, "reduce")
        for bit in range((ranks - 1).bit_length())
    ]
    return Schedule.from_steps("barrier", "dissemination", ranks, 1, steps)
