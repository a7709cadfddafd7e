"""What led to an incident: the last calls of every rank, on one clock, and the lines of source."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from unisono.comm.shared_memory.records import GroupRecords, Process
from unisono.watch.calls import IN_FLIGHT, Wait, call_name, find_member, line_of
from unisono.watch.report import CallReport, RankReport, Report
from unisono.watch.stacks import lines_of_site

_LAST = 12
"""How many calls of each rank a report keeps."""


def add_history(report: Report, groups: Sequence[GroupRecords]) -> Report:
    """The report with each rank's last calls in `groups`, and the source of those to blame."""
    now = time.monotonic()
    ranks = []
    for rank in report.ranks:
        known = replace(rank, calls=_calls_of((rank.host, rank.pid), groups, now))
        to_blame = rank.rank in report.culprits
        ranks.append(replace(known, source=_source_of(known, report)) if to_blame else known)
    made_at = datetime.now().astimezone().isoformat(timespec="seconds")
    return replace(report, ranks=tuple(ranks), made_at=made_at)


def _calls_of(
    process: Process, groups: Sequence[GroupRecords], now: float
) -> tuple[CallReport, ...]:
    calls = []
    for group in groups:
        for member in group.ranks:
            if not member.pid or member.process != process:
                continue
            for record in member.records[-_LAST:]:
                # One that has failed had waited for whoever did not come.
                is_open = record.state in IN_FLIGHT or (
                    record.state == "failed" and record is member.records[-1]
                )
                wait = Wait(group, member, record)
                missing = [find_member(group, rank) for rank in wait.missing()] if is_open else []
                calls.append(
                    CallReport(
                        name=call_name(record),
                        group=group.name,
                        state=record.state,
                        site=line_of(record.site),
                        arrived_s=record.arrived_s - now,
                        started_s=_before(record.started_s, now),
                        ended_s=_before(record.ended_s, now),
                        waits_for=tuple(other.pid for other in missing if other is not None),
                    )
                )
    return tuple(sorted(calls, key=lambda call: call.arrived_s)[-_LAST:])


def _before(moment_s: float | None, now: float) -> float | None:
    return None if moment_s is None else moment_s - now


def _source_of(rank: RankReport, report: Report) -> tuple[str, ...]:
    """The lines around the place where a rank is, or around the one that the report names."""
    return rank.source or lines_of_site(rank.place or report.site)
