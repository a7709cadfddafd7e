"""What `unisono top` shows of jobs: which columns, in which width, and what is to be scrolled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from unisono.watch.top import Job, RankRow

KEYS = "s stacks   q quit"
SCROLL_KEYS = "arrows, PgUp, PgDn, Home, End scroll"
_MOST_FRAMES = 12
_SHORTEST = 10
_BORDER, _PADDING = 1, 3


@dataclass(frozen=True)
class Column:
    """A column. Where there is no room for all, the lowest `worth` goes first; words may be cut
    short, figures never are."""

    name: str
    worth: int
    text: Callable[[RankRow], str]
    is_figure: bool = False


ALWAYS = 100
_WORTH_MORE_THAN_WORDS = 50
"""What is worth so much goes only when words have been cut short."""
COLUMNS = (
    Column("group", 60, lambda row: _group(row)),
    Column("rank", ALWAYS, lambda row: str(row.rank), is_figure=True),
    Column("host", 55, lambda row: row.host),
    Column("pid", 50, lambda row: str(row.pid), is_figure=True),
    Column("in", ALWAYS, lambda row: _doing(row)),
    Column("for", ALWAYS, lambda row: f"{row.call_s:.1f} s" if row.call else "", is_figure=True),
    Column("at", ALWAYS, lambda row: row.site),
    Column("calls", 15, lambda row: f"{row.calls:,}", is_figure=True),
    Column("calls/s", 30, lambda row: f"{row.calls_a_second:,.0f}", is_figure=True),
    Column("bytes/s", 20, lambda row: _size(row.bytes_a_second), is_figure=True),
    Column("wait", 40, lambda row: f"{row.wait_share:.0%}", is_figure=True),
    Column("lag", 10, lambda row: f"{row.lag_s * 1e3:.1f} ms", is_figure=True),
)


def choose_columns(rows: Sequence[RankRow], width: int) -> list[tuple[Column, int]]:
    """The columns that fit, each with its width: those of least worth are dropped, then words are
    cut short, the longest first."""
    chosen = list(COLUMNS)
    if len({row.group for row in rows}) == 1:
        chosen = [column for column in chosen if column.name != "group"]
    if not any(row.host for row in rows):
        chosen = [column for column in chosen if column.name != "host"]
    widths = {column: _width(column, rows) for column in chosen}
    room = width - _BORDER

    def taken(longest_words: int = 1 << 30) -> int:
        wide = [
            widths[column] if column.is_figure else min(widths[column], longest_words)
            for column in chosen
        ]
        return sum(wide) + _PADDING * len(chosen)

    for column in sorted(chosen, key=lambda column: column.worth):
        words_that_must_fit = _SHORTEST if column.worth >= _WORTH_MORE_THAN_WORDS else 1 << 30
        if column.worth < ALWAYS and taken(words_that_must_fit) > room:
            chosen.remove(column)
    words = [column for column in chosen if not column.is_figure]
    while taken() > room and any(widths[column] > _SHORTEST for column in words):
        widths[max(words, key=lambda column: widths[column])] -= 1
    return [(column, widths[column]) for column in chosen]


def render(jobs: Sequence[Job], stacks: Mapping[int, tuple[str, ...]], width: int) -> Group:
    """The jobs, in so many columns of the terminal."""
    if not jobs:
        return Group(Text("no job of this user runs on this machine"))
    parts: list[RenderableType] = []
    for job in jobs:
        count = f"  ({len(job.pids)} processes)"
        title = Text(job.command)
        title.truncate(max(_SHORTEST, width - len(count)), overflow="ellipsis")
        parts.append(title + Text(count))
        if len({row.group for row in job.rows}) == 1:
            parts.append(Text(f"group {_group(job.rows[0])}", style="dim"))
        if job.verdict:
            parts.append(Text(job.verdict, style="bold red"))
        parts.append(_table(job, width))
        for row in job.rows:
            if row.pid in stacks:
                parts.append(Text(f"rank {row.global_rank} (pid {row.pid})", style="bold"))
                parts += [Text(f"  {line}") for line in stacks[row.pid][:_MOST_FRAMES]]
    return Group(*parts)


def _table(job: Job, width: int) -> Table:
    # A culprit has a mark before its rank, for eyes and terminals that see no red.
    has_culprit = any(row.is_culprit for row in job.rows)
    columns = choose_columns(job.rows, width - (_PADDING + 1 if has_culprit else 0))
    table = Table()
    if has_culprit:
        table.add_column("", no_wrap=True, width=1)
    for column, wide in columns:
        table.add_column(
            column.name,
            justify="right" if column.is_figure and column.name not in ("rank", "pid") else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=wide,
        )
    for row in job.rows:
        mark = ["!" if row.is_culprit else ""] if has_culprit else []
        style = "bold red" if row.is_culprit else "red" if row.is_stuck else None
        table.add_row(*mark, *(column.text(row) for column, _ in columns), style=style)
    return table


class Window:
    """A part of what is rendered, as high as the terminal; keys move it."""

    def __init__(self) -> None:
        self._first = 0
        self._height = 1

    def move(self, key: str) -> None:
        """Go where a key leads; one that leads nowhere changes nothing."""
        page = max(1, self._height - 1)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page}
        if key in ("home", "end"):
            self._first = 0 if key == "home" else 1 << 30
        self._first = max(0, self._first + steps.get(key, 0))

    def show(self, content: RenderableType, console: Console) -> RenderableType:
        """The lines of `content` that are in the window, and below them the keys."""
        lines = console.render_lines(content, pad=False)
        self._height = max(1, console.height - 1)
        self._first = min(self._first, max(0, len(lines) - self._height))
        shown = lines[self._first : self._first + self._height]
        keys = KEYS
        if len(lines) > self._height:
            last = self._first + len(shown)
            keys += f"   {SCROLL_KEYS}   lines {self._first + 1}-{last} of {len(lines)}"
        footer = Text(keys, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(_Lines(shown), footer)


class _Lines:
    """Lines that were rendered before."""

    def __init__(self, lines: Sequence[Sequence[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[Segment]:
        return [segment for line in self._lines for segment in (*line, Segment.line())]


def _width(column: Column, rows: Sequence[RankRow]) -> int:
    return max(len(column.name), *(len(column.text(row)) for row in rows))


def _group(row: RankRow) -> str:
    return row.group if row.backend == "unisono" else f"{row.group} ({row.backend})"


def _doing(row: RankRow) -> str:
    state = "" if row.state in ("is running", "is asleep") else row.state
    return row.call or state or "its program"


def _size(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.0f} {unit}B" if unit else f"{count:.0f} B"
        count /= 1000
    return f"{count:.1f} TB"
