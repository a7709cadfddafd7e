"""Reports: what went wrong in one sentence, then what each rank was doing, and its last calls."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from unisono.comm.shared_memory.error_texts import with_global_ranks
from unisono.comm.shared_memory.records import GroupRecords, RankRecords, Record
from unisono.errors import UnisonoError, list_ranks, name_ranks
from unisono.output_files import write_text
from unisono.watch.calls import IN_FLIGHT, Wait, call_name, calls_of, line_of
from unisono.watch.stacks import lines_of_site

if TYPE_CHECKING:
    from unisono.watch.whereabouts import Whereabouts

_FORMAT = "unisono report 1"
Built = TypeVar("Built")
_MOST_EVIDENCE = 10
_LAST = 12
"""How many calls of each rank a report keeps."""


@dataclass(frozen=True)
class CallReport:
    """One of a rank's last calls, in any group. Times are seconds relative to the report, so
    negative; `started_s` is when all peers were there. `waits_for` are the pids of the processes
    that it waits for."""

    name: str
    group: str
    state: str
    site: str
    arrived_s: float
    started_s: float | None = None
    ended_s: float | None = None
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """One rank of the group: `rank`, its `global_rank`, its `pid`, whether it has `arrived` at the
    call. Unknown texts are empty.

    `place` is the line of its program ("data.py:41 in load"), `doing` what that line calls, `call`
    the call that it is in, `last` the last one that it finished, `state` its state in the system,
    `stack` its stack, line by line. `source` are the lines around `place`, with a mark; `calls` its
    last ones, the oldest first; `host` is the name of its host if the job has several; `callers`
    are the user's lines that led to `place`, the nearest first. See also `Report`.

    >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=False, place="data.py:41 in load").where()
    'is in data.py:41 in load'
    """

    rank: int
    global_rank: int
    pid: int
    arrived: bool
    state: str = ""
    place: str = ""
    doing: str = ""
    call: str = ""
    last: str = ""
    stack: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    calls: tuple[CallReport, ...] = ()
    host: str = ""
    callers: tuple[str, ...] = ()

    def name(self) -> str:
        """ "rank 1", or "rank 1 (global 3)" if its global rank differs.

        >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=True).name()
        'rank 1 (global 3)'
        """
        beside = f" (global {self.global_rank})" if self.global_rank != self.rank else ""
        return f"rank {self.rank}{beside}"

    def process(self) -> str:
        """ "pid 4711", or "pid 4711 on node7" if the job has several hosts.

        >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=True, host="node7").process()
        'pid 4711 on node7'
        """
        return f"pid {self.pid}" + (f" on {self.host}" if self.host else "")

    def where(self) -> str:
        """Where it is: completes "it ...".

        >>> rank = unisono.watch.RankReport(1, 1, 7, True, call="barrier #2", place="a.py:3 in f")
        >>> rank.where()
        'is in barrier #2 (a.py:3)'
        """
        if self.state:
            return self.state
        if not self.place:
            return f"is in {self.call}" if self.call else "did not say where it is"
        site = self.place.partition(" in ")[0]
        if self.call:
            return f"is in {self.call} ({site})"
        return f"is in {site}, in {self.doing}" if self.doing else f"is in {self.place}"


@dataclass(frozen=True)
class Report:
    """What is wrong with a `group` on a `backend`. `verdict` says it in one sentence, `details` say
    more. `kind` is "hang", "lost", "cycle", "mismatch", "apart", "threads", "stalled", "slow",
    "elsewhere" or "failed".

    `operation` and `call` are the call in question, `waited_s` how long ranks have waited in it;
    `culprits` are the ranks (of the group) that the verdict names, `site` the line, `ranks` what is
    known about each rank, `made_at` when the report was made, with the time zone. See also
    `reports`, `load`.

    >>> Report = unisono.watch.Report
    >>> print(Report("lost", "rank 1 has ended", "world", "unisono", "barrier", 2, culprits=(1,)))
    rank 1 has ended
    """

    kind: str
    verdict: str
    group: str
    backend: str
    operation: str = ""
    call: int | None = None
    culprits: tuple[int, ...] = ()
    site: str = ""
    waited_s: float = 0.0
    details: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    made_at: str = ""

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {line}" for line in self.details)]
        stalled = self.culprits if self.kind == "stalled" else ()
        here = [rank for rank in self.ranks if rank.arrived and rank.rank not in stalled]
        waiting, everywhere = [rank.rank for rank in here], [rank.global_rank for rank in here]
        some_wait = self.kind != "mismatch"
        if waiting and self.waited_s and some_wait:
            beside = f" (global {list_ranks(everywhere)})" if waiting != everywhere else ""
            lines.append(f"  waiting for {self.waited_s:.0f} s: {name_ranks(waiting)}{beside}")
        for rank in self.ranks:
            is_known = rank.place or rank.state or rank.call
            if some_wait and is_known and not rank.arrived:
                last = f"; the last call that it finished: {rank.last}" if rank.last else ""
                lines.append(f"  {rank.name()} ({rank.process()}) {rank.where()}{last}")
            if rank.callers and rank.rank in self.culprits:
                lines.append(f"  {rank.name()} got there from {' < '.join(rank.callers)}")
        return "\n".join(lines)

    def to_text(self) -> str:
        """All of it as JSON, for `from_text`.

        >>> Report = unisono.watch.Report
        >>> text = Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,)).to_text()
        >>> import json
        >>> json.loads(text)["verdict"]
        'rank 1 has ended'
        """
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to the file `path`, for `load` and `unisono doctor`. Raises OSError if that
        fails.

        >>> import tempfile
        >>> Report = unisono.watch.Report
        >>> report = Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,))
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     report.save(file.name)
        ...     unisono.watch.load(file.name) == report
        True
        """
        write_text(path, self.to_text() + "\n")


