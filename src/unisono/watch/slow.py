"""A slow rank: one for which the others wait, for how long, and where it is meanwhile.

What counts is the time from the second to last arrival to the last: only the last rank is to blame
for that, and not for the time in which it waited for messages itself, as in a pipeline. A rank that
is last in one call of each step is slow, however many calls a step has: so steps are counted, those
of the program, or those found in its calls. One long wait (a checkpoint, a compilation) does not
make a slow rank; a wait in most steps does. Python's garbage collection may make another rank late
in each step: all ranks tell when they collected.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from unisono.comm.shared_memory.records import GroupRecords, RankRecords
from unisono.errors import name_ranks
from unisono.watch.calls import by_number, find_member, line_of, waits
from unisono.watch.garbage import collections_of
from unisono.watch.job_view import own_host
from unisono.watch.report import Report, add_history, with_global
from unisono.watch.steps import find_steps
from unisono.watch.whereabouts import GIL, Ask

_CALLS = 20
_FEW_CALLS = 5
"""After so many it is asked where the slow rank is, though it is not reported yet."""
_KEPT = 2000
_SHARE = 0.1
"""The least share of the time in which all others wait for one rank."""
_MOST = 0.6
"""The least share of the steps in which they do; of the wait, if garbage collection caused it."""
_LATE_S = 0.0005
_COLLECT_TOGETHER = "gc.freeze() after the start, or gc.collect() on all ranks at the same step"
_ASK_S = 0.6  # a process that has just answered would say the same again


@dataclass(frozen=True)
class _Call:
    """For how long all others waited for the `last` rank, and how much of it that collected."""

    kind: tuple[object, ...]
    step: int
    last: int
    wait_s: float
    collecting_s: float


@dataclass(frozen=True)
class _Slow:
    """A slow rank: in how many of the steps (or calls) it is, and what it costs in each."""

    member: RankRecords
    lates: str
    step_s: float
    unit: str


class Slowness:
    """What the lowest rank of a group knows about it. Of many calls only the newest are looked
    at."""

    def __init__(self) -> None:
        self.seen_s = 0.0
        self.told_s = 0.0  # how much had been seen at the report
        self.host = ""  # of the slow rank, in a job over several
        self.places: Counter[str] = Counter()  # where it was seen
        self._seen = 0
        self._until_s = 0.0
        self._came_s = 0.0  # the last rank to the last call: others may have begun the next before
        self._calls: deque[_Call] = deque(maxlen=_KEPT)
        self._waited_s: Counter[int] = Counter()
        self._collecting_s = 0.0
        self._phases: Counter[str] = Counter()
        self._ask_again_s = 0.0
        self._asked: int | None = None
        self._slow_now: _Slow | None = None
        self._new = 0  # calls since then

    def look(self, group: GroupRecords, ask: Ask) -> None:
        """Add the calls that have finished since the last look, and, if a slow rank is awaited,
        where it is now."""
        collected: dict[int, list[tuple[float, float]]] = {}
        for number, records in by_number(group, self._seen).items():
            ends = [record.ended_s for record in records.values()]
            if len(records) < group.size or None in ends:
                continue
            arrivals = sorted((record.arrived_s, rank) for rank, record in records.items())
            since_s = max(arrivals[-2][0], self._came_s)
            self._came_s, last = arrivals[-1]
            member, first = find_member(group, last), records[arrivals[0][1]]
            gap_s = self._came_s - since_s - _received_s(member, self._until_s, self._came_s)
            end_s = max(end for end in ends if end is not None)
            self.seen_s += end_s - max(self._until_s, arrivals[0][0])
            self._seen, self._until_s = number, end_s
            collecting_s = 0.0
            if gap_s > _LATE_S and member is not None:
                if last not in collected and member.host in ("", own_host()):
                    collected[last] = [c for c in collections_of(member.pid) if c[1] > since_s]
                collecting_s = min(gap_s, _within(collected.get(last, ()), since_s, self._came_s))
                self._waited_s[last] += gap_s  # type: ignore[assignment]
                self._collecting_s += collecting_s
            kind = line_of(first.site), first.operation, first.bytes
            self._new += 1
            self._calls.append(_Call(kind, first.step, last, max(0.0, gap_s), collecting_s))
        if 3 * self._new > len(self._calls):  # to find the steps of many calls takes a while
            self._new, self._slow_now = 0, self._slow(group, _FEW_CALLS)
        slow = self._slow_now
        if slow is not None and slow.member.rank != self._asked:
            self._asked = slow.member.rank
            self.places.clear()
            self._phases.clear()
        self.host = "" if slow is None else slow.member.host
        own = group.ranks[0]
        is_awaited = bool(waits([group], own.process)) or (
            slow is not None and slow.member.rank == own.rank
        )
        if slow is not None and is_awaited and time.monotonic() > self._ask_again_s:
            where = ask(slow.member.process)
            if where.location or where.doing:  # else another host has not been asked yet
                self._ask_again_s = time.monotonic() + _ASK_S
            if not where.in_call and where.location:
                doing = f", in {where.doing}" if where.doing else ""
                self.places[f"{line_of(where.location)}{doing}"] += 1
                self._phases[where.phase] += 1

    def _steps(self) -> tuple[str, list[Counter[int]]]:
        """What a step is, and for each how long the others waited in it for each rank."""
        calls, unit = [*self._calls], "step"
        if len({call.step for call in calls}) > 1:
            parts = [[*part] for _, part in groupby(calls, key=lambda call: call.step)]
        elif (starts := find_steps([call.kind for call in calls])).step > 1:
            parts = [calls[begin:end] for begin, end in pairwise(starts)]
        else:
            unit, parts = "call", [[call] for call in calls]
        waits_s: list[Counter[int]] = []
        for part in parts:
            waits_s.append(Counter())
            for call in part:
                waits_s[-1][call.last] += call.wait_s  # type: ignore[assignment]
        return unit, waits_s

    def _slow(self, group: GroupRecords, calls: int = _CALLS) -> _Slow | None:
        """The rank for which the others wait, by at least this many calls."""
        if len(self._calls) < calls:
            return None
        for rank, waited_s in self._waited_s.most_common(1):
            if waited_s > _SHARE * self.seen_s:
                unit, steps = self._steps()
                lates = sum(step[rank] > max(_LATE_S, step.total() / 2) for step in steps)
                member = find_member(group, rank)
                if member is not None and lates > _MOST * len(steps):
                    step_s = sum(step[rank] for step in steps) / len(steps)
                    return _Slow(member, f"{lates} of {len(steps)} {unit}s", step_s, unit)
        return None

    def report(self, group: GroupRecords) -> Report | None:
        """The slow rank, if there is one: what it costs, and where it was seen most often; or that
        garbage collection makes one rank late after the other."""
        slow, waited_s = self._slow(group), self._waited_s
        if slow is None:
            return self._of_collections(group)
        rank, total_s = slow.member, waited_s[slow.member.rank]
        on = f" on {rank.host}" if rank.host else ""
        verdict = (
            f"rank {rank.global_rank}{on} is slow: all others waited for it in {slow.lates} "
            f"of group {group.name}, {slow.step_s * 1e3:.3g} ms per {slow.unit}, "
            f"{total_s:.3g} of {self.seen_s:.3g} s ({total_s / self.seen_s:.0%})"
        )
        site = ""
        if self._collecting_s > _MOST * waited_s.total():
            verdict += f"; {self._collecting_s / waited_s.total():.0%} of that it collected garbage"
        seen = sorted(self.places.most_common(), key=lambda place: not place[0].endswith(GIL))
        for place, times in seen[:1]:  # beside such a thread, other lines only wait
            site = place.partition(",")[0]
            verdict += f"; {times} of {self.places.total()} times it was in {place}"
            phase = self._phases.most_common(1)[0][0]
            verdict += f" (phase: {phase})" if phase else ""
        return _report(group, verdict, (rank.rank,), site)

    def _of_collections(self, group: GroupRecords) -> Report | None:
        """Garbage collection that makes another rank late in each step."""
        total_s = self._collecting_s
        is_much = total_s > max(_SHARE * self.seen_s, _MOST * self._waited_s.total())
        if len(self._calls) < _CALLS or not is_much:
            return None
        ranks = sorted({call.last for call in self._calls if call.collecting_s > _LATE_S})
        unit, steps = self._steps()
        verdict = (
            f"garbage collection makes {name_ranks(ranks)} of group {group.name} late in turn: all "
            f"others waited {total_s / len(steps) * 1e3:.3g} ms per {unit} for one that collected, "
            f"{total_s:.3g} of {self.seen_s:.3g} s ({total_s / self.seen_s:.0%})"
        )
        return _report(group, with_global(group, verdict), ranks, "", (_COLLECT_TOGETHER,))


def _report(
    group: GroupRecords,
    verdict: str,
    culprits: Sequence[int],
    site: str,
    details: tuple[str, ...] = (),
) -> Report:
    name, backend, who = group.name, group.backend, tuple(culprits)
    report = Report("slow", verdict, name, backend, culprits=who, site=site, details=details)
    return add_history(report, [group])


def _within(spans: Sequence[tuple[float, float]], since_s: float, until_s: float) -> float:
    """How much of these spans is between two moments."""
    return sum(max(0.0, min(end, until_s) - max(begin, since_s)) for begin, end in spans)


def _received_s(member: RankRecords | None, since_s: float, until_s: float) -> float:
    """How long a rank waited for messages between two moments."""
    records = member.records if member is not None else ()
    received = [record for record in records if record.operation == "recv"]
    spans = [(record.arrived_s, record.ended_s or until_s) for record in received]
    return _within(spans, since_s, until_s)
