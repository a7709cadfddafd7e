"""Rings: every rank talks to its two neighbours only.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
The tensor is cut into n chunks. In reduce_scatter partial sums travel around the ring and end,
complete, at their owners; in all_gather the owners' chunks travel around it once more.

| collective     | steps    | a rank sends    |
|----------------|----------|-----------------|
| reduce_scatter | n - 1    | (n - 1) / n     |
| all_gather     | n - 1    | (n - 1) / n     |
| all_reduce     | 2(n - 1) | 2(n - 1) / n    |
"""

from __future__ import annotations

import numpy as np

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step


@algorithm("reduce_scatter", "ring")
def reduce_scatter(ranks: int) -> Schedule:
    return Schedule.from_steps("reduce_scatter", "ring", ranks, ranks, [_summing(ranks)])


@algorithm("all_gather", "ring")
def all_gather(ranks: int) -> Schedule:
    return Schedule.from_steps("all_gather", "ring", ranks, ranks, [_passing_on(ranks)])


@algorithm("all_reduce", "ring")
def all_reduce(ranks: int) -> Schedule:
    return Schedule.from_steps(
        "all_reduce", "ring", ranks, ranks, [_summing(ranks), _passing_on(ranks)]
    )


def _summing(ranks: int) -> Phase:
    """Chunk c sets out from rank c + 1 and reaches its owner c after n - 1 steps."""
    rank = np.arange(ranks)
    first = Step.of(rank, (rank + 1) % ranks, (rank - 1) % ranks, "reduce")
    return Phase(first, times=ranks - 1, shift=-1, within=ranks)


def _passing_on(ranks: int) -> Phase:
    """Every rank sends its own chunk first, then what it got last."""
    rank = np.arange(ranks)
    first = Step.of(rank, (rank + 1) % ranks, rank, "copy")
    return Phase(first, times=ranks - 1, shift=-1, within=ranks)
