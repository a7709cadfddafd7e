"""Whether a schedule combines contributions in the order of ranks, as the engine's own way does.

Floating-point sums depend on their order. A schedule gives the bits of ((0 + 1) + 2) + ... only if
every sum that it makes is a beginning of that one, with the next rank's contribution behind it.
"""

from __future__ import annotations

from unisono.plan.schedule import Schedule

_Sum = tuple[int, int] | None
"""The contributions of ranks first to last, added from the left; None: in any other order."""


def keeps_rank_order(schedule: Schedule) -> bool:
    """Whether a `schedule` for all_reduce, run by the engine, gives the bits of its own way for
    numbers that are not rounded on the way.

    What comes from a lower rank is put before what a receiver has, what comes from a higher one
    behind it. The schedule must be one that `verify` accepts.
    """
    if schedule.collective != "all_reduce":
        raise ValueError(f"{schedule.title()}: only an all_reduce is combined by the engine")
    chunks = range(schedule.chunks)
    held: list[list[_Sum]] = [[(rank, rank) for _ in chunks] for rank in range(schedule.ranks)]
    for step in schedule.steps:
        arriving: dict[tuple[int, int], _Sum] = {}
        for source, destination, first, reduces, count in zip(*step.columns(), strict=True):
            for chunk in range(first, first + count):
                sent, target = held[source][chunk], (destination, chunk)
                if reduces:
                    own = arriving.get(target, held[destination][chunk])
                    both = (sent, own) if source < destination else (own, sent)
                    arriving[target] = _add(*both)
                else:
                    arriving[target] = sent
        for (rank, chunk), value in arriving.items():
            held[rank][chunk] = value
    return all(value == (0, schedule.ranks - 1) for values in held for value in values)


def _add(left: _Sum, right: _Sum) -> _Sum:
    if left is None or right is None or left[0] != 0:
        return None
    is_next = right == (left[1] + 1, left[1] + 1)
    return (0, right[1]) if is_next else None
