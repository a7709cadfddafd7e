"""Profiles as text, JSON and HTML, and what their records advise: at most three sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unisono.output_files import write_text
from unisono.show import pages, shapes
from unisono.show.table import Column, name_of, to_json
from unisono.watch.profiles import CallProfile, Piece, Profile, RankCalls, StepCall, StepProfile

_WIDTH, _LEFT, _ROW = 960.0, 60.0, 34.0
_SOURCES = {
    "marks": "steps are marked",
    "calls": "steps found from the period of the calls",
    "": "no steps found; watch.step() marks them",
}


def _ms(name: str, field: str = "") -> Column:
    field = field or name.replace(" ", "_") + "_s"
    return Column(f">{name}", lambda row: f"{getattr(row, field) * 1e3:.2f}")


def _share(row: StepProfile) -> str:
    return f"{row.exposed_s / row.wall_s:.0%}" if row.wall_s else ""


_LOST_TO = Column("<for", lambda row: f"rank {row.lost_to}" if row.lost_to >= 0 else "")
RANKS = (
    *(Column(">rank", lambda row: str(row.rank)), Column(">steps", lambda row: str(row.step))),
    *(_ms("wall"), _ms("compute", "computation_s"), _ms("no core"), _ms("hidden"), _ms("exposed")),
    *(Column(">%", _share), _ms("lost"), _LOST_TO),
)
CALLS = (
    *(
        Column(">bytes", lambda row: f"{row.bytes:,}"),
        Column(">count", lambda row: f"{row.count:.3g}"),
    ),
    *(_ms("duration"), _ms("hidden"), _ms("exposed"), _ms("lost"), _LOST_TO),
)


def _title(call: CallProfile) -> str:
    how = "blocking" if call.is_blocking else "overlapped"
    return f"{call.operation}, {how}, {call.line or 'no line'}, group {call.group}"


def to_text(profile: Profile) -> str:
    """Both tables, and the advice."""
    titles = [_title(call) for call in profile.calls]
    calls = sorted(profile.calls, key=lambda call: titles.index(_title(call)))
    head, *numbers = _table(CALLS, calls).splitlines()
    parts = [
        f"medians of each rank's steps in ms ({_SOURCES[profile.steps_from]})",
        _table(RANKS, profile.typical),
        "\nmeans of a step and rank in ms",
        head,
    ]
    for title, own in groupby(zip(calls, numbers, strict=True), lambda pair: _title(pair[0])):
        parts += title, *(line for _, line in own)
    parts += (f"\n{sentence}" for sentence in profile.advice)
    if profile.left_out:
        much = f"{profile.left_out:,} calls and notes of waits"
        parts.append(f"\nThe profile leaves out {much}, which newer ones have overwritten.")
    return "\n".join(parts)


def _table(columns: Iterable[Column], rows: Iterable[StepProfile | CallProfile]) -> str:
    cells = [[name_of(column.heading), *map(column.show, rows)] for column in columns]
    sides = [">" if column.heading.startswith(">") else "<" for column in columns]
    widths = [max(map(len, column)) for column in cells]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in zip(*cells, strict=True)
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write it to a file, by its suffix: .json, .html, otherwise text. Raises OSError."""
    views: dict[str, Callable[[Profile], str]] = {".json": to_json, ".html": to_html}
    write_text(path, views.get(path.suffix, to_text)(profile) + "\n")


def to_html(profile: Profile) -> str:
    """One page: advice, tables and the timeline of a typical step."""
    source = f"medians of steps in ms ({_SOURCES[profile.steps_from]})"
    body = [
        pages.element("h1", "Where the time of a step goes"),
        pages.panel("Advice", pages.element("ul", pages.elements("li", profile.advice))),
        pages.panel("A step of median length", pages.Html(_draw(profile.timeline))),
        pages.panel("Ranks", pages.element("p", source), _html(RANKS, profile.typical)),
        pages.panel(
            "Calls, in ms of a step", _html((Column("<call", _title), *CALLS), profile.calls)
        ),
    ]
    return pages.build_page("unisono: profile", body, ["profile.css"])


def _html(columns: Iterable[Column], rows: Iterable[StepProfile | CallProfile]) -> pages.Html:
    heads = [pages.element("th", name_of(column.heading)) for column in columns]
    shown = [
        pages.element("tr", pages.elements("td", (column.show(row) for column in columns)))
        for row in rows
    ]
    return pages.table(heads, shown)


