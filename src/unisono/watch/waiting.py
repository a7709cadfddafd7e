"""Finds calls of this process that wait too long, and says what they wait for, and that they went
on."""

from __future__ import annotations

import logging
import os
import time

from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import GroupRecords
from unisono.comm.shared_memory.segment_listeners import tell_launcher
from unisono.processes import state_of
from unisono.watch.calls import (
    IN_FLIGHT,
    Wait,
    calls_of,
    newest_calls,
    snapshot,
    waits,
    with_creations,
)
from unisono.watch.comparing import LAST_OF_STEPS
from unisono.watch.hangs import hang, is_certain
from unisono.watch.job_view import EAGER_HOSTS, JobView, host_number
from unisono.watch.journal import Journal, Key
from unisono.watch.report import Report
from unisono.watch.settings import WatchSettings
from unisono.watch.sight import LAST, Sight

_STANDS_STILL_S = 0.5  # time in which a running rank moves some data
_PATIENT_TIMES = 3
"""Hosts beyond the first eight wait this many times longer before they ask all others."""

_logger = logging.getLogger("unisono")


class OwnWaits:
    """The calls that this rank has reported to wait, and others that may."""

    def __init__(self, settings: WatchSettings, sight: Sight, journal: Journal) -> None:
        self._hang_s, self._sight, self._journal = settings.hang_s, sight, journal
        self._awaited: dict[Key, Wait] = {}

    def look(self, groups: list[GroupRecords]) -> None:
        """Report each call of this process in these groups that has waited for too long, once."""
        for wait in waits(groups, os.getpid()):
            key = key_of(wait)
            if key in self._journal.told or wait.is_for_anybody() or not self._is_due(wait, groups):
                continue
            view = self._sight.look(LAST_OF_STEPS)
            still = [other for other in waits(view.groups, view.me) if key_of(other) == key]
            report = hang(view.groups, still[0], view.where) if still else None
            if report is not None and report.kind == "stalled" and _moves(still[0].group):
                continue
            if report is not None and self._holds_still(report, key):
                others = waits(groups, os.getpid()) if report.kind == "cycle" else []
                is_told = any(key_of(other) in self._awaited for other in others)
                speaks = not is_told and _speaks(view, still[0], report)
                if self._journal.tell(report, speaks, key):
                    self._awaited[key] = still[0]
                if is_certain(report, view.where):
                    tell_launcher(report.to_text())
        self.tell_what_went_on(groups)

    def tell_what_went_on(self, groups: list[GroupRecords]) -> None:
        """Log that calls which were reported to hang have gone on."""
        finished = calls_of(groups, os.getpid(), ("finished",)) if self._awaited else []
        for call in finished:
            wait = self._awaited.pop(key_of(call), None)
            if wait is not None:
                ended_s = call.record.ended_s or time.monotonic()
                waited_s = ended_s - wait.record.arrived_s
                _logger.warning("unisono.watch: %s continued after %.0f s", wait, waited_s)

    def _is_due(self, wait: Wait, groups: list[GroupRecords]) -> bool:
        """Whether it is time for this rank to ask where all others are."""
        waited_s = wait.waited_s()
        if waited_s <= self._hang_s or self._is_only_posted(wait, groups):
            return False
        if not wait.group.is_part:
            return True
        # In a group over hosts the lowest waiting rank of each host asks, from the ninth host on
        # later.
        states = {
            other.member.rank: state_of(other.member.pid)
            for other in waits(snapshot([os.getpid()], LAST))
            if _is_same(other, wait)
        }
        able = [rank for rank, state in states.items() if not (state.is_stopped or state.has_ended)]
        if able and min(able) != wait.member.rank:
            return False
        return waited_s > (_PATIENT_TIMES if host_number() >= EAGER_HOSTS else 1) * self._hang_s

    def _is_only_posted(self, wait: Wait, groups: list[GroupRecords]) -> bool:
        """Whether a message was begun early: the program is elsewhere, or makes other calls."""
        if wait.record.tag is None or wait.group.backend == "nccl":
            return False
        recently_s = time.monotonic() - self._hang_s
        newest = [call.record for call in newest_calls(groups, os.getpid())]
        return not self._sight.where_now(wait.member.process).in_call or any(
            record.arrived_s > recently_s or (record.tag is None and record.state in IN_FLIGHT)
            for record in newest
            if record.arrived_s > wait.record.arrived_s
        )

    def _holds_still(self, report: Report, key: Key) -> bool:
        """Whether our call still waits, and for the same ranks: asking all takes time, and the
        answer of one that has come meanwhile does not explain the wait."""
        self._sight.retire()
        me = os.getpid()
        for wait in waits(with_creations(read_process(me, LAST)), me):
            if key_of(wait) == key:
                is_own = (report.group, report.call) == (wait.group.name, wait.record.call)
                is_hang = is_own and report.kind == "hang" and report.call is not None
                return not is_hang or set(report.culprits) <= set(wait.missing())
        return False


def _speaks(view: JobView, wait: Wait, report: Report) -> bool:
    """Whether this rank logs it: the lowest rank that waits in the reported call and can log.
    Others may wait for it elsewhere."""
    if report.kind == "cycle" and not wait.group.is_part:
        return wait.member.global_rank == min(rank.global_rank for rank in report.ranks)
    all_waits = waits(view.groups)
    if report.kind == "cycle":  # of several calls: the rank that asks for its host may log it
        ranks = {(rank.host, rank.pid) for rank in report.ranks}
        alike = [other for other in all_waits if other.member.process in ranks]
    else:
        about = report.group, report.call, report.operation
        alike = [
            other
            for other in all_waits
            if (other.group.name, other.record.call, other.record.operation) == about
            and not other.is_for_anybody()
        ] or [wait]
    waiting = [
        other.member.global_rank
        for other in all_waits
        if any(_is_same(other, known) for known in alike)
        and not view.where(other.member.process).state
    ]
    return not waiting or wait.member.global_rank == min(waiting)


def _moves(group: GroupRecords) -> bool:
    """Whether data still moves in a group, however slowly."""
    time.sleep(_STANDS_STILL_S)
    now = [known for known in read_process(os.getpid(), 1) if known.segment == group.segment]
    before = {member.rank: member.progress for member in group.ranks}
    return any(before[member.rank] != member.progress for known in now for member in known.ranks)


def key_of(wait: Wait) -> Key:
    """The key of a call of this process."""
    return wait.group.segment, wait.record.number


def _is_same(other: Wait, wait: Wait) -> bool:
    """Whether another rank waits in the same call; a message belongs to one rank."""
    if other.group.segment != wait.group.segment or other.record.call != wait.record.call:
        return False
    return wait.record.call is not None or other.member.rank == wait.member.rank
