"""Where a process is, and the parts of a report that all verdicts have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from unisono.comm.shared_memory.error_texts import with_global_ranks
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.watch.calls import Wait, call_name, line_of
from unisono.watch.report import RankReport, Report


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is. `state` is set if it cannot go on: it has ended, or is stopped.

    `location` is its line ("data.py:41 in load"), `doing` what that line calls, `in_call` whether
    its stack is inside a communication library; `source` are the lines around `location`, `callers`
    the user's lines that led there, the nearest first. `phase` is its part of the iteration,
    `key` what it waits for in torch's Store, `written` keys that it has set there.
    `failures` are threads, and tasks of thread pools, that exceptions ended, `notes` are about its
    children; `is_abandoned`: it waits, perhaps for a thread that died. `is_described` unless no
    process of its host says more.
    """

    state: str = ""
    location: str = ""
    doing: str = ""
    in_call: bool = True
    stack: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    phase: str = ""
    key: str = ""
    written: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_abandoned: bool = False
    is_described: bool = True


Ask = Callable[[Process], Whereabouts]


def report_about(
    group: GroupRecords,
    kind: str,
    verdict: str,
    record: Record,
    culprits: Iterable[int],
    details: Iterable[str] = (),
    ranks: Iterable[RankReport] = (),
) -> Report:
    """A report about a call of a group, as `record` shows it."""
    return Report(
        kind,
        with_global(group, verdict),
        group.name,
        group.backend,
        record.operation,
        record.call,
        tuple(culprits),
        line_of(record.site),
        details=tuple(with_global(group, line) for line in details),
        ranks=tuple(ranks)
        or tuple(
            replace(name_rank(member, arrived=False), last=_last_of(member))
            for member in group.ranks
        ),
    )


def describe_rank(
    member: RankRecords, where: Whereabouts, arrived: bool, call: str = ""
) -> RankReport:
    """A rank, its line, and its call."""
    _, at, line = member.reason.rpartition(" at ")
    return replace(
        name_rank(member, arrived),
        state=member.reason or where.state,
        place=line if at else where.location,
        doing=where.doing,
        call=call,
        last=_last_of(member),
        stack=where.stack,
        source=where.source,
        callers=where.callers,
    )


def name_rank(member: RankRecords, arrived: bool) -> RankReport:
    """A rank of which only the number is known."""
    return RankReport(member.rank, member.global_rank, member.pid, arrived, host=member.host)


def _last_of(member: RankRecords) -> str:
    """The newest call or message that a rank has finished, if that is known."""
    over = [record for record in member.records if record.state == "finished"]
    if not over or member.heard_s:
        return ""
    return with_line(call_name(over[-1]), line_of(over[-1].site))


def with_line(call: Wait | str, line: str) -> str:
    return f"{call} ({line})" if line else str(call)


def with_global(group: GroupRecords, text: str) -> str:
    """A text about ranks of a group, with their global ranks if those differ."""
    if len(group.ranks) < group.size:
        return text
    return with_global_ranks(text, [member.global_rank for member in group.ranks])