def _draw(timeline: Iterable[Piece]) -> str:
    """A row for each rank: when it was blocked, above what was hidden."""
    pieces = list(timeline)
    ranks = sorted({piece.rank for piece in pieces})
    end_s = max((piece.end_s for piece in pieces), default=1.0)
    scale = (_WIDTH - _LEFT) / end_s
    parts = []
    for row, rank in enumerate(ranks):
        y = row * _ROW + 4
        parts.append(shapes.text(_LEFT - 8, y + 17, f"rank {rank}", anchor="end"))
        parts.append(shapes.box(_LEFT, y, _WIDTH - _LEFT, 24, "computation"))
        for piece in (piece for piece in pieces if piece.rank == rank):
            title = f"{piece.call}: {piece.what} for {(piece.end_s - piece.begin_s) * 1e3:.2f} ms"
            x, width = _LEFT + piece.begin_s * scale, (piece.end_s - piece.begin_s) * scale
            is_hidden = piece.what == "hidden"
            parts.append(
                shapes.box(x, y + 16 * is_hidden, width, 8 if is_hidden else 24, piece.what, title)
            )
    y = len(ranks) * _ROW
    for part in range(5):
        x, at_ms = _LEFT + part * (_WIDTH - _LEFT) / 4, part * end_s / 4 * 1e3
        parts.append(shapes.text(x, y + 14, f"{at_ms:.3g} ms", anchor="end" if part else "start"))
    return shapes.drawing("wide", _WIDTH, y + 22, "A step on all ranks", parts)


# -- advice ----------------------------------------------------------------------------------------

_WORTH = 0.05
"""Less of a step is not worth a sentence."""
_BUCKETS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 200)


def advise(
    ranks: Sequence[RankCalls], typical: Sequence[StepProfile], calls: Sequence[CallProfile]
) -> Iterator[str]:
    """Which rank to look at, which line to make asynchronous, which bucket size to try."""
    wall_s = max((step.wall_s for step in typical), default=0.0)
    lost: Counter[int] = Counter()
    for step in typical:
        lost[step.lost_to] += step.lost_s / len(typical)  # type: ignore[assignment]
    for slow, lost_s in lost.most_common(1):
        if slow >= 0 and lost_s > _WORTH * wall_s:
            worst = max(calls, key=lambda call: (call.lost_to == slow) * call.lost_s)
            yield (
                f"Look at rank {slow}: a rank waits for it for {_took(lost_s, wall_s)} on average, "
                f"most in {worst.operation} ({worst.line})."
            )
    blocking = [call for call in calls if call.is_blocking]
    for call in sorted(blocking, key=lambda call: call.lost_s - call.exposed_s)[:1]:
        moving_s = call.exposed_s - call.lost_s
        if moving_s > _WORTH * wall_s:
            yield (
                f"Make {call.operation} asynchronous at {call.line}: it blocks for "
                f"{_took(moving_s, wall_s)}; with async_op=True it can run during computation that "
                "does not need its result."
            )
    for rank in ranks[:1]:
        yield from _bucket_size(rank, wall_s)


def _bucket_size(rank: RankCalls, wall_s: float) -> Iterator[str]:
    """The size of buckets that a simulation of this rank's own calls finds better."""
    exposed: dict[int, list[float]] = {}
    for begin_s, end_s in pairwise(rank.ends):
        kinds: dict[tuple[str, str], list[StepCall]] = {}
        for call in rank.between(begin_s, end_s):
            if not call.is_blocking and call.record.reduction and call.begin_s >= begin_s:
                kinds.setdefault((call.group.name, call.key()[4]), []).append(call)
        buckets = max(
            kinds.values(), key=lambda calls: sum(c.record.bytes for c in calls), default=[]
        )
        for size, tail_s in _simulate(buckets):
            exposed.setdefault(size, []).append(tail_s)
    means = {size: float(np.mean(found)) for size, found in exposed.items()}
    saved_s = means.pop(0, 0.0) - min(means.values(), default=0.0)
    if saved_s > _WORTH * wall_s:
        size = min(means, key=lambda size: means[size])
        yield (
            f"Try buckets of {size} MiB (DDP's bucket_cap_mb, GradientSync's bucket_bytes): in a "
            f"simulation with this run's calls they hide {_took(saved_s, wall_s)} more."
        )


def _simulate(buckets: Sequence[StepCall]) -> Iterator[tuple[int, float]]:
    """Sizes in MiB, 0 for these buckets as they are, and how long after the last gradient the last
    call ends. Gradients become ready as in these calls; a call takes a constant time and one per
    byte, which calls of at least two sizes determine."""
    if len({call.record.bytes for call in buckets}) < 2:
        return
    sizes = np.array([call.record.bytes for call in buckets], np.float64)
    ready, ends, last = np.array([call[:3] for call in buckets], np.float64).T
    free = np.append(0.0, ends[:-1])
    took = ends - np.maximum(np.maximum(ready, last), free)
    per_byte_s, constant_s = np.polyfit(sizes, took, 1)
    total = np.cumsum(sizes)
    if min(per_byte_s, constant_s) < 0 or ready[-1] <= ready[0]:
        return
    begin_s = ready[0] - sizes[0] * (ready[-1] - ready[0]) / (total[-1] - total[0])
    for size in (0, *_BUCKETS_MIB):
        cuts: Any = (
            np.append(np.arange(size << 20, total[-1], size << 20), total[-1]) if size else total
        )
        end_s = 0.0
        at = np.interp(cuts, [0.0, *total], [begin_s, *ready])
        for at_s, size_bytes in zip(at, np.diff(cuts, prepend=0), strict=True):
            end_s = max(end_s, at_s) + constant_s + per_byte_s * size_bytes
        yield size, end_s - ready[-1]


def _took(seconds: float, wall_s: float) -> str:
    return f"{seconds * 1e3:.3g} ms of a step ({seconds / wall_s:.0%})"
