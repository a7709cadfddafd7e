"""How long it takes until ranks can communicate: to the first all_reduce, and to the result.

    python benchmarks/launch.py                two ranks, nine times each
    python benchmarks/launch.py --ranks 4 --times 5 --json launch.json

Every way of starting is one row, measured in turns, so that a busy moment affects all alike. The
first all_reduce is of a NumPy array, and no rank imports torch. Times are this machine's monotonic
clock, which all processes share; a figure is the median over all turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy

import unisono


@dataclass(frozen=True)
class Start:
    """One start: seconds until the slowest rank had its first sum, and until all was over."""

    first_s: float
    over_s: float


@dataclass(frozen=True)
class Row:
    """A way of starting, and its medians."""

    way: str
    first_ms: float
    over_ms: float
    least_ms: float
    most_ms: float


def first_sum() -> float:
    """Run by every rank: the moment of its first result."""
    comm = unisono.init()
    array = numpy.ones(4)
    comm.all_reduce(array)
    moment = time.monotonic()
    assert array[0] == comm.size
    return moment


def by_launch(ranks: int) -> Start:
    """`unisono.launch`."""
    start = time.monotonic()
    moments = unisono.launch(first_sum, ranks, threads=1)
    return Start(max(moments) - start, time.monotonic() - start)


def by_spawn(ranks: int) -> Start:
    """The standard library's pool of spawned processes, for comparison."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        ranks_and_files = [(rank, ranks, os.path.join(folder, "meeting")) for rank in range(ranks)]
        moments = pool.map(_sum_at, ranks_and_files, chunksize=1)
    return Start(max(moments) - start, time.monotonic() - start)


def _sum_at(rank_and_file: tuple[int, int, str]) -> float:
    rank, size, path = rank_and_file
    os.environ.update(UNISONO_RANK=str(rank), UNISONO_SIZE=str(size), UNISONO_RENDEZVOUS=path)
    moment = first_sum()
    unisono.shutdown()
    return moment


WAYS: dict[str, Callable[[int], Start]] = {
    "unisono.launch": by_launch,
    "multiprocessing, spawn": by_spawn,
}


def measure(ranks: int, times: int) -> list[Row]:
    """Every variant in turn, after one start of each that does not count."""
    starts: dict[str, list[Start]] = {way: [] for way in WAYS}
    for turn in range(times + 1):
        for way, start in WAYS.items():
            seconds = start(ranks)
            if turn > 0:
                starts[way].append(seconds)
    return [
        Row(
            way,
            first_ms=statistics.median(start.first_s for start in found) * 1e3,
            over_ms=statistics.median(start.over_s for start in found) * 1e3,
            least_ms=min(start.first_s for start in found) * 1e3,
            most_ms=max(start.first_s for start in found) * 1e3,
        )
        for way, found in starts.items()
    ]


def table(rows: list[Row], ranks: int, times: int) -> str:
    """The rows as Markdown."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{ranks} ranks on {cores} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, median of {times}, ms",
        "",
        "| way | first all_reduce | (least to most) | result |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.way} | {row.first_ms:.0f} | {row.least_ms:.0f} to {row.most_ms:.0f} "
        f"| {row.over_ms:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the file if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.ranks, options.times)
    print(table(rows, options.ranks, options.times))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
