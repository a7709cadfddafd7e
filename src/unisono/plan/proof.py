"""What each collective guarantees (docs/schedules.md has the table), and the proof that a schedule
keeps it. A sum has each rank's contribution exactly once; a barrier may count one twice, because it
adds nothing."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.errors import ScheduleError, name_ranks
from unisono.plan.schedule import Schedule, Step

# What a buffer holds: the ranks whose contributions are in it, and those whose are in it more than
# once, as bits of two integers. "More than once" is not counted further.
_Held = tuple[int, int]
_Numbers = dict[tuple[int, int], int]  # of steps, by rank and chunk


def verify(schedule: Schedule) -> None:
    """Prove that `schedule` does what its collective guarantees: simulate every transfer, with
    counts of contributions in place of numbers (docs/schedules.md). Raises ScheduleError, with
    rank, chunk and step, if it does not. See also `find`, `simulate`.

    >>> from unisono import plan
    >>> plan.verify(plan.find("all_reduce", "ring").schedule(8))
    >>> plan.verify(plan.Schedule.from_steps("broadcast", "nothing", 2, 1, []))
    Traceback (most recent call last):
        ...
    unisono.errors.ScheduleError: rank 1 never gets chunk 0 (no step writes it)
    """
    held: list[dict[int, _Held]] = [
        dict.fromkeys(holds_before(schedule, rank), (1 << rank, 0))
        for rank in range(schedule.ranks)
    ]
    written: _Numbers = {}
    doubled: _Numbers = {}
    for number, step in enumerate(schedule.steps):
        _apply(step, number, held, written, doubled)
    for rank, chunk, wanted in _after(schedule):
        _compare(schedule, rank, chunk, wanted, held[rank].get(chunk), written, doubled)


def owner(schedule: Schedule, chunk: int) -> int:
    """The rank that owns `chunk` in reduce_scatter, all_gather, scatter and gather; in all_to_all,
    the rank that has it first."""
    return chunk // (schedule.chunks // schedule.ranks)


def holds_before(schedule: Schedule, rank: int) -> range:
    """The chunks that `rank` has before the first step."""
    if schedule.primitive.reduces or schedule.primitive.is_empty:
        return range(schedule.chunks)
    if schedule.primitive.is_from_root:
        return range(schedule.chunks if rank == schedule.root else 0)
    return _share(schedule, rank)  # all_gather, gather; and all_to_all: its row of pairs


def holds_after(schedule: Schedule, rank: int) -> range | list[int]:
    """The chunks that `rank` must have after the last step."""
    if schedule.collective == "all_to_all":
        part = schedule.chunks // schedule.ranks**2
        return [
            (source * schedule.ranks + rank) * part + piece
            for source in range(schedule.ranks)
            for piece in range(part)
        ]
    if schedule.primitive.is_to_root:
        return range(schedule.chunks if rank == schedule.root else 0)
    if "input" in schedule.primitive.wide:
        return _share(schedule, rank)
    return range(schedule.chunks)


def _share(schedule: Schedule, rank: int) -> range:
    share = schedule.chunks // schedule.ranks
    return range(rank * share, (rank + 1) * share)


def _after(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """The chunks that ranks must have at the end: (rank, chunk, contributions in it)."""
    everyone = (1 << schedule.ranks) - 1
    for rank in range(schedule.ranks):
        for chunk in holds_after(schedule, rank):
            if schedule.primitive.reduces or schedule.primitive.is_empty:
                yield rank, chunk, everyone
            elif schedule.primitive.is_from_root:
                yield rank, chunk, 1 << schedule.root
            else:
                yield rank, chunk, 1 << owner(schedule, chunk)


def _apply(
    step: Step, number: int, held: list[dict[int, _Held]], written: _Numbers, doubled: _Numbers
) -> None:
    """Apply one step: first read everything, then write everything."""
    arriving: dict[tuple[int, int], tuple[_Held, bool]] = {}
    for source, destination, first, reduces, count in zip(*step.columns(), strict=True):
        mine, theirs = held[source], held[destination]
        for chunk in range(first, first + count):
            sent = mine.get(chunk)
            if sent is None:
                what = f"rank {source} sends chunk {chunk} to rank {destination} before it has it"
                raise _error(what, source, chunk, number)
            target = destination, chunk
            earlier = arriving.get(target)
            if earlier is not None and not (reduces and earlier[1]):
                what = f"rank {destination} gets chunk {chunk} twice, and one copy overwrites it"
                raise _error(what, destination, chunk, number)
            if reduces:
                had = theirs.get(chunk) if earlier is None else earlier[0]
                if had is None:
                    what = f"rank {destination} adds to chunk {chunk} before it has it"
                    raise _error(what, destination, chunk, number)
                twice = had[1] | sent[1] | (had[0] & sent[0])
                if twice and not (had[1] or sent[1]):
                    doubled[target] = number
                arriving[target] = (had[0] | sent[0], twice), True
            else:
                if (source, chunk) in doubled:
                    doubled[target] = doubled[source, chunk]
                arriving[target] = sent, False
    for (rank, chunk), (value, _) in arriving.items():
        held[rank][chunk] = value
        written[rank, chunk] = number


def _compare(
    schedule: Schedule,
    rank: int,
    chunk: int,
    wanted: int,
    got: _Held | None,
    written: _Numbers,
    doubled: _Numbers,
) -> None:
    step = written.get((rank, chunk), -1)
    if got is None:
        raise _error(f"rank {rank} never gets chunk {chunk}", rank, chunk, schedule.rounds - 1)
    where = f"chunk {chunk} of rank {rank}"
    missing, surplus = wanted & ~got[0], got[0] & ~wanted
    if schedule.collective != "barrier" and got[1]:
        what = f"{where} counts {_contributions(got[1])} more than once"
        raise _error(what, rank, chunk, doubled.get((rank, chunk), step))
    if missing:
        raise _error(f"{where} lacks {_contributions(missing)}", rank, chunk, step)
    if surplus:
        what = f"{where} wrongly contains {_contributions(surplus)}"
        raise _error(what, rank, chunk, step)


def _error(what: str, rank: int, chunk: int, step: int) -> ScheduleError:
    when = f"step {step}" if step >= 0 else "no step writes it"
    return ScheduleError(f"{what} ({when})", rank=rank, chunk=chunk, step=step)


def _contributions(bits: int) -> str:
    ranks = (rank for rank in range(bits.bit_length()) if bits >> rank & 1)
    return f"what {name_ranks(ranks)} contributed"
