"""Draws what the ranks saw in at most 80 columns, readable without colours, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from unisono.demo.scenes import DEADLOCK, MISMATCH, OWNER, SCENES, Numbers, RankOutcome, Scene

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_black", "white")
MIXED = "bold black on bright_white"

# In the first, a middle and the last row of a picture.
ARROWS = {
    "from 0": ("─┬─→", " ├─→", " └─→"),
    "to 0": ("─┬─→", "─┤  ", "─┘  "),
    "all": ("─┐ ┌─→", "─┼─┼─→", "─┘ └─→"),
}
PLAIN = str.maketrans("─┬├└┤┘┐┌┼→│", "-++++++++>|")
"""The same for a terminal with only ASCII."""


def draw_all(outcomes: Sequence[RankOutcome]) -> Iterator[Text]:
    """The lines of all pictures, the faults' errors last."""
    yield _legend(len(outcomes))
    for number in range(len(SCENES)):
        yield Text()
        yield from draw(number, outcomes)
    yield Text()
    yield _heading("a deadlock", "ranks 0 and 1 both send before they receive: both_send.py")
    yield from _fault(DEADLOCK, outcomes[0].deadlock)
    yield Text()
    yield _heading("a mismatch", "the last rank passes one number too many: one_too_many.py")
    yield from _fault(MISMATCH, outcomes[0].mismatch)
    yield Text()


def draw(number: int, outcomes: Sequence[RankOutcome]) -> Iterator[Text]:
    """Picture `number`: a title, a sentence, and a row for each rank."""
    scene = SCENES[number]
    had = [outcome.rows[number][0] for outcome in outcomes]
    has = [outcome.rows[number][1] for outcome in outcomes]
    digits = max(len(f"{value:g}") for row in (*had, *has) for value in row)
    left = max(len(row) for row in had)
    yield _heading(scene.title, scene.sentence)
    for rank, (before, after) in enumerate(zip(had, has, strict=True)):
        line = Text(f"  rank {rank}  ")
        line.append(_cells(before, digits, scene, rank, is_before=True))
        line.append(" " * (2 + left * (digits + 1) - line.cell_len + 10))
        line.append(f" {_arrow(scene, rank, len(outcomes))} ")
        yield line.append(_cells(after, digits, scene, rank, is_before=False))


def _heading(title: str, sentence: str) -> Text:
    return Text.assemble((title, "bold"), f"  {sentence}")


def _legend(ranks: int) -> Text:
    line = Text("whose numbers:")
    for rank in range(ranks):
        line.append(" ").append(f" {OWNER * rank:>2} ", style=_colour(rank))
    return line.append("  sums ").append(" + ", style=MIXED)


def _cells(row: Numbers, digits: int, scene: Scene, rank: int, is_before: bool) -> Text:
    if not row:
        return Text()
    cells = Text("│")
    for value in row:
        owner = _owner(value, scene, rank, is_before)
        style = MIXED if owner is None else _colour(owner)
        cells.append(f" {value:>{digits}g}", style=style)
    return cells.append("│")


def _owner(value: float, scene: Scene, rank: int, is_before: bool) -> int | None:
    """The owner of a number; None for a sum. A moved number shows its owner; what a rank is about
    to add is its own, and so is what the others keep when one rank has the sum."""
    if scene.adds:
        return rank if is_before or (scene.flow == "to 0" and rank > 0) else None
    return None if scene.title.endswith("sums") else int(value) // OWNER


def _colour(rank: int) -> str:
    return f"black on {COLOURS[rank % len(COLOURS)]}"


def _arrow(scene: Scene, rank: int, ranks: int) -> str:
    if scene.flow == "ring":
        return f"─→ {(rank + 1) % ranks}   {(rank - 1) % ranks} ─→"
    first, middle, last = ARROWS[scene.flow]
    arrow = first if rank == 0 else last if rank == ranks - 1 else middle
    if not scene.adds:
        return arrow
    return arrow.replace("─→", "+→") if scene.flow == "to 0" else f"{arrow[:2]}+{arrow[3:]}"


def _fault(program: str, error: Exception | None) -> Iterator[Text]:
    for number, line in enumerate(program.splitlines(), 1):
        yield Text(f"  {number}  {line}", style="dim")
    first, *more = str(error).splitlines()
    yield Text.assemble("  ", (type(error).__name__, "bold red"), f": {first}")
    for line in more:
        yield Text(f"  {line}")
