"""Large broadcasts and reductions in two halves: scatter the tensor, then put it together.

Van de Geijn's broadcast (Barnett and others, "Interprocessor collective communication library",
1994): a binomial scatter, then a ring all_gather. Rabenseifner's reduction is the reverse: a ring
reduce_scatter, then a binomial gather. The busiest rank sends up to twice the tensor, however many
ranks there are.

| collective | algorithm             | steps              | the busiest rank sends |
|------------|-----------------------|--------------------|------------------------|
| broadcast  | scatter_all_gather    | ceil(lg n) + n - 1 | 2(n - 1)/n, the root   |
| reduce     | reduce_scatter_gather | n - 1 + ceil(lg n) | at most 3/2            |
"""

from unisono.plan.algorithms import binomial, ring
from unisono.plan.algorithms.reverse import backwards
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule


@algorithm("broadcast", "scatter_all_gather")
def broadcast(ranks: int, root: int = 0) -> Schedule:
    phases = binomial.scatter(ranks, root).phases + ring.all_gather(ranks).phases
    return Schedule("broadcast", "scatter_all_gather", ranks, ranks, phases, root)


@algorithm("reduce", "reduce_scatter_gather")
def reduce(ranks: int, root: int = 0) -> Schedule:
    gather = backwards(binomial.scatter(ranks, root))
    phases = ring.reduce_scatter(ranks).phases + gather.phases
    return Schedule("reduce", "reduce_scatter_gather", ranks, ranks, phases, root)
