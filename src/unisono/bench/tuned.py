"""Where unisono is faster, or slower, by the table of `unisono tune` than by its defaults."""

from __future__ import annotations

from unisono.bench.compare import Change, describe_change
from unisono.bench.results import Row, Run
from unisono.bench.statistics import geometric_mean
from unisono.bench.ways import COLLECTIVES, ways_differ

UNTUNED = "untuned"
"""What the backend without a table is called: unisono:untuned."""
THRESHOLD = 0.05


def changes(run: Run) -> list[Change]:
    """Rows that were measured both ways: the defaults are the old one, the table the new one."""
    by_defaults = {_case(row): row for row in run.rows if row.backend == f"unisono:{UNTUNED}"}
    return [
        Change(by_defaults[_case(row)], row, THRESHOLD)
        for row in run.in_order
        if row.backend == "unisono" and _case(row) in by_defaults
    ]


def _case(row: Row) -> tuple[str | int, ...]:
    return row.collective, row.size_bytes, row.dtype, row.op, row.root, row.placement


def lines(run: Run) -> list[str]:
    """What follows below the tables where both were measured."""
    measured = changes(run)
    if not measured:
        return []
    tuning = run.machine.get("tuning")
    if tuning is None:
        return ["there is no tuning table here (unisono tune): tuned and untuned are the same"]
    differing = [change for change in measured if _goes_another_way(change.new, tuning)]
    found = [
        f"tuned is {kind}: {describe_change(change)}"
        for kind in ("slower", "faster")
        for change in differing
        if change.kind == kind
    ]
    if not differing:
        return ["the table has the defaults at these sizes: tuned and untuned are the same"]
    mean = geometric_mean([change.ratio for change in differing])
    found.append(
        f"the table sends {len(differing)} of {len(measured)} rows another way; {len(found)} of "
        f"them take another time, by more than {THRESHOLD:.0%} and the spread of their samples; "
        f"geometric mean of tuned / untuned: {mean:.3f}"
    )
    return found


_LIKE = {"reduce": "all_reduce", "all_reduce_async": "all_reduce"}


def _goes_another_way(row: Row, tuning: dict[str, dict[str, int]]) -> bool:
    collective = _LIKE.get(row.collective, row.collective)
    return collective in COLLECTIVES and ways_differ(
        collective, row.size_bytes, row.ranks, tuning["tuned"], tuning["untuned"]
    )
