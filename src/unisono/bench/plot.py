"""Pictures of a run: time and bandwidth over size, a line per backend, floor and expectation."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.bench import text
from unisono.bench.collectives import COLLECTIVES, bandwidths
from unisono.bench.results import Row, Run
from unisono.errors import UnisonoError

INSTALL = "pip install 'unisono[plot]'"
SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#0b6e4f", "#c1440e", "#28539c", "#7b3294", "#b8860b", "#008b8b", "#a01a58")
_FLOOR = "#888888"
_WIDTH, _HEIGHT = 10.5, 3.6


def check_available() -> None:
    """Raise UnisonoError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnisonoError(f"plots need matplotlib: {INSTALL}")


def save(run: Run, path: Path) -> None:
    """All collectives of a run in one picture; the format follows from the name."""
    groups = _drawable(run)
    if not groups:
        raise UnisonoError("there is nothing to plot: no collective has two sizes")
    figure = _figure(groups)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def svg(run: Run) -> list[tuple[str, str]]:
    """(title, picture) for each collective, as text that can stand in an HTML page."""
    check_available()
    found = []
    for rows in _drawable(run):
        out = io.StringIO()
        _figure([rows]).savefig(out, format="svg", bbox_inches="tight")
        # From the element on, without the links to what metadata means.
        _, tag, picture = out.getvalue().partition("<svg")
        found.append(
            (text.title(rows), tag + re.sub(r"<metadata>.*?</metadata>", "", picture, flags=re.S))
        )
    return found


def _drawable(run: Run) -> list[list[Row]]:
    """Only what has more than one size makes a line."""
    return [
        rows for rows in text.tables(run, run.rows) if len({row.size_bytes for row in rows}) > 1
    ]


def _figure(groups: Sequence[Sequence[Row]]) -> Any:
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib.figure import Figure  # no pyplot: it would open a window's machinery

    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False)
    for rows, (left, right) in zip(groups, axes, strict=True):
        _draw(left, rows, lambda row, time_us: time_us)
        left.set(title=text.title(rows), ylabel="time of one call (us)")
        _draw(right, rows, _busbw)
        right.set(title="bus bandwidth", ylabel="GB/s (1e9)")
        left.legend(fontsize=8)
    return figure


def _draw(axis: Any, rows: Sequence[Row], value: Callable[[Row, float], float]) -> None:
    for index, backend in enumerate(dict.fromkeys(row.backend for row in rows)):
        mine = [row for row in rows if row.backend == backend]
        colour = _COLOURS[index % len(_COLOURS)]
        sizes = [row.size_bytes for row in mine]
        measured = [value(row, row.time_us.p50) for row in mine]
        axis.plot(sizes, measured, "o-", color=colour, label=backend, markersize=3.5, linewidth=1.4)
        low = [value(row, row.time_us.p25) for row in mine]
        high = [value(row, row.time_us.p75) for row in mine]
        axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        _draw_expected(axis, mine, value, colour)
    floors = {row.size_bytes: (row, row.floor_us) for row in rows if row.floor_us}
    if floors:
        points = [value(row, time_us) for row, time_us in floors.values()]
        axis.plot(list(floors), points, ":", color=_FLOOR, label="floor (local)", linewidth=1.6)
    axis.set(xscale="log", yscale="log", xlabel="size")
    _label_sizes(axis, sorted({row.size_bytes for row in rows}))
    axis.grid(True, which="major", alpha=0.25)


def _draw_expected(
    axis: Any, rows: Sequence[Row], value: Callable[[Row, float], float], colour: str
) -> None:
    """The model's line: through the rows it was fitted to, and where it expected the others."""
    if not any(row.expected_us for row in rows):
        return
    sizes = [row.size_bytes for row in rows]
    expected = [value(row, row.expected_us or row.time_us.p50) for row in rows]
    label = f"{rows[0].backend}, expected"
    axis.plot(sizes, expected, "--", color=colour, label=label, linewidth=1, alpha=0.8)


def _label_sizes(axis: Any, sizes: Sequence[int]) -> None:
    step = max(1, -(-len(sizes) // 8))
    chosen = sizes[::step]
    axis.set_xticks(chosen, [text.size_text(size) for size in chosen], fontsize=7)
    axis.minorticks_off()


def _busbw(row: Row, time_us: float) -> float:
    collective = COLLECTIVES[row.collective]
    algbw, busbw = bandwidths(collective, row.size_bytes, time_us / 1e6, row.ranks)
    return busbw or algbw  # one rank alone has no bus
