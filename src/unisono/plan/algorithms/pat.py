"""PAT, parallel aggregated trees: NCCL's logarithmic all_gather and reduce_scatter.

Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025; NCCL
has had it since 2.23, for one rank per node. As in Bruck's algorithm, each chunk travels along its
own binomial tree, all trees at once. Bruck's trees go to the nearest rank first and end with one
message of half the tensor; these go to the farthest first. So a rank forwards its few far chunks
early and needs little room for them. If a buffer has room for only `aggregate` chunks, the trees
end in smaller branches, taken one after another. With w the smallest power of two >= n:

| collective                 | aggregate                  | steps                 | a rank sends |
|----------------------------|----------------------------|-----------------------|--------------|
| all_gather, reduce_scatter | 0, or w / 2: as many as go | ceil(lg n)            | (n - 1) / n  |
| all_gather, reduce_scatter | a, from 2 to w / 2         | lg a + w / a - 1      | (n - 1) / n  |
| all_gather, reduce_scatter | 1                          | n - 1                 | (n - 1) / n  |

No message has more than `aggregate` chunks. reduce_scatter is all_gather run backwards.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from unisono.plan.algorithms.reverse import algorithm_both_ways
from unisono.plan.schedule import Schedule, Step


@algorithm_both_ways("all_gather", "pat", most_ranks=1024)
def all_gather(ranks: int, aggregate: int = 0) -> Schedule:
    if aggregate < 0 or aggregate & (aggregate - 1):
        raise ValueError(f"aggregate must be a power of two, or 0 for all chunks, not {aggregate}")
    width = 1 << (ranks - 1).bit_length()
    most = max(width // 2, 1)
    stride = width // min(aggregate or most, most)
    steps, far = [], width // 2
    while far >= stride:
        steps.append(_step(ranks, far, range(far, ranks, 2 * far)))
        far //= 2
    steps += [
        _step(ranks, branch & -branch, range(branch, ranks, stride))
        for branch in _walk(0, stride // 2)
    ]
    return Schedule.from_steps("all_gather", "pat", ranks, ranks, steps)


def _step(ranks: int, far: int, distances: Sequence[int]) -> Step:
    """The ranks at these distances before a chunk's owner get it from the rank `far` ahead."""
    owner, distance = np.arange(ranks)[:, None], np.asarray(distances, np.int64)
    to = (owner - distance) % ranks
    chunk = np.broadcast_to(owner, to.shape)
    return Step.of(((to + far) % ranks).ravel(), to.ravel(), chunk.ravel(), "copy")


def _walk(parent: int, far: int) -> Iterator[int]:
    """The distances below `parent` in a binomial tree: branch by branch, the farthest first."""
    while far:
        yield parent + far
        yield from _walk(parent + far, far // 2)
        far //= 2
