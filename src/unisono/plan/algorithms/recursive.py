"""Recursive doubling and halving: in every step the partner is twice, or half, as far away.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005; all_reduce by halving and doubling is Rabenseifner's. With p the largest power of two up to
n, the first n - p odd ranks, where n is not a power of two, are folded into their left neighbours
before, which costs a step, and get the result after, which costs another one.

| collective     | algorithm          | steps (+ 2 if n > p) | a rank sends, n = p |
|----------------|--------------------|----------------------|---------------------|
| all_reduce     | recursive_doubling | lg p                 | lg p                |
| all_reduce     | halving_doubling   | 2 lg p               | 2(p - 1) / p        |
| reduce_scatter | recursive_halving  | lg p                 | (p - 1) / p         |
| all_gather     | recursive_doubling | lg p                 | (p - 1) / p         |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.plan.algorithms.reverse import backwards
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Phase, Schedule, Step

Ranks = NDArray[np.int64]


@algorithm("all_reduce", "recursive_doubling")
def all_reduce_doubling(ranks: int) -> Schedule:
    """Every rank ends with the sum of all: partners exchange and add whole tensors."""
    leader, folded = _fold(ranks)
    position = np.arange(len(leader))
    steps = [
        Step.of(leader, leader[position ^ far], 0, "reduce") for far in _distances(len(leader))
    ]
    before = Step.of(folded, folded - 1, 0, "reduce")
    after = Step.of(folded - 1, folded, 0, "copy")
    return Schedule.from_steps(
        "all_reduce", "recursive_doubling", ranks, 1, [before, *steps, after]
    )


@algorithm("all_reduce", "halving_doubling")
def all_reduce_halving(ranks: int) -> Schedule:
    """Every rank ends with the sum of all: reduce_scatter by halving, all_gather by doubling."""
    leader, folded = _fold(ranks)
    chunks = len(leader)
    doubling = Schedule.from_steps(
        "all_gather", "", chunks, chunks, _doubling(np.arange(chunks), np.arange(chunks + 1))
    )
    halving = backwards(doubling, "")
    steps = [
        Step.of(
            leader[phase.step.source],
            leader[phase.step.destination],
            phase.step.chunk,
            phase.step.reduces,
            phase.step.count,
        )
        for phase in halving.phases + doubling.phases
    ]
    before = Step.of(folded, folded - 1, 0, "reduce", chunks)
    after = Step.of(folded - 1, folded, 0, "copy", chunks)
    return Schedule.from_steps(
        "all_reduce", "halving_doubling", ranks, chunks, [before, *steps, after]
    )


@algorithm("all_gather", "recursive_doubling")
def all_gather(ranks: int) -> Schedule:
    """Every rank ends with the chunks of all: partners exchange all that they have."""
    leader, folded = _fold(ranks)
    # A folded rank's chunk lies beside its leader's, so that neighbours stay in one piece.
    before = Step.of(folded, folded - 1, folded, "copy")
    below = Step.of(folded - 1, folded, 0, "copy", folded)
    above = Step.of(folded - 1, folded, folded + 1, "copy", ranks - 1 - folded)
    rest = [transfer for step in (below, above) for transfer in step if transfer.count]
    steps = [before, *_doubling(leader, np.append(leader, ranks)), Step.listing(rest)]
    return Schedule.from_steps("all_gather", "recursive_doubling", ranks, ranks, steps)


@algorithm("reduce_scatter", "recursive_halving")
def reduce_scatter(ranks: int) -> Schedule:
    """Rank r ends with chunk r, the sum of all: partners give away the other's half."""
    return backwards(all_gather(ranks), "recursive_halving")


def _fold(ranks: int) -> tuple[Ranks, Ranks]:
    """The ranks that stay, a power of two of them, and those whose left neighbour acts for them."""
    staying = 1 << (ranks.bit_length() - 1)
    extra = ranks - staying
    position = np.arange(staying)
    return np.where(position < extra, 2 * position, position + extra), 2 * np.arange(extra) + 1


def _distances(staying: int) -> list[int]:
    return [1 << bit for bit in range(staying.bit_length() - 1)]


def _doubling(leader: Ranks, start: Ranks) -> list[Step | Phase]:
    """Leader p, who begins with the chunks from start[p] to start[p + 1], gives away all it has."""
    position = np.arange(len(leader))
    steps: list[Step | Phase] = []
    for far in _distances(len(leader)):
        first = position - position % far
        count = start[first + far] - start[first]
        steps.append(Step.of(leader, leader[position ^ far], start[first], "copy", count))
    return steps
