"""Traces: the calls of all ranks on one clock, in the format of Chrome and Perfetto.

A process of the trace is a rank, a thread of it a group, or its steps. Arrows lead from the last
rank of a call to those that waited; counters show the bytes in flight.

Records are in rings of a thousand, so they are read while the program runs, and again at its end,
also those of closed groups.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unisono.comm.shared_memory.record_reader import RecordFollower
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.errors import UnisonoError
from unisono.watch.host_traces import HostTraces, TracePart

Key = tuple[tuple[int, int], int, int]
_logger = logging.getLogger("unisono")


class Trace:
    """Follows groups and collects their records. Calls that finished before the trace started do
    not count, unless `from_the_start`."""

    def __init__(self, path: str | os.PathLike[str], *, from_the_start: bool = False) -> None:
        self.path = Path(path).absolute()
        self._from_the_start = from_the_start
        self._begin_s = time.monotonic()
        self._records: dict[Key, Record] = {}
        self._before: set[Key] = set()
        self._groups: dict[tuple[int, int], GroupRecords] = {}
        self._dropped: dict[tuple[tuple[int, int], int], int] = {}
        self._followers: dict[tuple[int, int], RecordFollower] = {}
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
                self._note(follower)

    def _note(self, follower: RecordFollower) -> None:
        """Remember finished calls. Others may already be in the next call, which cannot finish
        before we reach it."""
        found = follower.read()
        mine = {member.rank for member in follower.group().ranks if member.pid == os.getpid()}
        done = max((record.call or 0 for rank, record in found if rank in mine), default=0)
        for rank, record in found:
            over = record.call <= done if record.call is not None else bool(record.ended_s)
            if over:
                self._before.add((follower.segment, rank, record.number))
            else:
                self._records[follower.segment, rank, record.number] = record
        follower.forget_dropped()

    def collect(self, to_the_end: bool = False) -> None:
        """Read new records. A group that all ranks have left is dropped."""
        with self._lock:
            for segment, follower in list(self._followers.items()):
                left = follower.is_left()
                found = follower.read(to_the_end or left)
                for rank, record in found:
                    key = segment, rank, record.number
                    if key not in self._before and not self._is_from_before(record):
                        self._records[key] = record
                if found or segment not in self._groups:
                    group = follower.group()
                    if group.ranks:  # otherwise no rank is visible there
                        self._groups[segment] = group
                for rank, count in follower.dropped().items():
                    self._dropped[segment, rank] = count
                if left:
                    follower.close()
                    del self._followers[segment]

    def _is_from_before(self, record: Record) -> bool:
        """For groups without this rank, which are found late."""
        over = record.ended_s is not None and record.ended_s < self._begin_s
        return over and not self._from_the_start

    def settle(self, within_s: float) -> None:
        """Read until the calls that we have finished have finished on the other ranks, too."""
        end = time.monotonic() + within_s
        while True:
            self.collect()
            done: dict[tuple[int, int], int] = {}
            mine = {
                (segment, member.rank)
                for segment, group in self._groups.items()
                for member in group.ranks
                if member.pid == os.getpid()
            }
            for (segment, rank, _), record in self._records.items():
                if (segment, rank) in mine and record.ended_s is not None:
                    done[segment] = max(done.get(segment, 0), record.call or 0)
            under_way = [
                record
                for (segment, _, _), record in self._records.items()
                if record.ended_s is None and (record.call or 0) <= done.get(segment, -1)
            ]
            if not under_way or time.monotonic() > end:
                return
            time.sleep(0.001)

    def is_ours(self) -> bool:
        """Whether this process writes it: it has the lowest rank in all groups that it follows."""
        ranks = {
            (member.global_rank, member.pid)
            for group in self._groups.values()
            for member in group.ranks
        }
        return not ranks or min(ranks)[1] == os.getpid()

    def peers(self) -> list[int]:
        """The processes of the other ranks of the followed groups."""
        pids = {member.pid for group in self._groups.values() for member in group.ranks}
        return sorted(pids - {os.getpid()})

    def send(self, hosts: HostTraces) -> bool:
        """Read what is left and send it to the host that writes; returns whether it was
        accepted."""
        self.collect(to_the_end=True)
        segments = list(self._groups)
        numbers = {segment: number for number, segment in enumerate(segments)}
        records = [
            (numbers[segment], rank, record) for (segment, rank, _), record in self._records.items()
        ]
        groups = [self._groups[segment] for segment in segments]
        return hosts.send(groups, records, sum(self._dropped.values()))

    def add(self, part: TracePart) -> None:
        """Add another host's part, by our clock."""
        for number, group in enumerate(part.groups):
            segment = -1 - part.number, number
            self._groups[segment] = group
            if part.dropped and not number:
                self._dropped[segment, 0] = part.dropped
        for at, (number, rank, record) in enumerate(part.records):
            key = (-1 - part.number, number), rank, at
            self._records[key] = record
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
        lost = sum(self._dropped.values())
        unix_us = (time.time() - time.monotonic()) * 1e6
        other: dict[str, Any] = {"dropped_calls": lost, "unix_us": unix_us}
        if self._clocks:
            other["clocks_of_hosts"] = self._clocks
        if missing_hosts:
            other["missing_hosts"] = list(missing_hosts)
        for (segment, rank), count in self._dropped.items():
            group = self._groups[segment]
            other[f"dropped of rank {rank} of group {group.name}"] = count
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})
        self.path.write_text(text, encoding="utf-8")
        if lost:
            _logger.warning(
                "unisono: %s lacks %d calls: more than a thousand were made between two reads, "
                "which is the size of the ring of records",
                self.path.name,
                lost,
            )
        self.close()

    def _events(self) -> Iterable[dict[str, Any]]:
        arrivals: dict[tuple[tuple[int, int], int], list[float]] = {}
        whole = {segment: group.segment for segment, group in self._groups.items()}
        for (segment, _, _), record in self._records.items():
            if record.call is not None:
                arrivals.setdefault((whole[segment], record.call), []).append(record.arrived_s)
        used = {segment for segment, _, _ in self._records}
        groups = {segment: group for segment, group in self._groups.items() if segment in used}
        numbers = {name: row for row, name in enumerate(dict.fromkeys(map(whole.get, groups)))}
        rows = {segment: numbers[whole[segment]] for segment in groups}
        for segment, group in groups.items():
            for member in group.ranks:
                row = {"ph": "M", "pid": member.global_rank, "tid": rows[segment]}
                on = f" on {member.host}" if member.host else ""
                title = f"rank {member.global_rank} (pid {member.pid}{on})"
                yield row | {"name": "process_name", "args": {"name": title}}
                name = f"{group.name} ({group.backend})"
                yield row | {"name": "thread_name", "args": {"name": name}}
        members = {
            (segment, member.rank): member.global_rank
            for segment, group in groups.items()
            for member in group.ranks
        }
        now_s = time.monotonic()
        ordered = sorted(self._records.items(), key=lambda item: item[1].arrived_s)
        calls: dict[tuple[tuple[int, int], int], list[dict[str, Any]]] = {}
        steps: dict[tuple[int, int], list[float]] = {}
        changes: list[tuple[float, int, int]] = []
        for (segment, rank, _), record in ordered:
            came = arrivals.get((whole[segment], record.call or 0), [record.arrived_s])
            ended_s = now_s if record.ended_s is None else record.ended_s
            pid = members[segment, rank]
            row = {"pid": pid, "tid": rows[segment]}
            calls.setdefault((whole[segment], record.call or 0), []).append(row)
            changes += (record.arrived_s, pid, record.bytes), (ended_s, pid, -record.bytes)
            if record.step:
                steps.setdefault((pid, record.step), []).extend((record.arrived_s, ended_s))
            yield row | {
                "ph": "X",
                "name": record.operation,
                "cat": self._groups[segment].backend,
                "ts": record.arrived_s * 1e6,
                "dur": (ended_s - record.arrived_s) * 1e6,
                "args": {
                    "call": record.call,
                    "bytes": record.bytes,
                    "dtype": record.dtype,
                    "site": record.site,
                    "step": record.step,
                    "state": record.state,
                    "late_us": (record.arrived_s - min(came)) * 1e6,
                    "skew_us": (max(came) - min(came)) * 1e6,
                },
            }
        yield from _arrows(calls, arrivals)
        yield from _counters(changes)
        for (pid, step), times in steps.items():
            row = {"pid": pid, "tid": len(numbers)}
            yield row | {"ph": "M", "name": "thread_name", "args": {"name": "steps"}}
            begin_s, dur_us = min(times), (max(times) - min(times)) * 1e6
            named = {"name": f"step {step}", "cat": "step", "args": {}}
            yield row | named | {"ph": "X", "ts": begin_s * 1e6, "dur": dur_us}


def _arrows(
    calls: dict[tuple[tuple[int, int], int], list[dict[str, Any]]],
    arrivals: dict[tuple[tuple[int, int], int], list[float]],
) -> Iterable[dict[str, Any]]:
    """From the last rank of a call, the last of its rows, to all others in it."""
    number = 0
    for key, (*waiting, last) in calls.items():
        for row in waiting if key[1] else ():
            number += 1
            flow = {"name": "waited for", "cat": "flow", "id": number, "args": {}}
            flow["ts"] = max(arrivals[key]) * 1e6
            yield last | flow | {"ph": "s"}
            yield row | flow | {"ph": "f", "bp": "e"}


def _counters(changes: list[tuple[float, int, int]]) -> Iterable[dict[str, Any]]:
    """The bytes of the calls that each rank is in."""
    bytes_of: Counter[int] = Counter()
    for at_s, pid, change in sorted(changes):
        bytes_of[pid] += change
        row = {"name": "bytes in flight", "pid": pid, "tid": 0, "ts": at_s * 1e6}
        yield row | {"ph": "C", "args": {"bytes": bytes_of[pid]}}
