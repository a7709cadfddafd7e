"""A slow rank: one for which the others wait, for how long, and where it is meanwhile.

What counts is the time from the second to last arrival to the last: only the last rank is to blame
for that, and not for the time in which it waited for messages itself, as in a pipeline. One long
wait (a checkpoint, a compilation) does not make a slow rank; a wait in most calls does.
"""

from __future__ import annotations

import time
from collections import Counter

from unisono.comm.shared_memory.records import GroupRecords, RankRecords
from unisono.watch.calls import by_number, find_member, line_of, waits
from unisono.watch.report import Report, add_history
from unisono.watch.whereabouts import Ask

_CALLS = 20
_FEW_CALLS = 5
"""After so many it is asked where the slow rank is, though it is not reported yet."""
_SHARE = 0.1
"""The least share of the time in which all others wait for one rank."""
_MOST = 0.6
"""The least share of the calls in which it is the last."""
_LATE_S = 0.0005
_ASK_S = 0.6  # a process that has just answered would say the same again


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
        self._calls = 0
        self._steps: set[int] = set()
        self._lates: Counter[int] = Counter()
        self._waited_s: Counter[int] = Counter()
        self._phases: Counter[str] = Counter()
        self._ask_again_s = 0.0
        self._asked: int | None = None

    def look(self, group: GroupRecords, ask: Ask) -> None:
        """Add the calls that have finished since the last look, and, if a slow rank is awaited,
        where it is now."""
        for number, records in by_number(group, self._seen).items():
            ends = [record.ended_s for record in records.values()]
            if len(records) < group.size or None in ends:
                continue
            arrivals = sorted((record.arrived_s, rank) for rank, record in records.items())
            gap_s = arrivals[-1][0] - max(arrivals[-2][0], self._came_s)
            self._came_s, last = arrivals[-1]
            gap_s -= _received_s(find_member(group, last), self._until_s, self._came_s)
            end_s = max(end for end in ends if end is not None)
            self.seen_s += end_s - max(self._until_s, arrivals[0][0])
            self._seen, self._until_s = number, end_s
            self._calls += 1
            self._steps.add(records[arrivals[0][1]].step)
            if gap_s > _LATE_S:
                self._lates[last] += 1
                self._waited_s[last] += gap_s  # type: ignore[assignment]
        slow = self._slow(group, _FEW_CALLS)
        if slow is not None and slow.rank != self._asked:
            self._asked = slow.rank
            self.places.clear()
            self._phases.clear()
        self.host = "" if slow is None else slow.host
        own = group.ranks[0]
        is_awaited = bool(waits([group], own.process)) or slow is own
        if slow is not None and is_awaited and time.monotonic() > self._ask_again_s:
            where = ask(slow.process)
            if where.location or where.doing:  # else another host has not been asked yet
                self._ask_again_s = time.monotonic() + _ASK_S
            if not where.in_call and where.location:
                doing = f", in {where.doing}" if where.doing else ""
                self.places[f"{line_of(where.location)}{doing}"] += 1
                self._phases[where.phase] += 1

    def _slow(self, group: GroupRecords, calls: int = _CALLS) -> RankRecords | None:
        """The rank for which the others wait, by at least this many calls."""
        for rank, waited_s in self._waited_s.most_common(1):
            is_often = self._lates[rank] > _MOST * self._calls
            if self._calls >= calls and is_often and waited_s > _SHARE * self.seen_s:
                return find_member(group, rank)
        return None

    def report(self, group: GroupRecords) -> Report | None:
        """The slow rank, if there is one: what it costs, and where it was seen most often."""
        member = self._slow(group)
        if member is None:
            return None
        waited_s, lates = self._waited_s[member.rank], self._lates[member.rank]
        on = f" on {member.host}" if member.host else ""
        unit, count = ("step", len(self._steps)) if len(self._steps) > 1 else ("call", self._calls)
        verdict = (
            f"rank {member.global_rank}{on} is slow: all others waited for it in {lates} of "
            f"{self._calls} calls of group {group.name}, {waited_s / count * 1e3:.3g} ms per {unit}"
            f", {waited_s:.3g} of {self.seen_s:.3g} s ({waited_s / self.seen_s:.0%})"
        )
        site = ""
        for place, times in self.places.most_common(1):
            site = place.partition(",")[0]
            verdict += f"; {times} of {self.places.total()} times it was in {place}"
            phase = self._phases.most_common(1)[0][0]
            verdict += f" (phase: {phase})" if phase else ""
        report = Report(
            kind="slow",
            verdict=verdict,
            group=group.name,
            backend=group.backend,
            culprits=(member.rank,),
            site=site,
        )
        return add_history(report, [group])


def _received_s(member: RankRecords | None, since_s: float, until_s: float) -> float:
    """How long a rank waited for messages between two moments."""
    return sum(
        max(0.0, min(record.ended_s or until_s, until_s) - max(record.arrived_s, since_s))
        for record in (member.records if member is not None else ())
        if record.operation == "recv"
    )
