"""From what the ranks saw to pictures of at most 80 columns, readable without colours too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from unisono.demo.faults import BOTH_SEND, ONE_TOO_MANY, Moment
from unisono.demo.scenes import OWNER, SCENES, Numbers, RankOutcome, Scene

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_black", "white")
MIXED = "bold black on bright_white"
BARRIER_COLUMNS = 40
WIDTH = 80

# In the first, a middle and the last row of a picture.
ARROWS = {
    "from 0": ("─┬─→", " ├─→", " └─→"),
    "to 0": ("─┬─→", "─┤  ", "─┘  "),
    "all": ("─┐ ┌─→", "─┼─┼─→", "─┘ └─→"),
}
PLAIN = str.maketrans("─┬├└┤┘┐┌┼→│━", "-++++++++>|=")


def draw(number: int, outcomes: Sequence[RankOutcome]) -> list[Text]:
    """Picture `number`: a title, a sentence, and a row for each rank."""
    scene = SCENES[number]
    had = [outcome.rows[number][0] for outcome in outcomes]
    has = [outcome.rows[number][1] for outcome in outcomes]
    left, right = _width(had), _width(has)
    digits = max(len(f"{value:g}") for row in (*had, *has) for value in row)
    roomy = 20 + (left + right) * (digits + 2) <= WIDTH
    lines = [_heading(scene.title, scene.sentence)]
    for rank, (before, after) in enumerate(zip(had, has, strict=True)):
        line = Text(f"  rank {rank}  ")
        line.append(_cells(before, left, digits, roomy, _owners(scene, rank, before=True)))
        line.append(f" {_arrow(scene, rank, len(outcomes))} ")
        line.append(_cells(after, right, digits, roomy, _owners(scene, rank, before=False)))
        lines.append(line)
    return lines


def draw_barrier(outcomes: Sequence[RankOutcome]) -> list[Text]:
    """Who came when, who left when: a bar is a rank that waits."""
    moments = [outcome.barrier for outcome in outcomes]
    start = min(moment.came_s for moment in moments)
    column_s = (max(moment.left_s for moment in moments) - start) / BARRIER_COLUMNS
    lines = [_heading("barrier", "no rank goes on before the last has come")]
    for rank, moment in enumerate(moments):
        lines.append(_waiting(rank, moment, start, column_s))
    return lines


def draw_faults(outcomes: Sequence[RankOutcome]) -> list[Text]:
    """The errors that a deadlock and a mismatch raised."""
    return [
        _heading("a deadlock", "ranks 0 and 1 both send before they receive: both_send.py"),
        *_program(BOTH_SEND),
        *_error_lines(outcomes[0].deadlock),
        Text(),
        _heading("a mismatch", "the last rank passes one number too many: one_too_many.py"),
        *_program(ONE_TOO_MANY),
        *_error_lines(outcomes[0].mismatch),
    ]


def legend(ranks: int) -> Text:
    """What numbers and colours mean."""
    line = Text("whose numbers:")
    for rank in range(ranks):
        line.append(" ").append(f" {OWNER * rank:>2} ", style=_colour(rank))
    return line.append("  sums ").append(" + ", style=MIXED)


def plain(line: str) -> str:
    """The same line for a terminal that knows ASCII alone."""
    return line.translate(PLAIN)


def _heading(title: str, sentence: str) -> Text:
    return Text.assemble((title, "bold"), f"  {sentence}")


def _width(rows: Sequence[Numbers]) -> int:
    return max(len(row) for row in rows)


def _owners(scene: Scene, rank: int, before: bool) -> Callable[[float], int | None]:
    """Whose a number is. A number that was moved says so itself; what a rank is about to add is
    its own, and so is what the others keep when one rank has the sum."""
    if scene.adds:
        mine = before or (scene.flow == "to 0" and rank > 0)
        return lambda value: rank if mine else None
    if scene.title.startswith("all_gather of"):
        return lambda value: None
    return lambda value: int(value) // OWNER


def _cells(
    row: Numbers, count: int, digits: int, roomy: bool, owner_of: Callable[[float], int | None]
) -> Text:
    """A rank's numbers, as wide as `count` of them; without lines between where room is short."""
    cells = Text("│" if row else " ")
    for column, value in enumerate(row, 1):
        owner = owner_of(value)
        style = MIXED if owner is None else _colour(owner)
        cells.append(f" {value:>{digits}g}", style=style)
        cells.append("│" if roomy or column == len(row) else "")
    return cells.append(" " * (1 + count * (digits + 1 + roomy) + (not roomy) - cells.cell_len))


def _colour(rank: int) -> str:
    return f"black on {COLOURS[rank % len(COLOURS)]}"


def _arrow(scene: Scene, rank: int, ranks: int) -> str:
    if scene.flow == "ring":
        return f"─→ {(rank + 1) % ranks}   {(rank - 1) % ranks} ─→"
    first, middle, last = ARROWS[scene.flow]
    arrow = first if rank == 0 else last if rank == ranks - 1 else middle
    if not scene.adds:
        return arrow
    if scene.flow == "to 0":
        return arrow.replace("─→", "+→")
    return f"{arrow[:2]}+{arrow[3:]}"


def _waiting(rank: int, moment: Moment, start: float, column_s: float) -> Text:
    before = min(BARRIER_COLUMNS - 1, int((moment.came_s - start) / column_s))
    line = Text(f"  rank {rank}  came {(moment.came_s - start) * 1e3:5.1f} ms ")
    line.append(" " * before)
    line.append("━" * (BARRIER_COLUMNS - before), style=COLOURS[rank % len(COLOURS)])
    return line.append(f"│ left {(moment.left_s - start) * 1e3:5.1f}")


def _program(text: str) -> list[Text]:
    lines = text.splitlines()
    return [Text(f"  {number}  {line}", style="dim") for number, line in enumerate(lines, 1)]


def _error_lines(error: Exception | None) -> list[Text]:
    lines = str(error).splitlines()
    kind = type(error).__name__
    first = Text.assemble("  ", (kind, "bold red"), f": {lines[0]}")
    return [first, *(Text(f"  {line}") for line in lines[1:])]
