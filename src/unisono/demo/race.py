"""The race: the same call on unisono and on gloo, measured by turns on the same ranks."""

from __future__ import annotations

from unisono.bench import measure_run
from unisono.bench.text import size_text
from unisono.errors import UnisonoError

HEADS = ("all_reduce of", "unisono us", "gloo us", "times faster")
SIZES_BYTES = [8, 1024, 64 * 1024, 1 << 20, 16 << 20]


def race(budget_s: float) -> list[tuple[str, ...]]:
    """The median time of one all_reduce by each of the two, as a row for each size, measured on two
    new ranks for about `budget_s` seconds in all."""
    run = measure_run(
        "all_reduce",
        ranks=2,
        sizes=SIZES_BYTES,
        backends="unisono,gloo",
        budget_s=budget_s / len(SIZES_BYTES),
        floor=False,
    )
    if run.skipped:
        raise UnisonoError(str(run.skipped[0]))
    if run.wrong:
        raise UnisonoError(f"all_reduce: {run.wrong} elements differ from the exact result")
    us = {(row.backend, row.size_bytes): row.time_us.p50 for row in run.rows}
    return [
        (
            size_text(size),
            f"{us['unisono', size]:.1f}",
            f"{us['gloo', size]:.1f}",
            f"{us['gloo', size] / us['unisono', size]:.1f}",
        )
        for size in SIZES_BYTES
    ]
