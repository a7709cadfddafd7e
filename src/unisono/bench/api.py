"""Measuring from a program: `unisono.bench.measure`. The arguments are the command's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.bench.settings import Names, Sizes, check_settings

if TYPE_CHECKING:
    from unisono.bench.results import Row, Run

Progress = Callable[[int, int, str], Any]
"""Called with the number of finished rows, the number of all rows, and what is measured next."""

_log = logging.getLogger("unisono")


def measure(
    *collectives: str,
    sizes: Sizes = None,
    ranks: int | None = None,
    backends: Names = None,
    algo: Names = None,
    device: str = "cpu",
    dtype: str = "float32",
    op: str = "sum",
    root: int | None = None,
    budget_s: float | None = None,
    floor: bool = True,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure `collectives` on every backend asked for, and return a row for each, size by size.

    In a program of one process, `ranks` processes are started for it and end with it. In a world of
    several ranks every rank calls this with the same arguments, and every rank gets the rows.

    `sizes`, `backends` and `algo` are the command's, as texts or lists; `device`, `dtype`, `op`,
    `root`, `budget_s` and `floor` are the command's, too. `progress` is called with rows done, rows
    in all, and what comes next (in a world: on rank 0). docs/bench.md explains the fields of a row.

    Raises ValueError for invalid arguments, and UnisonoError if ranks fail. See also `measure_run`.

    >>> rows = unisono.bench.measure("all_reduce", sizes="64,1K", backends="unisono", budget_s=0.01)
    >>> for row in rows:
    ...     row.backend, row.size_bytes, row.wrong, row.time_us.p50 > 0, row.busbw > 0
    ('unisono', 64, 0, True, True)
    ('unisono', 1024, 0, True, True)
    """
    options: Any = {name: value for name, value in locals().items() if name != "collectives"}
    return measure_run(*collectives, **options).in_order


def measure_run(*collectives: str, progress: Progress | None = None, **options: Any) -> Run:
    """Measure `collectives` as `measure` does, with its options and `progress`, and return the
    whole run: machine, versions, settings, what was skipped and why.
    `unisono.bench.results.to_json` makes the command's file of it. Raises what `measure` raises.

    >>> run = unisono.bench.measure_run("barrier", backends="unisono", budget_s=0.01)
    >>> run.finished, run.settings["ranks"], [row.collective for row in run.rows]
    (True, 2, ['barrier'])
    """
    from unisono.torch_support import require_torch

    require_torch("unisono.bench.measure")
    from unisono.bench import session
    from unisono.errors import UnisonoError

    here = session.find_ranks()
    settings = check_settings(collectives, there=None if here is None else here.size, **options)
    if here is not None and here.rank > 0:
        progress = None
    run: Run | None = None

    def listen(event: session.Event) -> None:
        nonlocal run
        if event["event"] != "next":
            run = session.apply_event(run, event)
        elif progress is not None:
            progress(event["done"], event["of"], event["what"])

    session.run(settings, listen, lambda line: _log.info("unisono: %s", line), everywhere=True)
    if run is None:
        raise UnisonoError("the ranks did not measure anything")
    if progress is not None:
        total = len(settings.cases())
        progress(total, total, "")
    return run
