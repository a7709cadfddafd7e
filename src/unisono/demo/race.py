"""The race: the same call on unisono and on gloo, measured by turns on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from unisono.bench import measure_run
from unisono.bench.text import size_text
from unisono.errors import UnisonoError

RACE_BYTES = (8, 1024, 64 * 1024, 1 << 20, 16 << 20)


@dataclass(frozen=True)
class Lap:
    """Median time of one all_reduce by each of the two."""

    size_bytes: int
    unisono_us: float
    gloo_us: float


def race(budget_s: float) -> list[Lap]:
    """Measure all_reduce on two new ranks, for about `budget_s` seconds in all.

    Raises UnisonoError if the ranks fail, a result is wrong, or gloo is not to be had.
    """
    run = measure_run(
        "all_reduce",
        ranks=2,
        sizes=RACE_BYTES,
        backends="unisono,gloo",
        floor=False,
        budget_s=budget_s / len(RACE_BYTES),
    )
    if run.skipped:
        raise UnisonoError(str(run.skipped[0]))
    if run.wrong:
        raise UnisonoError(f"all_reduce: {run.wrong} elements differ from the exact result")
    times_us = {(row.backend, row.size_bytes): row.time_us.p50 for row in run.rows}
    return [Lap(size, times_us["unisono", size], times_us["gloo", size]) for size in RACE_BYTES]


def table(laps: Sequence[Lap]) -> Table:
    drawn = Table()
    for heading in ("all_reduce of", "unisono us", "gloo us", "times faster"):
        drawn.add_column(heading, justify="right")
    for lap in laps:
        drawn.add_row(*row(lap))
    return drawn


def row(lap: Lap) -> tuple[str, str, str, str]:
    ratio = lap.gloo_us / lap.unisono_us
    return size_text(lap.size_bytes), f"{lap.unisono_us:.1f}", f"{lap.gloo_us:.1f}", f"{ratio:.1f}"
