"""Calls in the records of all connected groups: which rank has reached which call, who waits, and
who is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.cases.primitives import primitive_of
from unisono.comm.on_rows.mismatches import describe_collective
from unisono.comm.shared_memory.group_parts import join_parts
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import UnisonoError, name_ranks

IN_FLIGHT = ("waiting", "moving")
PARTLY_HERE = " on this machine"
"""The suffix of a group's name if its other ranks are on other machines."""
CREATIONS = "torch"
"""The backend of the calls that make groups."""
MOST_MEMBERS = 64
"""In larger worlds the members of a new group are known only by a checksum."""


def snapshot(pids: Iterable[int], last: int | None = None) -> list[GroupRecords]:
    """The groups of these processes, of their peers, and so on: everything that may be part of a
    hang. `last` is the number of records of each rank."""
    groups: dict[tuple[tuple[int, int], tuple[int, ...]], GroupRecords] = {}
    todo, seen, read = list(pids), set(), set[tuple[int, int]]()
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            found = with_creations(read_process(pid, last, read))
        except UnisonoError:
            continue  # it has ended, or is not visible here
        for group in found:
            here = tuple(member.pid for member in group.ranks)
            if (group.segment, here) not in groups:
                groups[group.segment, here] = group
                todo += [pid for pid in here if pid not in seen]
    return join_parts(groups.values())


def with_creations(groups: Iterable[GroupRecords]) -> list[GroupRecords]:
    """Takes the calls by which torch makes groups out of the world's calls: they are numbered
    separately, as if they were calls of another group."""
    found = []
    for group in groups:
        made = [
            tuple(replace(call, call=call.creation) for call in member.records if call.creation)
            for member in group.ranks
        ]
        if any(made):
            segment = of_creations(group.segment)
            found.append(replace(_with(group, made), backend=CREATIONS, segment=segment))
            rest = [tuple(c for c in member.records if not c.creation) for member in group.ranks]
            group = _with(group, rest)
        found.append(group)
    return found


def of_creations(segment: tuple[int, int]) -> tuple[int, int]:
    """The name of the calls that make groups, among those of a world."""
    return segment[0], -1 - segment[1]


def _with(group: GroupRecords, records: Iterable[tuple[Record, ...]]) -> GroupRecords:
    both = zip(group.ranks, records, strict=True)
    return replace(group, ranks=tuple(replace(member, records=own) for member, own in both))


@dataclass(frozen=True)
class Wait:
    """A call of one rank that has started and not finished."""

    group: GroupRecords
    member: RankRecords
    record: Record

    def missing(self) -> list[int]:
        """The ranks that it needs to go on."""
        record = self.record
        if self.makes_group():
            made = {member.rank: _times_made(record, member) for member in self.group.ranks}
            return [rank for rank in _members(record) if made.get(rank, 0) < made[self.member.rank]]
        if record.call is not None:
            here = {
                other.rank
                for other in self.group.ranks
                if last_call_number(other) >= record.call or other is self.member
            }
            return [rank for rank in range(self.group.size) if rank not in here]
        mine = self.member.rank
        peers = [rank for rank in range(self.group.size) if record.peer in (rank, None)]
        matched = any(self._is_matched_by(rank) for rank in peers)
        return [] if matched else [rank for rank in peers if rank != mine or record.peer == mine]

    def waited_s(self) -> float:
        """How long it has been under way."""
        return time.monotonic() - self.record.arrived_s

    def makes_group(self) -> bool:
        """Whether it makes a group that its members make alone."""
        return self.record.operation == "new_group" and not self.record.creation

    def is_for_anybody(self) -> bool:
        """Whether it receives from any rank: such a call may wait as long as it likes."""
        return self.record.tag is not None and self.record.peer is None

    def _is_matched_by(self, rank: int) -> bool:
        """Whether this rank has posted the other end of a message."""
        other = find_member(self.group, rank)
        kind = "recv" if self.record.operation == "send" else "send"
        return other is not None and any(
            there.operation == kind
            and not other.heard_s
            and there.state in IN_FLIGHT
            and there.peer in (self.member.rank, None)
            and there.tag == self.record.tag
            for there in other.records
        )

    def kind(self) -> tuple[object, ...]:
        """What repeats, if a program repeats its calls."""
        record = self.record
        return line_of(record.site), self.group.segment, record.operation, record.peer, record.tag

    def __str__(self) -> str:
        return f"{call_name(self.record)} of group {self.group.name}"


