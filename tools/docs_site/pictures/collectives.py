"""What every rank has before and after a collective, and the moves between, from a real run.

Rank r's part p is the number 10 r + p, so that it can be followed. Each collective is run by the
schedule whose moves are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import unisono
from pictures import shapes
from unisono.cases.results import Example
from unisono.plan import Schedule, find

RANKS = 4
ALGORITHMS = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "binomial",
    "reduce": "binomial",
    "scatter": "binomial",
    "gather": "binomial",
    "all_to_all": "pairwise",
    "barrier": "dissemination",
}
_CELL, _ROW, _TOP, _STEP, _NAME, _GAP = 34, 58, 48, 92, 62, 26
_ARROW, _FLAT = 24, 0.7
"""Where there are no steps: the room between before and after, and how high a row is."""

Parts = list[int]


@dataclass(frozen=True)
class Run:
    """A collective as it went: what each rank had, by rank; nothing where it had no buffer."""

    schedule: Schedule
    before: list[Parts]
    after: list[Parts]


def run_all() -> dict[str, Run]:
    """Run every collective on real ranks."""
    schedules = {name: find(name, by).schedule(RANKS, pieces=1) for name, by in ALGORITHMS.items()}
    results = unisono.launch(_run_on_rank, ranks=RANKS, args=(schedules,), threads=1, timeout=120)
    return {
        name: Run(
            schedule, [rank[name][0] for rank in results], [rank[name][1] for rank in results]
        )
        for name, schedule in schedules.items()
    }


def _run_on_rank(schedules: dict[str, Schedule]) -> dict[str, tuple[Parts, Parts]]:
    comm = unisono.init()
    found: dict[str, tuple[Parts, Parts]] = {}
    for name, schedule in schedules.items():
        if name == "barrier":
            unisono.run_schedule(schedule, comm)
            found[name] = ([], [])
            continue
        primitive, is_root = schedule.primitive, comm.rank == schedule.root
        count = RANKS if primitive.is_in_place else 1
        example = Example(primitive, RANKS, count, lambda rank, index: 10 * rank + index)
        before, after = example.input(comm.rank), example.output(comm.rank)
        unisono.run_schedule(schedule, comm, after, None if primitive.is_in_place else before)
        if not is_root:
            before = None if primitive.is_from_root else before
            after = None if primitive.is_to_root else after
        found[name] = tuple([] if side is None else side.tolist() for side in (before, after))
    return found


def draw(run: Run) -> str:
    """Before on the left, the steps in the middle, after on the right. A phone shows no steps."""
    begin = _NAME + _columns(run.before) * _CELL + _GAP
    end = begin + _STEP * run.schedule.rounds
    moves = list(_moves(run.schedule, begin))
    rails = [
        shapes.line(begin - 8, _TOP + _ROW * rank, end + 8, _TOP + _ROW * rank, "rail")
        for rank in range(RANKS)
    ]
    narrow_end = begin - _GAP + _ARROW
    arrows = [
        shapes.text(narrow_end - _ARROW / 2 + 8, _TOP + _ROW * rank * _FLAT + 5, "\u2192", "soft")
        for rank in range(RANKS)
    ]
    return shapes.picture(
        _drawing(run, "wide", end + _GAP, 1.0, [*moves, *rails]),
        _drawing(run, "narrow", narrow_end + 12, _FLAT, arrows),
    )


def _drawing(run: Run, kind: str, after: float, scale: float, between: list[str]) -> str:
    parts = [
        shapes.text(_NAME, 18, "before", "head", "start"),
        shapes.text(after, 18, "after", "head", "start"),
        *between,
    ]
    has_sum = "reduce" in run.schedule.collective
    for rank in range(RANKS):
        y = _TOP + _ROW * rank * scale
        parts.append(shapes.text(8, y + 5, f"rank {rank}", "name", "start"))
        parts += _cells(run.before[rank], _NAME, y, is_sum=False)
        parts += _cells(run.after[rank], after, y, is_sum=has_sum)
    width = after + _columns(run.after) * _CELL + 12
    label = f"{run.schedule.collective} of {RANKS} ranks by {run.schedule.algorithm}"
    height = _TOP + _ROW * (RANKS - 1) * scale + 44
    return shapes.drawing(kind, max(width, 372 if kind == "narrow" else 0), height, label, parts)


def _columns(parts: list[Parts]) -> int:
    return max(1, *map(len, parts))


def _cells(values: Parts, x: float, y: float, *, is_sum: bool) -> Iterator[str]:
    if not values:
        yield shapes.text(x + 4, y + 5, "-", "soft", "start")
    for at, value in enumerate(values):
        left = x + at * _CELL
        kind = "cell sum" if is_sum else f"cell from{value // 10}"
        yield shapes.box(left, y - 14, _CELL - 4, 28, kind)
        yield shapes.text(left + _CELL / 2 - 2, y + 5, value, "value")


def _moves(schedule: Schedule, begin: float) -> Iterator[str]:
    for number, step in enumerate(schedule.steps):
        x = begin + _STEP * number
        yield shapes.text(x + _STEP / 2, 18, f"step {number + 1}", "soft")
        for transfer in step:
            yield from _move(schedule, x, transfer)


def _move(schedule: Schedule, x: float, transfer: unisono.plan.Transfer) -> Iterator[str]:
    top, bottom = (_TOP + _ROW * rank for rank in (transfer.source, transfer.destination))
    x1, x2 = x + 12, x + _STEP - 14
    kind = "move add" if transfer.action == "reduce" else "move copy"
    verb = "adds to" if transfer.action == "reduce" else "replaces"
    what = "" if schedule.collective == "barrier" else f"part {transfer.chunk_name.lstrip('c')}, "
    title = f"{what}rank {transfer.source} to {transfer.destination}: {verb} what is there"
    yield shapes.arrow(x1, top, x2, bottom, kind, title)