def load(path: str | os.PathLike[str]) -> Report:
    """Read the report saved in the file `path`. Raises UnisonoError if the file is not a report.
    See also `Report`.

    >>> unisono.watch.load("/etc/hostname")
    Traceback (most recent call last):
        ...
    unisono.errors.UnisonoError: /etc/hostname is not a report of unisono
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnisonoError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnisonoError(f"{path} is not a report of unisono") from error
    return from_text(text, str(path))


def from_text(text: str, origin: str = "this") -> Report:
    """The report that `to_text` wrote. Raises UnisonoError for other texts; `origin` is for the
    message."""
    try:
        found = json.loads(text)
        written = found.pop("format")
        if written != _FORMAT and str(written).startswith(_FORMAT.rstrip("1")):
            raise UnisonoError(f"{origin} was written by another version of unisono")
        if written != _FORMAT:
            raise ValueError("of another shape")
        return build(Report, found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnisonoError(f"{origin} is not a report of unisono") from error


def in_brief(headline: str, evidence: Sequence[str], advice: str, path: str, is_short: bool) -> str:
    """A report as people read it: the headline, some evidence, what to do, and where all of it is
    (no `path`: nowhere); then, unless it `is_short`, the rest of the evidence."""
    where = f"the full report: {path}" if path else "the full report could not be written"
    lines = [*evidence[:_MOST_EVIDENCE], *filter(None, [advice]), where]
    if not (is_short and path):
        lines += evidence[_MOST_EVIDENCE:]
    return "\n".join([headline, *(f"  {line}" for line in lines)])


def global_culprits(report: Report) -> list[int]:
    """The ranks that a report names, by their global ranks."""
    ranks = {member.rank: member.global_rank for member in report.ranks}
    return [ranks.get(rank, rank) for rank in report.culprits]


# -- the parts that all verdicts have --------------------------------------------------------------


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


# -- what led to it ------------------------------------------------------------------------------


def add_history(report: Report, groups: Sequence[GroupRecords]) -> Report:
    """The report with each rank's last calls in `groups`, and the source of those to blame."""
    now = time.monotonic()
    ranks = []
    for rank in report.ranks:
        source = rank.source
        if not source and rank.rank in report.culprits:
            source = lines_of_site(rank.place or report.site)
        calls = calls_of(groups, (rank.host, rank.pid))[-_LAST:]
        ranks.append(replace(rank, source=source, calls=tuple(_call(c, now) for c in calls)))
    made_at = datetime.now().astimezone().isoformat(timespec="seconds")
    return replace(report, ranks=tuple(ranks), made_at=made_at)


