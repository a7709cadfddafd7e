"""Following a segment: every record of its ranks once, as they come, whoever closes the group."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from unisono.comm.shared_memory.group_parts import in_whole_group, read_name
from unisono.comm.shared_memory.records import (
    Clock,
    GroupRecords,
    RankRecords,
    Record,
    identify_group,
    map_segment,
    parse_record,
    read_identity,
    segment_key,
)
from unisono.errors import UnisonoError

_WORD = struct.Struct("<Q")
_CLOSED = struct.Struct("<I")


@dataclass
class _RankRing:
    """How far one rank's ring has been read. `under_way` are the records that were not over when
    they were last seen, by their number."""

    rank: int
    global_rank: int
    pid: int
    clock: Clock
    next: int = 1
    dropped: int = 0
    under_way: dict[int, Record] = field(default_factory=dict)


class RecordFollower:
    """Reads the segment behind a descriptor, which stays the caller's: what was recorded stays
    readable when all members have left, up to the length of the ring. Raises UnisonoError if it is
    not a segment."""

    def __init__(self, descriptor: int) -> None:
        self.segment = segment_key(descriptor)
        mapped = map_segment(descriptor)
        if mapped is None:
            raise UnisonoError("this is not the shared memory of a group")
        self.size, self._layout, self._memory = mapped
        self._ranks: dict[int, _RankRing] = {}

    def close(self) -> None:
        """Let go of it."""
        self._memory.close()

    def group(self) -> GroupRecords:
        """Who is in it, without records."""
        rings = [ring for _, ring in sorted(self._ranks.items())]
        ranks = tuple(RankRecords(ring.rank, ring.global_rank, ring.pid, ()) for ring in rings)
        found = [read_identity(self._memory, self._layout, ring.rank) for ring in rings]
        names = [identity[0] for identity in found if identity is not None]
        return identify_group(self.size, ranks, names, self.segment)

    def dropped(self) -> dict[int, int]:
        """How many records of each rank were written over before they were read."""
        return {rank: ring.dropped for rank, ring in self._ranks.items() if ring.dropped}

    def forget_dropped(self) -> None:
        """What was lost up to now does not count."""
        for ring in self._ranks.values():
            ring.dropped = 0

    def is_left(self) -> bool:
        """Whether every rank has joined and closed the group."""
        layout = self._layout
        return all(
            read_identity(self._memory, layout, rank)
            and _CLOSED.unpack_from(self._memory, layout.control(rank) + layout.closed)[0]
            for rank in range(self.size)
        )

    def read(self, to_the_end: bool = False) -> list[tuple[int, Record]]:
        """What is new, and what was under way and is over now, with its rank. `to_the_end` says
        that nobody writes any more: what was never finished writing is passed over."""
        found = []
        for rank in range(self.size):
            ring = self._ranks.get(rank)
            if ring is None:
                known = read_identity(self._memory, self._layout, rank)
                if known is None:
                    continue
                _, pid, global_rank, clock = known
                ring = self._ranks[rank] = _RankRing(rank, global_rank, pid, clock)
            found += [(rank, record) for record in self._read_rank(ring, to_the_end)]
        return self._in_whole_group(found) if found else found

    def _in_whole_group(self, found: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """The same in ranks of the whole group, where this is one host's part of it."""
        numbers: dict[int, int] = {}
        for rank in self._ranks:
            identity = read_identity(self._memory, self._layout, rank)
            part = read_name(identity[0])[2] if identity is not None else None
            if part is None:
                return found
            numbers[rank] = part.rank
        return [(numbers[rank], in_whole_group(record, numbers)) for rank, record in found]

    def _read_rank(self, ring: _RankRing, to_the_end: bool) -> list[Record]:
        count = self._layout.record_count
        if not ring.under_way and not to_the_end and self._number_at(ring, ring.next) < ring.next:
            return []  # nothing new, as most often
        ring.clock.look_again()
        start = self._layout.control(ring.rank) + self._layout.sites
        sites = self._memory[start : start + self._layout.site_count * self._layout.site_bytes]
        found = []
        for number, before in list(ring.under_way.items()):
            record = self._record(ring, number, sites)
            if record is None or record.ended_s is not None:
                del ring.under_way[number]
            if record is not None and record.state != before.state:
                found.append(record)
        while True:
            record = self._record(ring, ring.next, sites)
            there = self._number_at(ring, ring.next)
            if record is not None:
                found.append(record)
                if record.ended_s is None:
                    ring.under_way[ring.next] = record
                ring.next += 1
            elif there > ring.next:  # written over, with all that are as old
                ring.dropped += there - count + 1 - ring.next
                ring.next = there - count + 1
            elif to_the_end and self._number_at(ring, ring.next + 1) > ring.next:
                ring.dropped += 1
                ring.next += 1
            else:
                return found

    def _number_at(self, ring: _RankRing, number: int) -> int:
        """Which record now stands where this number's was; 0 while one is being written."""
        return int(_WORD.unpack_from(self._memory, self._offset(ring, number))[0])

    def _offset(self, ring: _RankRing, number: int) -> int:
        layout = self._layout
        first = layout.control(ring.rank) + layout.records
        return first + number % layout.record_count * layout.record_bytes

    def _record(self, ring: _RankRing, number: int, sites: bytes) -> Record | None:
        """The record of this number, if it stands there, whole."""
        at = self._offset(ring, number)
        whole = self._memory[at : at + self._layout.record_bytes]
        if _WORD.unpack_from(whole)[0] != number or self._number_at(ring, number) != number:
            return None
        return parse_record(whole, self._layout, ring.clock, sites)
