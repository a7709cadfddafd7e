"""The watching thread of a process: looks at the records now and then, and answers questions."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from unisono.comm.engine import native
from unisono.comm.shared_memory.record_reader import OwnRecords, read_process
from unisono.comm.shared_memory.segment_listeners import tell_launcher
from unisono.watch.absent import Makings
from unisono.watch.calls import CREATIONS, newest_calls, with_creations
from unisono.watch.comparing import LAST_OF_STEPS, Comparing, explain_splits
from unisono.watch.differences import unbalanced
from unisono.watch.hangs import hang
from unisono.watch.job_view import accept_farewell, look_at_job, own_groups, say_farewell
from unisono.watch.journal import DIFFERENT, Journal
from unisono.watch.report import Report
from unisono.watch.settings import WatchSettings
from unisono.watch.sight import LAST, LOOKS, TICK_S, Sight, watched_groups
from unisono.watch.stacks import WATCHING
from unisono.watch.tracing import Tracing
from unisono.watch.waiting import OwnWaits, key_of

_BUSY_TICK_S = 0.01
_GRACE_S = 1.5
_LEAVE_S = 5.0  # the thread may be waiting for silent processes; the program does not wait for it
_FAREWELL_S = 0.5
"""How long a rank that leaves waits for others, in all."""

_logger = logging.getLogger("unisono")


class Monitor:
    """One per process."""

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.journal = Journal(settings.folder)
        self.sight = Sight(settings)
        self.tracing = Tracing(self.sight.retire)
        self._waiting = OwnWaits(settings, self.sight, self.journal)
        self._comparing = Comparing(settings, self.sight, self.journal)
        self._makings = Makings()
        self._own_records = OwnRecords(LAST_OF_STEPS)
        self._explained: set[str] = set()
        self._look_again_s = 0.0
        self._farewell_s = _FAREWELL_S
        self._newest_at_farewell: set[tuple[tuple[int, int], int, str]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCHING, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the trace."""
        self.tracing.end()
        native.hold_aborts(False)
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self.sight.stack_server.close()
            self._own_records.close()

    def leave_to_parent(self) -> None:
        """In a forked child: drop what belongs to the parent."""
        self.sight.stack_server.leave_to_parent()
        self._own_records.close()
        watched_groups.clear()

    def explain(self, group: Any) -> Report | None:
        """Why the newest call of a watched group failed."""
        end = time.monotonic() + _GRACE_S
        while True:
            self.sight.endings |= group.ledger.endings()
            view = look_at_job(self.sight.where, LAST)
            own = [
                wait
                for wait in newest_calls(view.groups, view.me)
                if wait.group.name == group.ledger.name
                and wait.group.backend not in ("unisono", CREATIONS)
            ]
            number = unbalanced(own[0].group) if own else None
            report: Report | None = None
            if number is not None:
                report = explain_splits(own[0].group, number)
            elif own:
                report = hang(view.groups, own[0], view.where)
            settled = report is not None and report.kind != "hang"
            if settled or time.monotonic() > end:
                self._explained.add(group.ledger.name)
                if report is not None:
                    self.journal.keep(report, (own[0].group.segment, DIFFERENT), "raised")
                return report
            time.sleep(0.05)  # the rank that failed first may still be exiting

    def tell_failures(self, error: BaseException | None) -> None:
        """This process ends with `error`: log why, if it came from a watched group's call and has
        no report."""
        if not isinstance(error, RuntimeError) or hasattr(error, "report"):
            return
        for group in list(watched_groups):
            if group.ledger.name not in self._explained:
                report = self.explain(group)
                if report is not None:
                    self.journal.log(report)

    def look_for_differences(self) -> None:
        """Report calls of watched groups that differ, before the records go, and close finished
        records. Over hosts, one rank waits a moment for others that are behind, and all leave their
        records with the others."""
        self.sight.retire()
        me = os.getpid()
        calls = newest_calls(read_process(me, 1), me)
        newest = {(*key_of(call), call.record.state) for call in calls}
        if newest <= self._newest_at_farewell:
            return  # torch destroys all groups one by one
        end = time.monotonic() + self._farewell_s
        while self._look_over_hosts(self._farewell_s) and time.monotonic() < end:
            time.sleep(_BUSY_TICK_S)
        groups = self.sight.whole(with_creations(read_process(me, LAST)))
        self._comparing.look(groups, at_the_end=True)
        self._waiting.tell_what_went_on(groups)
        told = [key for key in self.journal.told if not key[0][0]]  # over hosts: without a device
        say_farewell(LAST, told, max(TICK_S, end - time.monotonic()))
        self._farewell_s = max(0.0, end - time.monotonic())
        self._newest_at_farewell = newest

    def accept_farewell(self, told: dict[str, Any]) -> bool:
        """A rank of another host leaves a group, and has reported this much."""
        accept_farewell(told)
        self.journal.told |= {((*segment,), number) for segment, number in told["reported"]}
        return True

    def _run(self) -> None:
        pause_s = TICK_S
        while not self._stop.wait(pause_s):
            try:
                pause_s = self._tick()
            except Exception:  # the program goes on, and so do we
                _logger.debug("unisono.watch: a look at the records failed", exc_info=True)

    def _tick(self) -> float:
        """Do what is due; returns how long to sleep."""
        self.sight.stack_server.answer_if_asked()
        if native.hold_aborts(None):
            self.look_for_differences()
            native.hold_aborts(False)
        busy = sum(group.retire() for group in list(watched_groups)) > 0
        busy |= self.tracing.collect()
        if time.monotonic() >= self._look_again_s:
            self._look_again_s = time.monotonic() + min(1.0, self.settings.hang_s / LOOKS)
            self.sight.retire()
            self._look()
        return _BUSY_TICK_S if busy else TICK_S

    def _look(self) -> None:
        """Report, once, calls that differ, what has waited for too long, and who does not come."""
        groups = own_groups(with_creations(read_process(os.getpid(), LAST)))
        self._look_over_hosts()
        self._comparing.look(self.sight.whole(groups))
        self._waiting.look(groups)
        self._look_for_absent_ranks()

    def _look_over_hosts(self, hurry_s: float | None = None) -> bool:
        return self.sight.look_over_hosts(self._comparing.is_one_slow_elsewhere(), hurry_s)

    def _look_for_absent_ranks(self) -> None:
        """Report who does not come to a call that makes a group."""
        for making in self._makings.overdue(self.settings.hang_s):
            view = self.sight.look(1)
            report = making.report(making.processes(view.groups), view.where)
            if report is None or not self._makings.is_news(making, report):
                continue
            self.journal.keep(report)
            if os.getpid() in [rank.pid for rank in report.ranks if rank.arrived][:1]:
                self.journal.log(report)
                if report.kind == "lost":  # it cannot come any more
                    tell_launcher(report.to_text())
