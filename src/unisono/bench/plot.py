"""Curves of a run, in a file or in its page, by matplotlib: time and bandwidth over size; bars in
the file where there is one size."""

import colorsys
import io
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.bench import text
from unisono.bench.collectives import COLLECTIVES, bandwidths
from unisono.bench.results import Row, Run, by_collective
from unisono.show import charts
from unisono.show.pages import Html, escape

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {
    "unisono": "#0a7a55",
    "unisono-torch": "#7a9a12",
    "gloo": "#c8501a",
    "nccl": "#7044c4",
    "mpi": "#2465b8",
}
_INK, _GRID, _FLOOR = "#222222", "#dddddd", "#888888"
_STYLE: Any = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": _GRID,
} | dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
)


def has_curves(rows: Sequence[Row]) -> bool:
    """Whether the rows of a collective have at least two sizes, to draw a line."""
    return len({row.size_bytes for row in rows if row.size_bytes}) > 1


def colour_of(backend: str) -> str:
    """The colour of a backend, or of unisono with an algorithm, in every plot."""
    if backend in _COLOURS:
        return _COLOURS[backend]
    parts = colorsys.hls_to_rgb(_hue(backend) / 360, 0.45, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def page_colour_of(backend: str) -> str:
    """The same in a page, as CSS, which has another for dark pages (bench.css)."""
    if backend in _COLOURS:
        return f"var(--{backend})"
    return f"oklch(var(--lightness) 0.14 {_hue(backend)})"


def _hue(name: str) -> int:
    return zlib.crc32(name.encode()) % 360


def save(run: Run, path: Path) -> None:
    """All collectives of a run in one picture; the file name determines the format."""
    groups = by_collective(run.rows)
    with charts.figure((10.5, 3.6 * len(groups)), _STYLE) as figure:
        for rows, axes in zip(groups, figure.subplots(len(groups), 2, squeeze=False), strict=True):
            how = _draw if has_curves(rows) else _draw_bars
            for axis, (label, value) in zip(axes, _QUANTITIES.items(), strict=True):
                how(axis, rows, label, value)
            axes[0].set_title(text.title(rows))
            if how is _draw:  # bars have names
                axes[0].legend(fontsize=8)
        charts.save(figure, path, dpi=130, bbox_inches="tight")


def draw(rows: Sequence[Row]) -> Html:
    """Time and bandwidth of one collective as SVG elements, in the colours of a page."""
    drawn = []
    for label, value in _QUANTITIES.items():
        with charts.figure((5.0, 3.0), _STYLE) as figure:
            _draw(figure.subplots(), rows, label, value)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True)
        drawn.append(_as_element(out.getvalue(), f"{text.title(rows)}: {label}"))
    colours = {colour_of(row.backend): page_colour_of(row.backend) for row in rows}
    colours |= {_INK: "var(--soft)", _GRID: "var(--line)", _FLOOR: "var(--faint)"}
    pattern = re.compile("|".join(colours))
    return Html(pattern.sub(lambda match: colours[match[0]], "".join(drawn)))


_ONLY_IN_FILES = (
    "<defs> <style.*?</defs>",
    r' id="(?!m[0-9a-f]{10}")[^"]*"',
    " font-family: [^;]*;",
    r' transform="rotate\(-0 [^"]*"',
)
"""Styles for the whole document, unused names, fonts, and rotations by zero."""


def _as_element(svg: str, title: str) -> str:
    """matplotlib's output for embedding in a page: with a title, full width, and without what only
    a separate file needs."""
    _, _, drawn = svg.partition("</metadata>")
    drawn = re.sub(r"\s+", " ", drawn)
    drawn = re.sub("|".join(_ONLY_IN_FILES), "", drawn)
    # Coordinates need no more digits; the numbers at the axes are between tags.
    drawn = re.sub("<[^>]*>", lambda tag: re.sub(r"(\.\d)\d\d+", r"\1", tag[0]), drawn)
    (box,) = re.findall(r'viewBox="[^"]*"', svg)
    return f'<svg role="img" {box}><title>{escape(title)}</title>{drawn}'


def _bandwidth(row: Row, time_us: float) -> float:
    collective = COLLECTIVES[row.collective]
    algbw, busbw = bandwidths(collective, row.size_bytes, time_us / 1e6, row.ranks)
    return busbw or algbw  # one rank has no bus


_Value = Callable[[Row, float], float]
_QUANTITIES: dict[str, _Value] = {
    "time of one call, us": lambda row, time_us: time_us,
    "bus bandwidth, GB/s": _bandwidth,
}


def _draw(axis: Any, rows: Sequence[Row], label: str, value: _Value) -> None:
    """A quantity over size, both axes logarithmic."""

    def line(of: Sequence[Row], times_us: Sequence[float], how: str, **more: Any) -> None:
        values = [value(row, us) for row, us in zip(of, times_us, strict=True)]
        axis.plot([row.size_bytes for row in of], values, how, clip_on=False, **more)

    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        colour = colour_of(backend)
        medians = [row.time_us.p50 for row in mine]
        line(mine, medians, "o-", color=colour, markersize=3.5, linewidth=1.4, label=backend)
        low = [value(row, row.time_us.p25) for row in mine]
        high = [value(row, row.time_us.p75) for row in mine]
        sizes = [row.size_bytes for row in mine]
        axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0, clip_on=False)
        if any(row.expected_us for row in mine):  # through the rows that the model was fitted to
            expected = [row.expected_us or row.time_us.p50 for row in mine]
            line(mine, expected, "--", color=colour, linewidth=1, alpha=0.8)
    floors = {row.size_bytes: row for row in rows if row.floor_us}
    if floors:
        times_us = [row.floor_us or 0.0 for row in floors.values()]
        line([*floors.values()], times_us, ":", color=_FLOOR, linewidth=1.6)
    axis.set(xscale="log", yscale="log", ylabel=label)
    sizes = sorted({row.size_bytes for row in rows})
    chosen = sizes[:: max(1, -(-len(sizes) // 8))]
    axis.set_xticks(chosen, [text.size_text(size) for size in chosen], fontsize=8)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.tick_params(bottom=False, left=False)  # the grid shows where they are
    axis.grid(True, which="major", clip_on=False)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_bars(axis: Any, rows: Sequence[Row], label: str, value: _Value) -> None:
    """A quantity of each backend, at the only size."""
    if value is _bandwidth and not rows[0].size_bytes:  # a barrier
        axis.set_visible(False)
        return
    names = [row.backend for row in rows]
    values = [value(row, row.time_us.p50) for row in rows]
    drawn = axis.bar(names, values, color=[colour_of(name) for name in names])
    axis.bar_label(drawn, [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in values], fontsize=8)
    axis.set(ylabel=label, xlabel=text.size_text(rows[0].size_bytes) if rows[0].size_bytes else "")
    axis.tick_params(bottom=False, left=False)
    axis.spines[["top", "right"]].set_visible(False)
