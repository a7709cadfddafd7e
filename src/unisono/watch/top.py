"""The running jobs of this user on this machine, rank by rank: what `unisono top` shows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from unisono.comm.shared_memory.record_reader import segments_of
from unisono.comm.shared_memory.records import GroupRecords, Process, Record
from unisono.errors import UnisonoError
from unisono.processes import command_of, parent_of, state_of
from unisono.watch.calls import CREATIONS, IN_FLIGHT, by_number, call_name, line_of, snapshot, waits
from unisono.watch.hangs import hang
from unisono.watch.report import Report
from unisono.watch.slow import Slowness
from unisono.watch.whereabouts import Whereabouts, whereabouts

STUCK_S = 5.0
"""A rank that has been in one call, or out of calls while others wait, for this long is shown in
red."""

_WINDOW_S = 2.0


@dataclass(frozen=True)
class RankRow:
    """One rank in one group. `host` is the name of its host, in a group over several. `call_s` is
    for how long it has been in `call`; rates, shares and lag are means over its last two seconds of
    records."""

    group: str
    backend: str
    rank: int
    global_rank: int
    pid: int
    state: str
    call: str
    call_s: float
    site: str
    calls: int
    calls_a_second: float
    bytes_a_second: float
    wait_share: float
    lag_s: float
    is_stuck: bool
    host: str = ""
    is_culprit: bool = False
    """Whether the others wait for it."""


@dataclass(frozen=True)
class Job:
    """Processes that share groups. `verdict` is what the watch says about a waiting call."""

    command: str
    pids: tuple[int, ...]
    rows: tuple[RankRow, ...]
    verdict: str = ""


class Verdicts:
    """The watch's verdicts on stuck jobs. Each call is diagnosed once: to ask for a stack
    interrupts the program."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, int], int, int], Report | None] = {}
        self._slowness: dict[tuple[int, int], Slowness] = {}

    def of(self, groups: Sequence[GroupRecords]) -> Report | None:
        """The report on the oldest call that has waited for STUCK_S, if there is one; else on a
        slow rank."""
        for wait in waits(groups):
            if wait.waited_s() < STUCK_S or wait.is_for_anybody():
                continue
            if len(wait.group.ranks) < wait.group.size and wait.group.is_part:
                continue  # the missing rank may be on another host
            key = (wait.group.segment, wait.member.rank, wait.record.number)
            if key not in self._known:
                self._known[key] = hang(groups, wait, partial(_where, with_children=True))
            if self._known[key] is not None:
                return self._known[key]
        for group in groups:
            if len(group.ranks) < max(2, group.size):
                continue
            slowness = self._slowness.setdefault(group.segment, Slowness())
            slowness.look(group, _where)
            if (report := slowness.report(group)) is not None:
                return report
        return None


def _where(process: Process, with_children: bool = False) -> Whereabouts:
    return whereabouts(process[1], with_children=with_children)


def as_reported(row: RankRow, report: Report) -> RankRow:
    """The row with what the report says about the rank: whether it is to blame, and where it is, if
    its call has no line."""
    if row.group != report.group:
        return row
    place = next((rank.place for rank in report.ranks if rank.pid == row.pid), "")
    is_culprit = row.rank in report.culprits
    return replace(row, is_culprit=is_culprit, site=row.site or line_of(place))


def jobs(of: int | None = None, verdicts: Verdicts | None = None) -> list[Job]:
    """The running jobs of this user, each with all ranks of all its groups; `of`: only the job of
    this process, or the job that it launched. `verdicts` remembers the verdicts."""
    known = Verdicts() if verdicts is None else verdicts
    found: list[Job] = []
    for pids, groups in _connected(snapshot(_ranks_of_this_user())):
        if of is not None and of not in pids | {parent_of(pid) for pid in pids}:
            continue
        rows = [row for group in groups if group.backend != CREATIONS for row in _rows(group)]
        report = known.of(groups)
        if report is not None:
            rows = [as_reported(row, report) for row in rows]
        ordered = sorted(rows, key=lambda row: (row.group, row.rank))
        verdict = "" if report is None else report.verdict
        names = [name for name in map(command_of, sorted(pids)) if name != "?"]  # alive
        found.append(Job(" ".join(names[:1]) or "?", tuple(sorted(pids)), tuple(ordered), verdict))
    return found


def _connected(groups: list[GroupRecords]) -> list[tuple[set[int], list[GroupRecords]]]:
    """The groups by job, with the processes of each. Two groups belong to one job even if the
    process that connects them has left one of them, which its peers' records still show."""
    found: list[tuple[set[int], list[GroupRecords]]] = []
    for group in groups:
        pids, several = {member.pid for member in group.ranks}, [group]
        for job in [job for job in found if job[0] & pids]:
            found.remove(job)
            pids |= job[0]
            several += job[1]
        if pids:
            found.append((pids, several))
    return found


def _ranks_of_this_user() -> list[int]:
    """The processes of this user that are in a group, native or watched."""
    me = os.geteuid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == me and segments_of(int(name)):
                found.append(int(name))
        except (OSError, UnisonoError):
            continue
    return sorted(found)


def _rows(group: GroupRecords) -> list[RankRow]:
    now = time.monotonic()
    first = {
        number: min(record.arrived_s for record in records.values())
        for number, records in by_number(group).items()
    }
    rows = []
    for member in group.ranks:
        flying = [record for record in member.records if record.state in IN_FLIGHT]
        recent = [record for record in member.records if now - record.arrived_s < _WINDOW_S]
        begin_s = member.records[0].arrived_s if member.records else now
        span_s = max(1e-3, min(_WINDOW_S, now - begin_s))
        waited_s = sum(_waited_s(record, now) for record in member.records)
        lags = [record.arrived_s - first[record.call] for record in recent if record.call]
        state = state_of(member.pid)
        call_s = now - flying[0].arrived_s if flying else 0.0
        calls = max((record.call or 0 for record in member.records), default=0)
        is_behind = calls < max(first, default=0) and not flying
        quiet_s = now - (member.records[-1].ended_s or now) if member.records else 0.0
        rows.append(
            RankRow(
                group=group.name,
                backend=group.backend,
                rank=member.rank,
                global_rank=member.global_rank,
                pid=member.pid,
                state=str(state),
                call=call_name(flying[0]) if flying else "",
                call_s=call_s,
                site=line_of(flying[0].site) if flying else "",
                calls=calls,
                calls_a_second=len(recent) / span_s,
                bytes_a_second=sum(record.bytes for record in recent) / span_s,
                wait_share=min(1.0, waited_s / span_s),
                lag_s=sum(lags) / len(lags) if lags else 0.0,
                is_stuck=call_s > STUCK_S
                or (is_behind and quiet_s > STUCK_S)
                or state.has_ended
                or state.is_stopped,
                host=member.host,
            )
        )
    return rows


def _waited_s(record: Record, now: float) -> float:
    """How long in the window a call waited for its peers; a watched call does not record when they
    came, and counts as a whole."""
    until = record.started_s or record.ended_s or now
    return max(0.0, until - max(record.arrived_s, now - _WINDOW_S))
