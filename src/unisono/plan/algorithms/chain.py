"""A pipelined chain: each rank forwards pieces to the next while it receives more.

Described as the "chain" or "pipeline" of Open MPI's collectives (Pješivac-Grbović and others,
"Performance analysis of MPI collective operations", 2007). With many pieces it moves a tensor at
full bandwidth, however many ranks there are; with one piece it is slow. reduce is the same run
backwards.

| steps            | a rank sends |
|------------------|--------------|
| n - 2 + pieces   | at most 1    |
"""

from __future__ import annotations

import numpy as np

from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.schedule import Schedule, Step


@algorithm_both_ways("broadcast", "chain")
def broadcast(ranks: int, root: int = 0, pieces: int = 8) -> Schedule:
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, not {pieces}")
    steps = []
    for number in range(ranks - 2 + pieces if ranks > 1 else 0):
        link = np.arange(max(0, number - pieces + 1), min(ranks - 1, number + 1))
        source, destination = (link + root) % ranks, (link + 1 + root) % ranks
        steps.append(Step.of(source, destination, number - link, "copy"))
    return Schedule.from_steps("broadcast", "chain", ranks, pieces, steps, root)
