"""Recursive doubling and halving: every step doubles, or halves, the distance to the partner.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005; all_reduce by halving and doubling is Rabenseifner's. p is the largest power of two up to n.
If n > p, the first n - p odd ranks are first folded into their left neighbours, which costs a step,
and get the result at the end, which costs another.

| collective     | algorithm          | steps (+ 2 if n > p) | a rank sends, n = p |
|----------------|--------------------|----------------------|---------------------|
| all_reduce     | recursive_doubling | lg p                 | lg p                |
| all_reduce     | halving_doubling   | 2 lg p               | 2(p - 1) / p        |
| reduce_scatter | recursive_halving  | lg p                 | (p - 1) / p         |
| all_gather     | recursive_doubling | lg p                 | (p - 1) / p         |
"""

import numpy as np
from numpy.typing import NDArray

from unisono.plan.algorithms.binomial import powers_of_two
from unisono.plan.algorithms.reverse import algorithm_both_ways, backwards
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step

Ranks = NDArray[np.int64]


@algorithm("all_reduce", "recursive_doubling")
def all_reduce_doubling(ranks: int) -> Schedule:
    """Every rank ends up with the sum: partners exchange and add whole tensors."""
    leader, folded = _fold(ranks)
    place = np.arange(len(leader))
    steps = [
        Step.of(leader, leader[place ^ far], 0, "reduce") for far in powers_of_two(len(leader))
    ]
    before = Step.of(folded, folded - 1, 0, "reduce")
    after = Step.of(folded - 1, folded, 0, "copy")
    steps = [before, *steps, after]
    return Schedule.from_steps("all_reduce", "recursive_doubling", ranks, 1, steps)


@algorithm("all_reduce", "halving_doubling")
def all_reduce_halving(ranks: int) -> Schedule:
    """Every rank ends up with the sum: reduce_scatter by halving, all_gather by doubling."""
    leader, folded = _fold(ranks)
    chunks = len(leader)
    doubling = Schedule.from_steps(
        "all_gather", "", chunks, chunks, _doubling(np.arange(chunks), np.arange(chunks + 1))
    )
    halving = backwards(doubling)
    steps = [
        Step.of(leader[step.source], leader[step.destination], step.chunk, step.reduces, step.count)
        for step in (*halving.steps, *doubling.steps)
    ]
    before = Step.of(folded, folded - 1, 0, "reduce", chunks)
    after = Step.of(folded - 1, folded, 0, "copy", chunks)
    steps = [before, *steps, after]
    return Schedule.from_steps("all_reduce", "halving_doubling", ranks, chunks, steps)


@algorithm_both_ways("all_gather", "recursive_doubling", reversed_name="recursive_halving")
def all_gather(ranks: int) -> Schedule:
    """Every rank ends up with all chunks: partners exchange all that they have."""
    leader, folded = _fold(ranks)
    # A folded rank's chunk is next to its leader's, so their chunks stay contiguous.
    before = Step.of(folded, folded - 1, folded, "copy")
    below = Step.of(folded - 1, folded, 0, "copy", folded)
    above = Step.of(folded - 1, folded, folded + 1, "copy", ranks - 1 - folded)
    rest = [transfer for step in (below, above) for transfer in step if transfer.count]
    steps = [before, *_doubling(leader, np.append(leader, ranks)), Step.listing(rest)]
    return Schedule.from_steps("all_gather", "recursive_doubling", ranks, ranks, steps)


def _fold(ranks: int) -> tuple[Ranks, Ranks]:
    """The ranks that stay, a power of two, and those that their left neighbour acts for."""
    staying = 1 << (ranks.bit_length() - 1)
    extra = ranks - staying
    position = np.arange(staying)
    return np.where(position < extra, 2 * position, position + extra), 2 * np.arange(extra) + 1


def _doubling(leader: Ranks, start: Ranks) -> list[Step | Phase]:
    """Leader p begins with chunks start[p] to start[p + 1] and sends all that it has."""
    position = np.arange(len(leader))
    steps: list[Step | Phase] = []
    for far in powers_of_two(len(leader)):
        first = position - position % far
        count = start[first + far] - start[first]
        steps.append(Step.of(leader, leader[position ^ far], start[first], "copy", count))
    return steps
