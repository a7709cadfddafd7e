"""Curves of a run as SVG that stands in a page: time and bandwidth over size.

Both axes are logarithmic. A line per backend, always in its own colour; a band for the middle half
of the samples, dashes for what was expected, dots for the floor; and thin lines for an older run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence

from unisono.bench import text
from unisono.bench.collectives import COLLECTIVES, bandwidths
from unisono.bench.results import Row
from unisono.pages import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 330, 62, 14, 30, 40
_NAMED = ("unisono", "unisono-torch", "gloo", "nccl", "mpi")

Value = Callable[[Row, float], float]


def colour_of(backend: str) -> str:
    """The one colour of a backend, or of unisono by an algorithm, in every page."""
    if backend in _NAMED:
        return f"var(--{backend})"
    return f"oklch(var(--lightness) 0.14 {zlib.crc32(backend.encode()) % 360})"


def draw_charts(rows: Sequence[Row], old: Sequence[Row] = ()) -> str:
    """Time and bandwidth of one collective; nothing where there are not two sizes."""
    if len({row.size_bytes for row in rows if row.size_bytes}) < 2:
        return ""
    return (
        f'<div class="charts">{_chart("time of one call, us", rows, old, _time)}'
        f"{_chart('bus bandwidth, GB/s', rows, old, _bandwidth)}</div>"
    )


def _time(row: Row, time_us: float) -> float:
    return time_us


def _bandwidth(row: Row, time_us: float) -> float:
    collective = COLLECTIVES[row.collective]
    algbw, busbw = bandwidths(collective, row.size_bytes, time_us / 1e6, row.ranks)
    return busbw or algbw  # one rank alone has no bus


def _chart(title: str, rows: Sequence[Row], old: Sequence[Row], value: Value) -> str:
    axes = _Axes(rows, old, value)
    parts = [_text(_LEFT, 16, title, "title"), *axes.grid()]
    for row_set, kind in ((old, "old"), (rows, "new")):
        for backend in dict.fromkeys(row.backend for row in row_set):
            mine = [row for row in row_set if row.backend == backend]
            parts += _curve(mine, value, axes, kind, colour_of(backend))
    floors = {row.size_bytes: (row, row.floor_us) for row in rows if row.floor_us}
    if floors:
        points = [axes.point(size, value(row, us)) for size, (row, us) in floors.items()]
        parts.append(f'<path class="floor" d="{_path(points)}"/>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _curve(rows: Sequence[Row], value: Value, axes: _Axes, kind: str, colour: str) -> Iterator[str]:
    points = [axes.point(row.size_bytes, value(row, row.time_us.p50)) for row in rows]
    style = f'style="--colour:{colour}"'
    if kind == "old":
        yield f'<path class="old" {style} d="{_path(points)}"/>'
        return
    low = [axes.point(row.size_bytes, value(row, row.time_us.p25)) for row in rows]
    high = [axes.point(row.size_bytes, value(row, row.time_us.p75)) for row in rows]
    yield f'<path class="band" {style} d="{_path([*low, *reversed(high)])}Z"/>'
    if any(row.expected_us for row in rows):
        expected = [
            axes.point(row.size_bytes, value(row, row.expected_us or row.time_us.p50))
            for row in rows
        ]
        yield f'<path class="expected" {style} d="{_path(expected)}"/>'
    yield f'<path class="measured" {style} d="{_path(points)}"/>'
    for row, (x, y) in zip(rows, points, strict=True):
        told = (
            f"{row.backend}, {text.size_text(row.size_bytes)}: "
            f"{text.time_text(row.time_us.p50)} us, {text.bandwidth_text(row.busbw)} GB/s"
        )
        told += f", {row.verdict}" if row.verdict else ""
        yield (
            f'<circle class="point" {style} cx="{x:.1f}" cy="{y:.1f}" r="3.4">'
            f"<title>{escape(told)}</title></circle>"
        )


class _Axes:
    """From sizes and values to points of the picture."""

    def __init__(self, rows: Sequence[Row], old: Sequence[Row], value: Value) -> None:
        every = [*rows, *old]
        self.sizes = sorted({row.size_bytes for row in every})
        values = [value(row, us) for row in every for us in (row.time_us.p25, row.time_us.p75)]
        values += [value(row, row.floor_us) for row in rows if row.floor_us]
        values = [found for found in values if found > 0] or [1.0]
        self.low, self.high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.08
        self.first, self.last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])

    def point(self, size: int, value: float) -> tuple[float, float]:
        across = (math.log2(size) - self.first) / ((self.last - self.first) or 1.0)
        up = (math.log10(max(value, 1e-12)) - self.low) / ((self.high - self.low) or 1.0)
        up = min(1.0, max(0.0, up))
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    def grid(self) -> Iterator[str]:
        for decade in range(math.floor(self.low), math.ceil(self.high) + 1):
            if self.low <= decade <= self.high:
                _, y = self.point(self.sizes[0], 10.0**decade)
                yield _line(_LEFT, y, _WIDTH - _RIGHT, y)
                yield _text(_LEFT - 8, y + 4, f"{10.0**decade:g}", "tick", "end")
        for size in self.sizes[:: max(1, -(-len(self.sizes) // 7))]:
            x, _ = self.point(size, 1.0)
            yield _line(x, _TOP, x, _HEIGHT - _BOTTOM)
            yield _text(x, _HEIGHT - _BOTTOM + 18, text.size_text(size), "tick", "middle")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