def _call(call: Wait, now: float) -> CallReport:
    group, record = call.group, call.record
    # A failed call had waited for the missing ranks.
    has_failed = record.state == "failed" and record is call.member.records[-1]
    missing = call.missing() if record.state in IN_FLIGHT or has_failed else []
    return CallReport(
        name=call_name(record),
        group=group.name,
        state=record.state,
        site=line_of(record.site),
        arrived_s=record.arrived_s - now,
        started_s=None if record.started_s is None else record.started_s - now,
        ended_s=None if record.ended_s is None else record.ended_s - now,
        waits_for=tuple(member.pid for member in group.ranks if member.rank in missing),
    )


# -- dataclasses from JSON: every field is checked because a file may contain anything -----


def build(kind: type[Built], value: Any) -> Built:
    """A `kind` from `value`, which `asdict` and JSON made of one.

    Raises TypeError, ValueError, KeyError or AttributeError for anything else.
    """
    built: Built = _build(kind, value)
    return built


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass; empty for anything else."""
    return get_type_hints(kind) if is_dataclass(kind) else {}


def _build(kind: Any, value: Any) -> Any:
    if types := _types(kind):
        return kind(**{name: _build(types[name], found) for name, found in value.items()})
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_build(each, found) for each, found in zip(kinds, value, strict=True))
    if arguments:  # or None
        return None if value is None else _build(arguments[0], value)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is float and not math.isfinite(value)):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


# -- what to do about it ---------------------------------------------------------------------------

ADVICE: Mapping[str, tuple[str, ...]] = {
    "hang": (
        "The rank that is missing must get past its line and make the call that the others are "
        "in, or no rank may make it.",
        "A branch on the rank, or on data that differs between ranks, must not contain a "
        "collective call.",
        "If the rank is only slow (a checkpoint, a first batch), raise the timeout of the group, "
        "or let all ranks wait for it.",
    ),
    "lost": (
        "Find out why that rank ended: read its traceback or, after SIGKILL, look in the "
        "kernel's log (dmesg) for an out-of-memory kill.",
        "The other ranks only report that it is gone; their tracebacks are consequences.",
    ),
    "cycle": (
        "Make all ranks enter the calls in the same order, also calls of different groups.",
        "If two ranks exchange messages, one must receive first; or use isend and irecv, or "
        "sendrecv.",
    ),
    "mismatch": (
        "Compare the calls named above: the rank that differs took another branch, or has a "
        "tensor of another shape or type.",
        "The last batch of an epoch is often smaller: drop it, or pad it.",
    ),
    "apart": (
        "From that call on this rank is one call ahead of the others, or behind: look for a call "
        "in a branch that only this rank takes, or skips.",
        "Call unisono.watch.step() at the start of each iteration to learn in which one it "
        "happens.",
    ),
    "threads": ("Give each thread that makes calls a group of its own.",),
    "stalled": (
        "The rank reached the call and did not go on: check whether it is stopped (a debugger, "
        "Ctrl-Z), swapping, or without a core.",
    ),
    "elsewhere": (
        "Read the reports of the other machines, too: the machine of the missing rank says where "
        "it is.",
    ),
    "slow": (
        "Look at what that rank does meanwhile: more data or work than the others, a slower disk, "
        "or another program on its cores.",
    ),
    "failed": ("Read the exception of the rank that failed first; the others follow from it.",),
}
