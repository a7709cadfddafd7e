"""The ranks of an incident on one time axis: their last calls, and who waits for whom.

The wait is drawn to scale. What went before it is often a thousand times shorter, so that part of
the axis is logarithmic: seconds before the wait began.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.pages import escape
from unisono.plan.sizes import format_seconds
from unisono.watch.report import CallReport, RankReport, Report

_ROW, _TOP, _BAR = 40, 44, 18
_MOST_ROWS = 24
_OPEN = ("waiting", "moving", "queued", "failed")


@dataclass(frozen=True)
class Columns:
    """How wide the parts of the picture are: names, calls before the wait, the wait, arrows."""

    names: int
    before: int
    wait: int
    arrows: int

    @property
    def begin(self) -> int:
        """Where the wait begins."""
        return self.names + self.before

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.begin + self.wait

    @property
    def width(self) -> int:
        """All of it."""
        return self.end + self.arrows


WIDE = Columns(118, 400, 520, 130)
NARROW = Columns(66, 0, 190, 80)
"""For a phone: the wait alone."""


def draw_timeline(report: Report, columns: Columns = WIDE) -> str:
    """The section with the picture, and one for narrow screens; empty where the report has no
    calls."""
    rows = _chosen(report)
    if not any(rank.calls for rank in rows):
        return ""
    left_out = len(report.ranks) - len(rows)
    more = f" {left_out} more ranks, which wait likewise, are left out." if left_out else ""
    return (
        '<section class="panel"><h2>The last calls, and who waits for whom</h2>'
        f'<div class="scroll">{_draw(report, rows, columns, "wide")}'
        f"{_draw(report, rows, NARROW, 'narrow')}</div>"
        '<p class="soft"><span class="timeline-axis">Before the wait the axis is logarithmic; '
        "the wait itself is to scale. </span>"
        f"An arrow leads from a rank that waits to the one that it waits for.{more}</p></section>"
    )


def _draw(report: Report, rows: Sequence[RankReport], columns: Columns, name: str) -> str:
    axis = _Axis.of([call for rank in rows for call in rank.calls], columns)
    height = _TOP + _ROW * len(rows) + 12
    parts = [
        *_grid(axis, height),
        *(part for row, rank in enumerate(rows) for part in _rank(report, rank, row, axis)),
        *_arrows(rows, columns, f"head-{name}"),
    ]
    return (
        f'<svg class="timeline {name}" viewBox="0 0 {columns.width} {height}" '
        f'width="{columns.width}" height="{height}" role="img" '
        f'aria-label="{escape(report.verdict)}">{"".join(parts)}</svg>'
    )


def _chosen(report: Report) -> list[RankReport]:
    """All ranks, or those to blame and some of the others, in their order."""
    if len(report.ranks) <= _MOST_ROWS:
        return list(report.ranks)
    blamed = [rank for rank in report.ranks if rank.rank in report.culprits][: _MOST_ROWS // 2]
    others = [rank for rank in report.ranks if rank.rank not in report.culprits]
    chosen = {id(rank) for rank in (*blamed, *others[: _MOST_ROWS - len(blamed)])}
    return [rank for rank in report.ranks if id(rank) in chosen]


@dataclass(frozen=True)
class _Axis:
    """`wait_s` is when the first call that is not over began; before it all is logarithmic.
    `end_s` is when the last of them failed, or now."""

    columns: Columns
    first_s: float
    wait_s: float
    end_s: float
    finest_s: float

    @classmethod
    def of(cls, calls: Sequence[CallReport], columns: Columns) -> _Axis:
        waiting = [call for call in calls if call.state in _OPEN]
        wait = min(call.arrived_s for call in waiting or [calls[-1]])
        end = max((call.ended_s or 0.0 for call in waiting), default=0.0)
        gaps = [wait - call.arrived_s for call in calls if call.arrived_s < wait]
        longest = max(gaps, default=1e-3)
        finest = max(min(gaps, default=1e-3) / 2, longest / 1e5)
        return cls(columns, wait - longest, wait, max(end, wait + finest), finest)

    def x(self, moment_s: float) -> float:
        if moment_s >= self.wait_s:
            share = (moment_s - self.wait_s) / (self.end_s - self.wait_s)
            return self.columns.begin + self.columns.wait * min(1.0, share)
        whole = math.log1p((self.wait_s - self.first_s) / self.finest_s)
        here = math.log1p((self.wait_s - moment_s) / self.finest_s)
        room = max(0, self.columns.before - 14)
        return self.columns.begin - room * min(1.0, here / whole)


def _grid(axis: _Axis, height: float) -> Iterator[str]:
    columns, tall = axis.columns, height - _TOP
    begin, wide = columns.begin, columns.wait
    yield f'<rect class="wait" x="{begin}" y="{_TOP - 8}" width="{wide}" height="{tall}"/>'
    yield _text(begin + 8, 14, "the wait", "head")
    length = axis.end_s - axis.wait_s
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if wide > 240 else (0.0, 0.5, 1.0):
        x = begin + wide * share
        yield _line(x, _TOP - 8, x, height - 16, "grid")
        anchor = "end" if share == 1 else "middle"
        yield _text(x, 31, f"{format_seconds(length * share)}" if share else "0", "tick", anchor)
    if not columns.before:
        return
    yield _text(columns.names + 14, 14, "before it", "head")
    decade = 10.0 ** math.ceil(math.log10(axis.finest_s))
    last = float(begin)
    while decade < axis.wait_s - axis.first_s:
        x = axis.x(axis.wait_s - decade)
        if x < begin - 34 and last - x > 48:
            last = x
            yield _line(x, _TOP - 8, x, height - 16, "grid")
            yield _text(x, 31, f"-{format_seconds(decade)}", "tick", "middle")
        decade *= 10


def _rank(report: Report, rank: RankReport, row: int, axis: _Axis) -> Iterator[str]:
    columns = axis.columns
    y = _TOP + _ROW * row + 4
    blamed = rank.rank in report.culprits
    kind = "blamed" if blamed else "name"
    has_room = len(rank.name()) < columns.names / 7
    name = rank.name() if has_room else f"rank {rank.rank}"
    yield _text(8, y + 13, name, kind)
    end = axis.x(0.0)
    over = axis.x(axis.first_s)
    for call in rank.calls:
        is_open = call.state in _OPEN
        if not is_open and not columns.before:
            continue
        start = axis.x(call.arrived_s)
        stop = end if is_open and call.state != "failed" else axis.x(call.ended_s or 0.0)
        over = max(over, stop)
        style = "open" if is_open else "done"
        width = max(stop - start, 3)
        where = f", {call.site}" if call.site else ""
        title = f"{call.name} of group {call.group}{where}: {call.state}"
        yield (
            f'<g><title>{escape(title)}</title><rect class="{style}" x="{start:.1f}" y="{y}" '
            f'width="{width:.1f}" height="{_BAR}" rx="4"/>'
        )
        label = call.name + (f" ({call.site})" if call.site and width > 240 else "")
        if width > 6.6 * len(label) + 12:
            yield _text(start + 8, y + 13, label, f"{style}-label")
        yield "</g>"
    if blamed and not any(call.state in _OPEN for call in rank.calls) and end - over > 40:
        what = rank.state or (f"in {rank.doing}" if rank.doing else "") or rank.place
        site = rank.place.partition(" in ")[0]
        label = f"{site}, {what}" if site and what and not rank.state else what or "not in a call"
        room = int((end - over - 20) / 6.6)
        yield f'<rect class="away" x="{over + 3:.1f}" y="{y}" width="{end - over - 3:.1f}" '
        yield f'height="{_BAR}" rx="4"/>'
        if room > 6:
            begin = max(over + 12, columns.begin + 8) if end - over > columns.wait else over + 12
            yield _text(begin, y + 13, label[:room], "away-label")


def _arrows(rows: Sequence[RankReport], columns: Columns, head: str) -> Iterator[str]:
    """In the margin on the right: from whoever waits to whom it waits for."""
    counts = Counter(rank.pid for rank in rows)  # hosts may have the same: no arrow is better
    row_of = {rank.pid: row for row, rank in enumerate(rows) if counts[rank.pid] == 1}
    x = columns.end + 6
    yield (
        f'<defs><marker id="{head}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path class="head-shape" '
        'd="M0 0 10 5 0 10z"/></marker></defs>'
    )
    found = {
        (row, row_of[pid])
        for row, rank in enumerate(rows)
        for call in rank.calls[-1:]
        for pid in call.waits_for
        if pid in row_of and row_of[pid] != row
    }
    longest = max((abs(one - other) for one, other in found), default=1)
    for source, target in sorted(found):
        begin = _TOP + _ROW * source + 4 + _BAR / 2
        end = _TOP + _ROW * target + 4 + _BAR / 2 + (5 if source > target else -5)
        bulge = 26 + (columns.arrows - 50) * abs(source - target) / longest
        yield (
            f'<path class="arrow" d="M{x} {begin:.1f} C{x + bulge:.0f} {begin:.1f} '
            f'{x + bulge:.0f} {end:.1f} {x + 2} {end:.1f}" marker-end="url(#{head})"/>'
        )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