def waits(groups: Iterable[GroupRecords], process: Process | int | None = None) -> list[Wait]:
    """Every call in flight, of one process (a pid alone: of this host) or of all, the oldest
    first."""
    return calls_of(groups, process, IN_FLIGHT)


def calls_of(
    groups: Iterable[GroupRecords], process: Process | int | None, states: Sequence[str] = ()
) -> list[Wait]:
    """The calls of one process, or of all, in any of these states, or in all; the oldest first."""
    found = [
        Wait(group, member, record)
        for group in groups
        for member in group.ranks
        if _is_of(member, process)
        for record in member.records
        if not states or record.state in states
    ]
    return sorted(found, key=lambda wait: wait.record.arrived_s)


def _is_of(member: RankRecords, process: Process | int | None) -> bool:
    return process is None or process in (member.pid, member.process)


def newest_calls(
    groups: Iterable[GroupRecords], process: Process | int | None = None
) -> list[Wait]:
    """The newest call in each group, finished or not, of one process or of every rank."""
    return [
        Wait(group, member, member.records[-1])
        for group in groups
        for member in group.ranks
        if member.records and _is_of(member, process)
    ]


def failed_calls(groups: Iterable[GroupRecords]) -> list[Wait]:
    """The newest call of each rank if it has failed; the oldest first."""
    found = [wait for wait in newest_calls(groups) if wait.record.state == "failed"]
    return sorted(found, key=lambda wait: wait.record.arrived_s)


def find_member(group: GroupRecords, rank: int | None) -> RankRecords | None:
    """A rank of a group, if it has joined."""
    return next((member for member in group.ranks if member.rank == rank), None)


def last_call_number(member: RankRecords) -> int:
    """The number of the last call that a rank has reached."""
    return max((record.call for record in member.records if record.call is not None), default=0)


def _members(record: Record) -> list[int]:
    """The ranks of a new group, if they are known."""
    return [rank for rank in range(MOST_MEMBERS) if record.bytes >> rank & 1]


def _times_made(record: Record, member: RankRecords) -> int:
    """How many groups of the same members a rank has made, or is making."""
    made = (record.operation, record.creation, record.bytes)
    return [(own.operation, own.creation, own.bytes) for own in member.records].count(made)


def call_name(record: Record) -> str:
    """ "all_reduce #173", "recv from rank 1 (tag 0)" """
    if record.operation == "new_group" and not record.creation:
        return f"new_group of {name_ranks(_members(record))}"
    if record.tag is None:
        return f"{record.operation} #{record.call}" if record.call else record.operation
    end = "any rank" if record.peer is None else f"rank {record.peer}"
    way = "to" if record.operation == "send" else "from"
    return f"{record.operation} {way} {end} (tag {record.tag})"


def describe_call(record: Record, backend: str) -> str:
    """What a call does: everything that must be equal on every rank."""
    primitive = primitive_of(record.operation)
    if primitive.is_empty:
        return record.operation
    if record.operation == "new_group":
        members = _members(record)
        return f"new_group of {name_ranks(members) if members else 'other ranks'}"
    if backend == "unisono" and not record.dtype:
        return f"{record.operation} with arguments that it refused"
    is_uneven = primitive.is_pairwise or (backend == "nccl" and primitive.wide)
    elements = None if is_uneven else record.count
    return describe_collective(
        record.operation, record.dtype, elements, record.reduction, record.root
    )


def by_number(group: GroupRecords, after: int = 0) -> dict[int, dict[int, Record]]:
    """The calls of a group by their number: what each rank that came did there."""
    table: dict[int, dict[int, Record]] = {}
    for member in group.ranks:
        for record in member.records:
            if record.call is not None and record.call > after:
                table.setdefault(record.call, {})[member.rank] = record
    return dict(sorted(table.items()))


def line_of(site: str | None) -> str:
    """ "train.py:88" of "train.py:88 in step" """
    return (site or "").partition(" in ")[0]
