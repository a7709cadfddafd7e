"""Traces: the calls of all ranks on one clock, in the format of Chrome and Perfetto.

A process of the trace is a rank, a thread of it a group, or its steps. Arrows lead from the last
rank of a call to those that waited; counters show the bytes in flight.

Records are in rings of a thousand, so they are read while the program runs, and again at its end,
also those of closed groups.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.comm.shared_memory.record_reader import RecordFollower
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.errors import UnisonoError
from unisono.output_files import write_text
from unisono.processes import state_of

Segment = tuple[int, int]
_Call = tuple[dict[str, Any], Record, float]
"""A row of the trace, a rank's call in it, and when that ended, or now."""
_logger = logging.getLogger("unisono")


@dataclass(frozen=True)
class TracePart:
    """What the ranks of the `number`-th host did, by the first host's clock. Its own clock was
    `ahead_s` ahead, within `error_s`; both are None if they could not be compared."""

    host: str
    number: int
    ahead_s: float | None
    error_s: float | None
    dropped: int
    groups: tuple[GroupRecords, ...]
    """With their records; a group may be there several times, with some ranks or records each."""


class Trace:
    """Follows groups and collects their records. Calls that finished before the trace started do
    not count, unless `from_the_start`. `what` names its file, `written` says where that is."""

    what = "trace"

    def __init__(self, path: str | os.PathLike[str], *, from_the_start: bool = False) -> None:
        self.path = Path(path).absolute()
        self.written = f"the trace is in {self.path}; https://ui.perfetto.dev opens it"
        self._from_the_start = from_the_start
        self._begin_s, self._begin_unix_s = time.monotonic(), time.time()
        self._records: dict[tuple[Segment, int, int], Record] = {}
        self._since_s = 0.0  # all calls since then are there
        self._done: dict[Segment, int] = {}
        self._groups: dict[Segment, GroupRecords] = {}
        self._dropped: dict[Segment, int] = {}
        self._followers: dict[Segment, RecordFollower] = {}
        self._clocks: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if not self.path.parent.is_dir():
            raise UnisonoError(f"the folder of {path} does not exist")

    def follow(self, descriptor: int, is_new: bool = False) -> None:
        """Collect the records of one more group, once. If it `is_new` all its calls count."""
        follower = RecordFollower(descriptor)
        with self._lock:
            if follower.segment in self._followers:
                follower.close()
                return
            self._followers[follower.segment] = follower
            if not self._from_the_start and not is_new:
                found = follower.read()
                mine = {other.rank for other in follower.group().ranks if other.pid == os.getpid()}
                made = [record.call or 0 for rank, record in found if rank in mine]
                self._done[follower.segment] = max(made, default=0)
                self._keep(follower.segment, found)
                follower.forget_dropped()

    def _keep(self, segment: Segment, found: Iterable[tuple[int, Record]]) -> None:
        """Keep the calls that were not over when the trace started. Other ranks may have been in
        the next one, which cannot finish before we reach it."""
        for rank, record in found:
            is_done = record.call is not None and record.call <= self._done.get(segment, 0)
            is_over = record.ended_s is not None and record.ended_s < self._begin_s
            if self._from_the_start or not (is_done or is_over):
                self._records[segment, rank, record.number] = record

    def look(self) -> bool:
        """Do not miss what is written; returns whether to look again soon."""
        self.collect()
        return True

    def collect(self, to_the_end: bool = False, *, later: bool = False) -> bool:
        """Read new records, or only copy them to read them `later`; then it returns whether many
        are written. A group that all ranks have left is dropped."""
        are_many = False
        with self._lock:
            for segment, follower in list(self._followers.items()):
                left = follower.is_left()
                known = self._groups.get(segment)
                if later and not left and known is not None and len(known.ranks) == known.size:
                    are_many |= follower.copy()
                    continue
                found = follower.read(to_the_end or left)
                self._keep(segment, found)
                if found or segment not in self._groups:
                    group = follower.group()
                    if group.ranks:  # otherwise no rank is visible there
                        self._groups[segment] = group
                self._dropped[segment] = sum(follower.dropped().values())
                self._since_s = max(self._since_s, follower.complete_since_s())
                if left:
                    follower.close()
                    del self._followers[segment]
        return are_many

    def settle(self, within_s: float) -> None:
        """Read until the calls that we have finished have finished on the other ranks, too."""
        end = time.monotonic() + within_s
        while True:
            self.collect()
            mine = {
                (segment, member.rank)
                for segment, group in self._groups.items()
                for member in group.ranks
                if member.pid == os.getpid()
            }
            done: dict[Segment, int] = {}
            for (segment, rank, _), record in self._records.items():
                if (segment, rank) in mine and record.ended_s is not None:
                    done[segment] = max(done.get(segment, 0), record.call or 0)
            are_under_way = any(
                record.ended_s is None and (record.call or 0) <= done.get(segment, -1)
                for (segment, _, _), record in self._records.items()
            )
            if not are_under_way or time.monotonic() > end:
                return
            time.sleep(0.001)

    def is_ours(self) -> bool:
        """Whether this process writes it: it has the lowest rank in all groups that it follows, or
        all lower ones have ended and did not."""
        ranks = sorted({(m.global_rank, m.pid) for g in self._groups.values() for m in g.ranks})
        if not ranks or ranks[0][1] == os.getpid():
            return True
        lowest = next((pid for _, pid in ranks if not state_of(pid).has_ended), 0)
        is_written = self.path.exists() and self.path.stat().st_mtime > self._begin_unix_s
        return lowest == os.getpid() and not is_written

    def peers(self) -> list[int]:
        """The processes of the other ranks of the followed groups."""
        pids = {member.pid for group in self._groups.values() for member in group.ranks}
        return sorted(pids - {os.getpid()})

    def groups(self) -> list[GroupRecords]:
        """The groups, with the records that were collected."""
        made: dict[tuple[Segment, int], list[Record]] = {}
        for (segment, rank, _), record in self._records.items():
            made.setdefault((segment, rank), []).append(record)
        return [
            replace(
                group,
                ranks=tuple(
                    replace(member, records=tuple(made.get((segment, member.rank), ())))
                    for member in group.ranks
                ),
            )
            for segment, group in self._groups.items()
        ]

    def lost(self) -> int:
        """How many calls newer ones had overwritten before they were read."""
        return sum(self._dropped.values())

    def add(self, part: TracePart) -> None:
        """Add another host's part, by our clock."""
        for group in part.groups:
            segment = -1 - part.number, group.segment[1]
            before = self._groups[segment].ranks if segment in self._groups else ()
            self._groups[segment] = replace(group, ranks=(*before, *group.ranks))
            for member in group.ranks:
                for record in member.records:
                    self._records[segment, member.rank, record.number] = record
        self._dropped[-1 - part.number, 0] = part.dropped
        self._clocks[part.host] = {
            name: None if value_s is None else value_s * 1e6
            for name, value_s in (("ahead_us", part.ahead_s), ("error_us", part.error_s))
        }

    def close(self) -> None:
        """Stop following all groups."""
        with self._lock:
            for follower in self._followers.values():
                follower.close()
            self._followers.clear()

    def write(self, missing_hosts: Sequence[str] = ()) -> None:
        """Read what is left and write the file, even an empty one. Calls that were lost because
        more than a thousand came between two reads are counted in it and logged."""
        self.collect(to_the_end=True)
        events = list(self._events())
        lost = self.lost()
        unix_us = (time.time() - time.monotonic()) * 1e6
        other: dict[str, Any] = {"dropped_calls": lost, "unix_us": unix_us}
        if self._clocks:
            other["clocks_of_hosts"] = self._clocks
        if missing_hosts:
            other["missing_hosts"] = list(missing_hosts)
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})
        try:
            write_text(self.path, text)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, 0)  # half of it would look like a trace
            raise
        finally:
            self.close()
        if lost:
            _logger.warning(
                "unisono: %s lacks %d calls: more than a thousand were made between two reads, "
                "which is the size of the ring of records",
                self.path.name,
                lost,
            )

    def _events(self) -> Iterable[dict[str, Any]]:
        tids: dict[Segment, int] = {}  # the row of each group
        calls: dict[tuple[Segment, object], list[_Call]] = {}
        ranks = {
            (segment, member.rank): member.global_rank
            for segment, group in self._groups.items()
            for member in group.ranks
        }
        now_s = time.monotonic()
        ordered = sorted(self._records.items(), key=lambda item: item[1].arrived_s)
        for (segment, rank, _), record in ordered:
            group = self._groups[segment]
            tid = tids.setdefault(group.segment, len(tids))
            row = {"pid": ranks[segment, rank], "tid": tid, "cat": group.backend}
            ended_s = now_s if record.ended_s is None else record.ended_s
            key = group.segment, record.call or (segment, rank, record.number)  # a message is alone
            calls.setdefault(key, []).append((row, record, ended_s))
        for group in self._groups.values():
            for member in group.ranks if group.segment in tids else ():
                row = {"ph": "M", "pid": member.global_rank, "tid": tids[group.segment]}
                on = f" on {member.host}" if member.host else ""
                title = f"rank {member.global_rank} (pid {member.pid}{on})"
                yield row | {"name": "process_name", "args": {"name": title}}
                name = f"{group.name} ({group.backend})"
                yield row | {"name": "thread_name", "args": {"name": name}}
        for number, made in enumerate(calls.values()):
            yield from _ranks_in_call(made, number)
        everything = [call for made in calls.values() for call in made]
        yield from _counters(everything)
        yield from _steps(everything, tid=len(tids))


