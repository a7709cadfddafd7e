"""What each level of a call adds to its time: the same all_reduce, entered at every level."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import unisono
from unisono.show import shapes

RANKS = 2
_CALLS, _ROUNDS = 200, 15
_ROW, _WIDTH, _LEFT, _TOP = 50, 560, 250, 34


@dataclass(frozen=True)
class Level:
    """Where a call was entered, what that level does, and the median time of a call from there."""

    line: str
    does: str
    time_us: float


def measure() -> list[Level]:
    """Enter an all_reduce of eight bytes at each level, on two ranks, by turns."""
    levels: list[Level] = unisono.launch(_measure_on_rank, ranks=RANKS, threads=1, timeout=300)[0]
    return levels


def _measure_on_rank() -> list[Level]:
    import torch
    import torch.distributed as dist

    comm: Any = unisono.init()
    x = torch.zeros(2)
    entries: dict[str, tuple[str, Callable[[], object]]] = {
        "dist.all_reduce(x)": ("torch.distributed and its dispatcher", lambda: dist.all_reduce(x)),
        "unisono.all_reduce(x)": ("structures, groups, results", lambda: unisono.all_reduce(x)),
        "comm.all_reduce(x)": ("the Communicator and the engine", lambda: comm.all_reduce(x)),
    }
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(_ROUNDS):
        for name, (_, call) in entries.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return [
        Level(name, does, statistics.median(times[name])) for name, (does, _) in entries.items()
    ]


def draw(levels: list[Level]) -> str:
    """A bar for each level; what the levels below it take is drawn inside. On a phone the words
    stand above the bar."""
    return shapes.picture(
        _drawing(levels, "wide", _LEFT, 0, _WIDTH, _ROW),
        _drawing(levels, "narrow", 8, 38, 280, _ROW + 38),
    )


def _drawing(
    levels: list[Level], kind: str, left: float, down: float, room: float, row_height: float
) -> str:
    longest = max(level.time_us for level in levels)
    parts = [shapes.text(left, 18, "median of a call of 8 bytes, two ranks", "soft", "start")]
    below = sorted(level.time_us for level in levels)
    for row, level in enumerate(sorted(levels, key=lambda level: -level.time_us)):
        y = _TOP + row_height * row
        width = room * level.time_us / longest
        inner = max((time_us for time_us in below if time_us < level.time_us), default=0.0)
        parts += [
            shapes.text(8, y + 15, level.line, "code", "start"),
            shapes.text(8, y + 32, level.does, "soft", "start"),
            shapes.box(left, y + down, width, 26, "cell own", f"{level.time_us:.2f} us"),
        ]
        if inner:
            parts.append(shapes.box(left, y + down, room * inner / longest, 26, "cell below"))
        words = f"{level.time_us:.2f} us"
        parts.append(shapes.text(left + width + 8, y + down + 18, words, "value", "start"))
    height = _TOP + row_height * len(levels) + 4
    return shapes.drawing(kind, left + room + 80, height, "the levels of a call", parts)
