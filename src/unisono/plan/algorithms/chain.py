"""A pipelined chain: each rank forwards pieces to the next while it receives more.

Described as the "chain" or "pipeline" of Open MPI's collectives (Pješivac-Grbović and others,
"Performance analysis of MPI collective operations", 2007). With many pieces it moves a tensor at
full bandwidth, however many ranks there are; with one piece it is slow. reduce is the same run
backwards.

| steps            | a rank sends |
|------------------|--------------|
| n - 2 + pieces   | at most 1    |
"""

import numpy as np

from unisono.plan.algorithms.binary_trees import broadcast_along
from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.schedule import Schedule


@algorithm_both_ways("broadcast", "chain")
def broadcast(ranks: int, root: int = 0, pieces: int = 8) -> Schedule:
    return broadcast_along([np.arange(ranks) - 1], "chain", root, pieces)
