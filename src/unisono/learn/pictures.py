"""Pictures of the course: what every rank has before and after a collective, and the moves between.

Rank r's part p is the number 10 r + p, so that it can be followed. Numbers are those of `cases`,
moves those of a schedule, and a test compares both with what ranks do.
"""

from collections.abc import Iterator
from typing import NamedTuple

from unisono.cases.results import Array, Example, origins
from unisono.plan import Schedule, Transfer, find
from unisono.show import shapes

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
"""The collectives, and the algorithm whose moves are drawn."""
_CELL, _ROW, _TOP, _STEP, _NAME, _GAP = 34, 58, 48, 92, 62, 26
_ARROW, _FLAT = 24, 0.7
"""Where there are no steps: the room between before and after, and how high a row is."""


class Side(NamedTuple):
    """The numbers that a rank has, and whether they are sums."""

    values: list[int]
    are_sums: bool = False


class Picture(NamedTuple):
    """What each rank has before and after a collective; no values where it has no buffer."""

    schedule: Schedule
    before: list[Side]
    after: list[Side]


def example_of(schedule: Schedule) -> Example:
    """The numbers that the ranks begin with."""
    count = RANKS if schedule.primitive.is_in_place else 1
    return Example(schedule.primitive, RANKS, count, lambda rank, index: 10 * rank + index)


def picture_of(collective: str) -> Picture:
    """The picture of a collective on four ranks."""
    schedule = find(collective, ALGORITHMS[collective]).schedule(RANKS, pieces=1)
    primitive, example = schedule.primitive, example_of(schedule)
    if primitive.is_empty:
        return Picture(schedule, [Side([])] * RANKS, [Side([])] * RANKS)
    before = [Side(_numbers(example.input(rank))) for rank in range(RANKS)]
    after = [
        Side(_numbers(example.result(rank)), any(len(part.ranks) > 1 for part in parts or ()))
        for rank in range(RANKS)
        for parts in [origins(primitive, rank, RANKS)]
    ]
    return Picture(schedule, before, after)


def _numbers(side: Array | None) -> list[int]:
    return [] if side is None else [int(value) for value in side]


def as_text(collective: str) -> str:
    """The picture for a terminal."""
    picture = picture_of(collective)
    cells = [["", "before", "after"]]
    for rank in range(RANKS):
        sides = (picture.before[rank], picture.after[rank])
        cells.append([f"rank {rank}", *(" ".join(map(str, s.values)) or "-" for s in sides)])
    widths = [max(len(row[at]) for row in cells) + 4 for at in range(3)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def as_svg(collective: str) -> str:
    """Before on the left, the steps in the middle, after on the right. A phone shows no steps."""
    picture = picture_of(collective)
    begin = _NAME + _columns(picture.before) * _CELL + _GAP
    end = begin + _STEP * picture.schedule.rounds
    moves = list(_moves(picture.schedule, begin))
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
        _drawing(picture, "wide", end + _GAP, 1.0, [*moves, *rails]),
        _drawing(picture, "narrow", narrow_end + 12, _FLAT, arrows),
    )


def _drawing(picture: Picture, kind: str, after: float, scale: float, between: list[str]) -> str:
    parts = [
        shapes.text(_NAME, 18, "before", "head", "start"),
        shapes.text(after, 18, "after", "head", "start"),
        *between,
    ]
    for rank in range(RANKS):
        y = _TOP + _ROW * rank * scale
        parts.append(shapes.text(8, y + 5, f"rank {rank}", "name", "start"))
        parts += _cells(picture.before[rank], _NAME, y)
        parts += _cells(picture.after[rank], after, y)
    width = after + _columns(picture.after) * _CELL + 12
    label = f"{picture.schedule.collective} of {RANKS} ranks by {picture.schedule.algorithm}"
    height = _TOP + _ROW * (RANKS - 1) * scale + 44
    return shapes.drawing(kind, max(width, 372 if kind == "narrow" else 0), height, label, parts)


def _columns(parts: list[Side]) -> int:
    return max(1, *(len(part.values) for part in parts))


def _cells(parts: Side, x: float, y: float) -> Iterator[str]:
    if not parts.values:
        yield shapes.text(x + 4, y + 5, "-", "soft", "start")
    for at, value in enumerate(parts.values):
        left = x + at * _CELL
        kind = "cell sum" if parts.are_sums else f"cell from{value // 10}"
        yield shapes.box(left, y - 14, _CELL - 4, 28, kind)
        yield shapes.text(left + _CELL / 2 - 2, y + 5, value, "value")


def _moves(schedule: Schedule, begin: float) -> Iterator[str]:
    for number, step in enumerate(schedule.steps):
        x = begin + _STEP * number
        yield shapes.text(x + _STEP / 2, 18, f"step {number + 1}", "soft")
        for transfer in step:
            yield from _move(schedule, x, transfer)


def _move(schedule: Schedule, x: float, transfer: Transfer) -> Iterator[str]:
    top, bottom = (_TOP + _ROW * rank for rank in (transfer.source, transfer.destination))
    x1, x2 = x + 12, x + _STEP - 14
    kind = "move add" if transfer.action == "reduce" else "move copy"
    verb = "adds to" if transfer.action == "reduce" else "replaces"
    what = "" if schedule.collective == "barrier" else f"part {transfer.chunk_name.lstrip('c')}, "
    title = f"{what}rank {transfer.source} to {transfer.destination}: {verb} what is there"
    yield shapes.arrow(x1, top, x2, bottom, kind, title)
