"""Profiles: where the time of a training step goes, from the records of all ranks and their notes.

A rank is blocked in a blocking call, in a wait, and at the end of a backward pass until the calls
that it began there are over: DDP waits for those in C++. Communication is exposed while the rank is
blocked, and hidden otherwise. A moment belongs to the call in flight that ends first; if the rank
is blocked and the last rank has not come to that call yet, the moment is lost.
"""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from unisono.comm.shared_memory.records import GroupRecords, Process, Record
from unisono.watch.calls import CREATIONS, line_of, with_creations
from unisono.watch.job_view import own_host
from unisono.watch.steps import find_steps
from unisono.watch.traces import Trace
from unisono.watch.waits import BACKWARD, LEFT_RUNNING, STEP, WAIT, WaitNote, notes_in, notes_of

_MAIN_THREAD = 1
Span = tuple[float, float]


@dataclass(frozen=True)
class StepProfile:
    """One step of one rank, in seconds: `wall_s` is `computation_s` and `exposed_s`. Of the first,
    the main thread was ready but had no core for `no_core_s`, and `hidden_s` passed during calls;
    `lost_s`, the wait for the slowest rank, is a part of the second. `lost_to` is the rank that
    cost most of it, -1 for none."""

    rank: int
    step: int
    begin_s: float
    wall_s: float
    computation_s: float
    no_core_s: float
    hidden_s: float
    exposed_s: float
    lost_s: float
    lost_to: int


@dataclass(frozen=True)
class CallProfile:
    """The calls of one kind on one line, in the mean of steps and ranks; `bytes` tells buckets
    apart. `duration_s` is from a call's start to its end."""

    group: str
    backend: str
    operation: str
    bytes: int
    line: str
    is_blocking: bool
    count: float
    duration_s: float
    hidden_s: float
    exposed_s: float
    lost_s: float
    lost_to: int


@dataclass(frozen=True)
class Piece:
    """A part of a step: what a rank did ("hidden", "exposed" or "lost"), since the step began."""

    rank: int
    what: str
    call: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Profile:
    """What `unisono.watch.profile()` finds; printing it shows tables and advice.

    `steps_from` is "marks" (of the program, of DDP or of optimizers), "calls" (by their period) or
    "" if there are none: then the whole run is one step. `typical` has medians of each rank's
    `steps`, with their number as `step`; `timeline` is one step of median length on all ranks.
    `left_out` are calls and notes of the ranks that newer ones have overwritten.
    """

    steps_from: str
    typical: tuple[StepProfile, ...]
    calls: tuple[CallProfile, ...]
    advice: tuple[str, ...]
    steps: tuple[StepProfile, ...]
    timeline: tuple[Piece, ...]
    left_out: int = 0

    def __str__(self) -> str:
        from unisono.watch.profile_views import to_text

        return to_text(self)


class ProfileTrace(Trace):
    """Follows groups as a trace does, and writes their profile. `notes` has descriptors of the
    notes of processes; others are looked for in /proc. `tell` gets the profile."""

    what = "profile"

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        notes: Mapping[int, int],
        tell: Callable[[Profile], object] = lambda profile: None,
        *,
        from_the_start: bool = False,
    ) -> None:
        super().__init__(os.devnull if path is None else path, from_the_start=from_the_start)
        self._is_kept = path is not None
        self._notes, self._tell = notes, tell
        if not from_the_start:
            self._since_s = time.monotonic()

    def look(self) -> bool:
        return self.collect(later=True)

    def write(self, missing_hosts: Sequence[str] = ()) -> None:
        from unisono.watch.profile_views import write_profile

        self.collect(to_the_end=True)
        self.close()
        groups, notes = self.groups(), {}
        left_out = self.lost()
        for process in {member.process for group in groups for member in group.ranks}:
            host, pid = process
            file = self._notes.get(pid)
            if host in ("", own_host()):
                found = notes_of(pid) if file is None else notes_in(file)
                if found is not None:
                    notes[process], older = found
                    if older:
                        self._since_s = max(self._since_s, found[0][0].end_s)
                    left_out += older
        profile = build_profile(groups, notes, self._since_s)
        profile = replace(profile, left_out=left_out)
        self._tell(profile)
        self.written = f"the profile:\n{profile}"
        if self._is_kept:
            write_profile(profile, self.path)
            self.written += f"\nunisono: the profile is in {self.path}"


class StepCall(NamedTuple):
    """A finished call of one rank. `last_s` is when the last rank came, which was `last`."""

    begin_s: float
    end_s: float
    last_s: float
    last: int
    is_blocking: bool
    record: Record
    group: GroupRecords

    def key(self) -> tuple[str, str, str, int, str, bool]:
        """What makes it the same call in another step."""
        group, record = self.group, self.record
        line = line_of(record.site)
        return group.name, group.backend, record.operation, record.bytes, line, self.is_blocking