def _ranks_in_call(made: list[_Call], number: int) -> Iterable[dict[str, Any]]:
    """One call, in the order of the ranks' arrivals, with arrows from the last to all others."""
    first_s, last_s = made[0][1].arrived_s, made[-1][1].arrived_s
    for row, record, ended_s in made:
        yield row | {
            "ph": "X",
            "name": record.operation,
            "ts": record.arrived_s * 1e6,
            "dur": (ended_s - record.arrived_s) * 1e6,
            "args": {
                "call": record.call,
                "bytes": record.bytes,
                "dtype": record.dtype,
                "site": record.site,
                "step": record.step,
                "state": record.state,
                "late_us": (record.arrived_s - first_s) * 1e6,
                "skew_us": (last_s - first_s) * 1e6,
            },
        }
    for row, _, _ in made[:-1]:
        flow = {"name": "waited for", "cat": "flow", "args": {}, "ts": last_s * 1e6}
        flow["id"] = f"{number}-{row['pid']}"
        yield made[-1][0] | flow | {"ph": "s"}
        yield row | flow | {"ph": "f", "bp": "e"}


def _counters(calls: list[_Call]) -> Iterable[dict[str, Any]]:
    """The bytes of the calls that each rank is in."""
    changes = [(record.arrived_s, row["pid"], record.bytes) for row, record, _ in calls]
    changes += [(ended_s, row["pid"], -record.bytes) for row, record, ended_s in calls]
    bytes_of: Counter[int] = Counter()
    for at_s, pid, change in sorted(changes):
        bytes_of[pid] += change
        row = {"name": "bytes in flight", "pid": pid, "tid": 0, "ts": at_s * 1e6}
        yield row | {"ph": "C", "args": {"bytes": bytes_of[pid]}}


def _steps(calls: list[_Call], tid: int) -> Iterable[dict[str, Any]]:
    """From the beginning of the first call of a step to the end of its last one."""
    steps: dict[tuple[int, int], list[float]] = {}
    for row, record, ended_s in calls:
        if record.step:
            steps.setdefault((row["pid"], record.step), []).extend((record.arrived_s, ended_s))
    for (pid, step), times in steps.items():
        row = {"pid": pid, "tid": tid}
        yield row | {"ph": "M", "name": "thread_name", "args": {"name": "steps"}}
        begin_s, dur_us = min(times), (max(times) - min(times)) * 1e6
        named = {"name": f"step {step}", "cat": "step", "args": {}}
        yield row | named | {"ph": "X", "ts": begin_s * 1e6, "dur": dur_us}
