"""The watch: which rank, which call, which line, when communication is stuck, wrong or slow.

`unisono.watch.start()` before the program joins its ranks (or UNISONO_WATCH=1 under `unisono run`)
starts it in this process; every rank should. Groups of unisono keep records anyway; those of gloo,
nccl and mpi are watched from then on.
"""

from __future__ import annotations

import os

from unisono.comm import blame
from unisono.errors import GroupError
from unisono.watch.failure import report_of_error
from unisono.watch.monitor import Monitor
from unisono.watch.report import RankReport, Report, load
from unisono.watch.settings import settings_of

__all__ = ["RankReport", "Report", "is_on", "load", "reports", "start", "stop"]

_monitor: Monitor | None = None


def start(
    *, hang_s: float | None = None, check: bool | None = None, stack_signal: int | None = None
) -> None:
    """Watch this process's communication from now on. Starting twice changes the settings.

    A call that has waited for `hang_s` (30 s, or UNISONO_WATCH_HANG_S) is reported once, as a
    warning of the logger "unisono". `check` compares the calls of groups of other backends with
    the peers' before data moves, as unisono's own always are: all ranks meet in each call, which
    takes time and is not the program's own synchronisation. `stack_signal` is the signal by which
    a process tells its stack while it holds the GIL (UNISONO_WATCH_SIGNAL; 0: none); one that the
    program handles itself is left alone, with a warning.

    Raises ValueError if `hang_s` is not above zero.
    """
    global _monitor
    settings = settings_of(hang_s, check, stack_signal)
    stop()
    _monitor = Monitor(settings)
    blame.diagnose = _report_of_failure


def stop() -> None:
    """Watch no more. Does nothing where nobody watches."""
    global _monitor
    monitor, _monitor = _monitor, None
    blame.diagnose = None
    if monitor is not None:
        monitor.stop()


def is_on() -> bool:
    """Whether this process is watched."""
    return _monitor is not None


def reports() -> list[Report]:
    """The reports about calls of this rank, the newest last."""
    return list(_monitor.reports) if _monitor is not None else []


def _report_of_failure(error: GroupError) -> Report | None:
    return report_of_error(error, _monitor.where) if _monitor is not None else None


def _forget() -> None:
    """In a forked child nobody watches: the thread is the parent's."""
    global _monitor
    _monitor = None
    blame.diagnose = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