class RankCalls:
    """The calls of one rank, its steps, and what it did when."""

    def __init__(self, rank: int, calls: Iterable[StepCall], notes: Sequence[WaitNote]) -> None:
        self.rank = rank
        self.calls = sorted(calls, key=lambda call: call.begin_s)
        self._over_s = list(accumulate((call.end_s for call in self.calls), max))
        spans = [call[:2] for call in self.calls if call.is_blocking]
        for note in notes:
            if note.kind == BACKWARD:
                ends = [
                    c.end_s
                    for c in self.between(note.begin_s, note.end_s)
                    if c.begin_s >= note.begin_s
                ]
                spans.append((note.end_s, max(ends, default=0.0)))
            elif note.kind == WAIT:
                spans.append((note.begin_s, note.end_s))
        self._pieces = sorted(self._divide(_union(spans)), key=lambda piece: piece[0])
        known = [(0.0, 0.0)]  # moments, and how long without a core until then
        for note in notes:
            known.append((note.begin_s, note.no_core_at_begin_s))
            known.append((note.end_s, note.no_core_at_end_s))
        self._no_core = sorted(known)
        marks = [note.end_s for note in notes if note.kind == STEP]
        self.steps_from, self.ends = ("marks", marks) if len(marks) > 1 else self._find_steps()

    def between(self, begin_s: float, end_s: float) -> list[StepCall]:
        """The calls in flight at some moment between two."""
        first = bisect_right(self._over_s, begin_s)
        stop = bisect_left(self.calls, end_s, key=lambda call: call.begin_s)
        return [call for call in self.calls[first:stop] if call.end_s > begin_s]

    def pieces(self, begin_s: float, end_s: float) -> Iterator[tuple[float, float, str, StepCall]]:
        """What it did between two moments: begin, end, what, and the call."""
        first = bisect_right(self._pieces, begin_s, key=lambda piece: piece[1])
        stop = bisect_left(self._pieces, end_s, key=lambda piece: piece[0])
        for from_s, to_s, what, call in self._pieces[first:stop]:
            yield max(from_s, begin_s), min(to_s, end_s), what, call

    def no_core_s(self, moments: Sequence[float]) -> float:
        """How long the main thread was ready and had no core, from each first to second moment."""
        waited = [self._no_core_until(moment_s) for moment_s in moments]
        return sum(waited[1::2]) - sum(waited[::2])

    def _no_core_until(self, moment_s: float) -> float:
        at = bisect_right(self._no_core, (moment_s, float("inf")))
        (begin_s, before), (end_s, after) = (self._no_core[at - 1 : at + 1] * 2)[:2]
        return before + (after - before) * (moment_s - begin_s) / max(end_s - begin_s, 1e-9)

    def _find_steps(self) -> tuple[str, list[float]]:
        found = find_steps([call.key() for call in self.calls])
        ends = [*(call.begin_s for call in self.calls), max(call.end_s for call in self.calls)]
        return ("calls", [ends[at] for at in found]) if found else ("", [ends[0], ends[-1]])

    def _divide(self, blocked: Sequence[Span]) -> Iterator[tuple[float, float, str, StepCall]]:
        for span in blocked:
            for from_s, to_s, call in self._owners(*span):
                lost_s = min(max(call.last_s, from_s), to_s)
                yield from_s, lost_s, "lost", call
                yield lost_s, to_s, "exposed", call
        for begin_s, end_s in _union(call[:2] for call in self.calls):
            first = bisect_right(blocked, begin_s, key=lambda span: span[1])
            for at in range(first, len(blocked) + 1):
                from_s, to_s = blocked[at] if at < len(blocked) else (end_s, end_s)
                yield from (
                    (*part[:2], "hidden", part[2])
                    for part in self._owners(begin_s, min(from_s, end_s))
                )
                begin_s = to_s
                if begin_s >= end_s:
                    break

    def _owners(self, begin_s: float, end_s: float) -> Iterator[tuple[float, float, StepCall]]:
        """The parts of a span, and the call that each belongs to; none without calls. To wake up
        after the last call belongs to it."""
        order = sorted(self.between(begin_s, end_s), key=lambda call: call.end_s)
        for call in order:
            to_s = end_s if call is order[-1] else min(call.end_s, end_s)
            if to_s > begin_s:
                yield begin_s, to_s, call
                begin_s = to_s


