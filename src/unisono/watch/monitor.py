"""The watching thread of a process: finds calls that wait too long, and answers who asks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from unisono.comm.records import read_process
from unisono.watch import diagnose
from unisono.watch.calls import Wait, waits
from unisono.watch.desk import Desk
from unisono.watch.processes import state_of
from unisono.watch.report import Report
from unisono.watch.settings import Settings
from unisono.watch.snapshot import snapshot
from unisono.watch.whereabouts import whereabouts

_TICK_S = 0.1
_LAST = 64
"""How many records of each rank a diagnosis looks at."""

_logger = logging.getLogger("unisono")


class Monitor:
    """One a process. `reports` are those of calls of this rank, the newest last."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reports: list[Report] = []
        self.endings: dict[int, str] = {}
        self.on_tick: list[Callable[[], object]] = []
        self._desk = Desk(settings.stack_signal)
        self._told: set[tuple[tuple[int, int], int]] = set()
        self._stop = threading.Event()
        self._look_again_s = 0.0
        self._thread = threading.Thread(target=self._run, name="unisono watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._desk.close()

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            self._desk.answer_if_asked()
            for tick in list(self.on_tick):
                tick()
            if time.monotonic() >= self._look_again_s:
                self._look_again_s = time.monotonic() + min(1.0, self.settings.hang_s / 4)
                try:
                    self._look()
                except Exception:  # the program goes on without us
                    _logger.debug("unisono.watch: a look at the records failed", exc_info=True)

    def _look(self) -> None:
        """Report what has waited for too long, once."""
        me = os.getpid()
        now = time.monotonic()
        for wait in waits(read_process(me, _LAST), me):
            key = wait.group.segment, wait.record.number
            late = now - wait.record.arrived_s > self.settings.hang_s
            if not late or key in self._told or _waits_for_anybody(wait):
                continue
            groups = snapshot([me], _LAST)
            still = [
                other
                for other in waits(groups, me)
                if (other.group.segment, other.record.number) == key
            ]
            report = diagnose.hang(groups, still[0], self.where) if still else None
            if report is not None:
                self._told.add(key)
                self.reports.append(report)
                if self._speaks(still[0], report):
                    _logger.warning("unisono.watch: %s", report)

    def _speaks(self, wait: Wait, report: Report) -> bool:
        """Whether this rank tells it: the lowest of those who wait and can speak."""
        if report.kind == "cycle":
            return wait.one.global_rank == min(report.culprits)
        waiting = [
            other.one.rank
            for other in waits([wait.group])
            if other.record.call == wait.record.call
            and (other.record.call is not None or other.one.rank == wait.one.rank)
            and not state_of(other.one.pid).is_stopped
            and not state_of(other.one.pid).has_ended
        ]
        return not waiting or wait.one.rank == min(waiting)

    def where(self, pid: int) -> diagnose.Whereabouts:
        """Where a process is."""
        return whereabouts(pid, self.endings, self._desk.answer_if_asked)


def _waits_for_anybody(wait: Wait) -> bool:
    """A receiver from anybody may serve others, and wait for as long as it takes."""
    return wait.record.tag is not None and wait.record.peer is None
