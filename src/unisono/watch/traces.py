"""Traces: the calls of all ranks on one clock, in the format of Chrome and Perfetto.

A process of the trace is a rank, a thread of it a group. Records live in rings of a thousand, so
rank 0 of each group reads them while the program runs, and writes the file when it ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.comm.records import GroupRecords, Record, read_process
from unisono.errors import UnisonoError
from unisono.watch.calls import reached

Key = tuple[tuple[int, int], int, int]


class Trace:
    """Collects the records of the groups in which this process is rank 0."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._records: dict[Key, Record] = {}
        self._before: set[Key] = set()
        self._groups: dict[tuple[int, int], GroupRecords] = {}
        self._lock = threading.Lock()
        if not self._path.absolute().parent.is_dir():
            raise UnisonoError(f"the folder of {self._path} does not exist")

    def collect(self, only_note: bool = False) -> None:
        """Read what is new; with `only_note` remember it as what was there before."""
        me = os.getpid()
        with self._lock:
            for group in read_process(me):
                if any(one.rank == 0 and one.pid == me for one in group.ranks):
                    if only_note:
                        self._note(group)
                    else:
                        self.add([group])

    def _note(self, group: GroupRecords) -> None:
        """Others may be in the next call already, which is not over before we come to it."""
        done = max(reached(one) for one in group.ranks if one.pid == os.getpid())
        for one in group.ranks:
            for record in one.records:
                over = record.call <= done if record.call is not None else bool(record.ended_s)
                if over:
                    self._before.add((group.segment, one.rank, record.number))

    def add(self, groups: Iterable[GroupRecords]) -> None:
        """Take over the records of these groups."""
        for group in groups:
            self._groups[group.segment] = group
            for one in group.ranks:
                for record in one.records:
                    key = group.segment, one.rank, record.number
                    if key not in self._before:
                        self._records[key] = record

    def write(self) -> None:
        """Write the file, if there is anything in it that is ours to tell."""
        with self._lock:
            events = list(self._events()) if self._records else []
        if not events:
            return
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        self._path.write_text(text, encoding="utf-8")

    def _events(self) -> Iterable[dict[str, Any]]:
        arrivals: dict[tuple[tuple[int, int], int], list[float]] = {}
        for (segment, _, _), record in self._records.items():
            if record.call is not None:
                arrivals.setdefault((segment, record.call), []).append(record.arrived_s)
        used = {segment for segment, _, _ in self._records}
        groups = {segment: group for segment, group in self._groups.items() if segment in used}
        rows = {segment: row for row, segment in enumerate(groups)}
        for segment, group in groups.items():
            for one in group.ranks:
                place = {"ph": "M", "pid": one.global_rank, "tid": rows[segment]}
                title = f"rank {one.global_rank} (pid {one.pid})"
                yield place | {"name": "process_name", "args": {"name": title}}
                name = f"{group.name} ({group.backend})"
                yield place | {"name": "thread_name", "args": {"name": name}}
        members = {
            (segment, one.rank): one.global_rank
            for segment, group in groups.items()
            for one in group.ranks
        }
        for (segment, rank, _), record in sorted(
            self._records.items(), key=lambda item: item[1].arrived_s
        ):
            if record.ended_s is None:
                continue
            came = arrivals.get((segment, record.call or 0), [record.arrived_s])
            yield {
                "ph": "X",
                "name": record.operation,
                "cat": self._groups[segment].backend,
                "pid": members[segment, rank],
                "tid": rows[segment],
                "ts": record.arrived_s * 1e6,
                "dur": (record.ended_s - record.arrived_s) * 1e6,
                "args": {
                    "call": record.call,
                    "bytes": record.bytes,
                    "dtype": record.dtype,
                    "site": record.site,
                    "late_us": (record.arrived_s - min(came)) * 1e6,
                    "skew_us": (max(came) - min(came)) * 1e6,
                },
            }