class _Shares:
    """Seconds of one step, or of one kind of calls."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.lost_to: Counter[int] = Counter()

    def add(self, what: str, seconds: float, call: StepCall) -> None:
        self.times[what] += seconds  # type: ignore[assignment]
        if what == "lost":
            self.lost_to[call.last] += seconds  # type: ignore[assignment]

    def of(self, steps: int = 1) -> tuple[float, float, float, int]:
        """Hidden, exposed, lost and to which rank, in each of so many steps."""
        hidden_s, exposed_s, lost_s = (self.times[name] / steps for name in _PARTS)
        return hidden_s, exposed_s + lost_s, lost_s, _most(self.lost_to)


_PARTS = "hidden", "exposed", "lost"


def build_profile(
    groups: Iterable[GroupRecords],
    notes: Mapping[Process, Sequence[WaitNote]],
    since_s: float = 0.0,
) -> Profile:
    """The profile of a job: its records, and the notes of its processes, `since_s`. Ranks without
    notes are left out, but others may wait for them."""
    from unisono.watch.profile_views import advise

    ranks = list(_ranks(with_creations(groups), notes, since_s))
    steps: list[StepProfile] = []
    kinds: dict[tuple[str, str, str, int, str, bool], _Shares] = {}
    for rank in ranks:
        for number, (begin_s, end_s) in enumerate(pairwise(rank.ends)):
            whole, wall_s = _Shares(), end_s - begin_s
            moments = [begin_s, end_s]
            for from_s, to_s, what, call in rank.pieces(begin_s, end_s):
                for shares in (whole, kinds.setdefault(call.key(), _Shares())):
                    shares.add(what, to_s - from_s, call)
                if what != "hidden":
                    moments += to_s, from_s
            for call in rank.between(begin_s, end_s):
                if call.begin_s >= begin_s:
                    shares = kinds.setdefault(call.key(), _Shares())
                    shares.add("count", 1, call)
                    shares.add("duration", call.end_s - call.begin_s, call)
            own = whole.of()
            no_core_s = rank.no_core_s(moments)
            times = begin_s, wall_s, wall_s - own[1], no_core_s
            steps.append(StepProfile(rank.rank, number, *times, *own))
    calls = []
    for key, shares in kinds.items():
        count, duration_s = (shares.times[name] / len(steps) for name in ("count", "duration"))
        calls.append(CallProfile(*key, count, duration_s, *shares.of(len(steps))))
    calls.sort(key=lambda call: -call.exposed_s)
    typical = tuple(_median([s for s in steps if s.rank == rank.rank]) for rank in ranks)
    return Profile(
        next((rank.steps_from for rank in ranks), ""),
        typical,
        tuple(calls),
        tuple(advise(ranks, typical, calls)),
        tuple(steps),
        tuple(_timeline(ranks, steps)),
    )


def _ranks(
    groups: Sequence[GroupRecords],
    notes: Mapping[Process, Sequence[WaitNote]],
    since_s: float,
) -> Iterator[RankCalls]:
    calls: dict[tuple[int, Process], list[StepCall]] = {}
    left = {
        process: sorted((note.begin_s, note.end_s) for note in own if note.kind == LEFT_RUNNING)
        for process, own in notes.items()
    }
    for group in groups:
        came: dict[int, list[tuple[float, int]]] = {}
        for member in group.ranks:
            for record in member.records:
                arrival = record.arrived_s, member.global_rank
                came.setdefault(record.call or 0, []).append(arrival)
        for member in group.ranks if group.backend != CREATIONS else ():
            own = calls.setdefault((member.global_rank, member.process), [])
            for record in member.records:
                if record.ended_s is None:
                    continue
                arrivals = came[record.call or 0]
                is_whole = bool(record.call) and len(arrivals) == group.size
                last = max(arrivals) if is_whole else (0.0, member.global_rank)
                is_blocking = (
                    record.thread == _MAIN_THREAD
                    and "nccl" not in group.backend
                    and not _is_within(record.arrived_s, left.get(member.process, []))
                )
                span = record.arrived_s, record.ended_s
                own.append(StepCall(*span, *last, is_blocking, record, group))
    for (rank, process), own in sorted(calls.items()):
        own = [call for call in own if call.end_s >= since_s]
        if own and process in notes:
            yield RankCalls(rank, own, [note for note in notes[process] if note.end_s >= since_s])


def _median(steps: Sequence[StepProfile]) -> StepProfile:
    lost_to: Counter[int] = Counter()
    for step in steps:
        lost_to[step.lost_to] += step.lost_s  # type: ignore[assignment]
    names = [name for name in vars(steps[0]) if name.endswith("_s") and name != "begin_s"]
    medians = {name: statistics.median(getattr(step, name) for step in steps) for name in names}
    return replace(steps[0], step=len(steps), lost_to=_most(lost_to), **medians)


def _timeline(ranks: Sequence[RankCalls], steps: Sequence[StepProfile]) -> Iterator[Piece]:
    """The step of median length of the lowest rank, on all ranks."""
    own = sorted((s for s in steps if s.rank == steps[0].rank), key=lambda step: step.wall_s)
    if not own:
        return
    begin_s, wall_s = own[len(own) // 2].begin_s, own[len(own) // 2].wall_s
    for rank in ranks:
        for from_s, to_s, what, call in rank.pieces(begin_s, begin_s + wall_s):
            record = call.record
            name = f"{record.operation}, {record.bytes:,} bytes, {line_of(record.site)}"
            yield Piece(rank.rank, what, name, from_s - begin_s, to_s - begin_s)


def _most(times: Counter[int]) -> int:
    return times.most_common(1)[0][0] if times.total() > 0 else -1


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same moments, as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if found and begin_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        elif begin_s < end_s:
            found.append((begin_s, end_s))
    return found


def _is_within(moment_s: float, spans: Sequence[Span]) -> bool:
    """Whether a moment is in one of the spans, which are in order."""
    at = bisect_right(spans, (moment_s, float("inf"))) - 1
    return at >= 0 and spans[at][1] >= moment_s
