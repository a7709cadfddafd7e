"""Snapshots: the records of all groups that hang together, read at one moment."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.comm.shared_memory.records import GroupRecords, read_process
from unisono.errors import UnisonoError


def snapshot(pids: Iterable[int], last: int | None = None) -> list[GroupRecords]:
    """The groups of these processes, and those of their peers, and so on: whoever may have a part
    in a hang. `last` is how many records of each rank."""
    groups: dict[tuple[int, int], GroupRecords] = {}
    todo, seen = list(pids), set()
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            found = read_process(pid, last)
        except UnisonoError:
            continue  # it has ended, or lives where we cannot see it
        for group in found:
            if group.segment not in groups:
                groups[group.segment] = group
                todo += [member.pid for member in group.ranks if member.pid not in seen]
    return list(groups.values())
