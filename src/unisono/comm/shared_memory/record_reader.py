"""Reading records from outside, while the job runs: a process of the same user finds the group's
shared memory through /proc. `read_process` returns the current records, a `RecordFollower` every
record once, as they appear."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.cases.primitives import primitive_of
from unisono.comm.engine import ABOUT_MESSAGES, Operation, Status, native
from unisono.comm.reductions import describe_reduction
from unisono.comm.shared_memory.error_texts import dtype_name
from unisono.comm.shared_memory.group_parts import read_name, segment_of_key
from unisono.comm.shared_memory.records import GroupRecords, RankRecords, Record
from unisono.comm.shared_memory.segment_listeners import listeners
from unisono.errors import UnisonoError

_MAGIC = 0x6F6E6F73696E75
_HEADER = struct.Struct("<QIIQI")
_IDENTITY = struct.Struct("<QQii104s")
_RECORD = struct.Struct("<7QII")
_WORD = struct.Struct("<Q")
_CLOSED = struct.Struct("<I")
_SITE = struct.Struct("<Q120s")
_NOTE = struct.Struct("<Q248s")
_SITE_BITS = 12
_LITTLE, _MUCH, _COPIES_KEPT = 64, 256, 128
"""Records of a ring: what a reader need not hurry for; what is worth a copy. Copies of a ring."""
_STATUS_NAMES = {number: name for name, number in vars(Status).items() if name.isupper()}
_STATES = {1: "queued", 2: "waiting", 3: "moving", 4: "finished", 5: "failed"}


class RecordsLayout(NamedTuple):
    """Where in a segment the records lie; the order is that of un_layout_of_records."""

    first_control: int
    control_bytes: int
    identity: int
    records: int
    record_bytes: int
    record_count: int
    sites: int
    site_bytes: int
    site_count: int
    asked: int
    answer: int
    reason: int
    progress: int
    closed: int

    def control(self, rank: int) -> int:
        """Where the control block of a rank begins; for `ranks`, where all end."""
        return self.first_control + rank * self.control_bytes


def read_process(
    pid: int, last: int | None = None, seen: set[tuple[int, int]] | None = None
) -> list[GroupRecords]:
    """The records of all ranks of every group of process `pid`; at most the newest `last` of
    each rank. Segments that were `seen` are not read again. Raises UnisonoError if the process is
    gone, or belongs to another user."""
    seen = set() if seen is None else seen
    if _own is not None and pid == os.getpid() and last is not None and last <= _own.kept:
        found = _own.read(last)
        seen |= set(_own.followers)
        return found
    groups: dict[tuple[int, int], GroupRecords] = {}
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for path in segments_of(pid):
        try:
            key = segment_key(path)
            group = None if key in seen else read_segment(path, last)
        except OSError:
            continue  # closed meanwhile
        if group is None or not group.ranks:  # no rank has joined
            continue
        # It may be reading another host's part, where hosts are namespaces of one machine.
        is_its_own = any(member.pid == pid for member in group.ranks)
        if is_its_own or group.segment not in groups:
            groups[group.segment], kept[group.segment] = group, key
    seen |= set(kept.values())
    return list(groups.values())


def segments_of(pid: int) -> list[str]:
    """Paths of possible segments of the groups of process `pid`. Raises the same."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as links:
            paths = sorted(link.path for link in links)
    except (FileNotFoundError, ProcessLookupError):
        raise UnisonoError(f"there is no process {pid}") from None
    except PermissionError:
        raise UnisonoError(f"process {pid} belongs to another user") from None
    found: dict[tuple[int, int], str] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith(("/memfd:unisono (", "/dev/shm/")):
                found.setdefault(segment_key(path), path)
    return list(found.values())


def read_segment(path: str | int, last: int | None = None) -> GroupRecords | None:
    """The records in the segment at a path, or behind a descriptor; None if it is not a segment."""
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        try:
            follower = RecordFollower(file.fileno())
        except NotASegment:
            return None
        with contextlib.closing(follower):
            return follower.read_group(last)


def map_segment(
    descriptor: int, access: int = mmap.ACCESS_READ
) -> tuple[int, RecordsLayout, mmap.mmap]:
    """The number of ranks of the segment behind a descriptor, its layout, and its control
    blocks. Raises NotASegment, or UnisonoError if another version wrote it."""
    header = os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    magic, version, size, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise NotASegment("this is not the shared memory of a group")
    if version != native.LAYOUT_VERSION:
        raise UnisonoError("this shared memory was written by another version of unisono")
    layout = RecordsLayout(*native.records_layout(size))
    return size, layout, mmap.mmap(descriptor, layout.control(size), access=access)


def segment_key(file: int | str) -> tuple[int, int]:
    facts = os.stat(file)
    return facts.st_dev, facts.st_ino


_Identity = tuple[str, int, int, "_Clock"]
"""Of a rank: its group (with its backend), process, global rank and clock."""


def _read_identity(memory: mmap.mmap, layout: RecordsLayout, rank: int) -> _Identity | None:
    """The identity of a rank; None if it has not joined."""
    identity = _IDENTITY.unpack_from(memory, layout.control(rank) + layout.identity)
    opened_ticks, opened_ns, pid, global_rank, name = identity
    if not pid:
        return None
    text = name.split(b"\0")[0].decode(errors="replace")
    return text, pid, global_rank, _Clock(opened_ticks, opened_ns)


def leave_reason(text: str) -> None:
    """Publish in every group of this process why it ends, for later readers of its records."""
    for path in segments_of(os.getpid()):
        with contextlib.suppress(OSError, ValueError, UnisonoError), open(path, "r+b") as file:
            leave = note_writer(file.fileno(), "reason")
            leave(ABOUT_MESSAGES, text)


def note_writer(descriptor: int, kind: str) -> Callable[[int, str], None]:
    """A function that writes this process's note of a kind ("reason", "answer") into a segment:
    (about, text). Raises UnisonoError if it is none, or this process is not in the group."""
    size, layout, memory = map_segment(descriptor, mmap.ACCESS_WRITE)
    for rank in range(size):
        known = _read_identity(memory, layout, rank)
        if known is not None and known[1] == os.getpid():
            at = layout.control(rank) + getattr(layout, kind)
            return lambda about, text: _NOTE.pack_into(
                memory, at, about, text.encode()[: _NOTE.size - 9]
            )
    raise UnisonoError("this process is not in the group of this segment")


def _parse_record(record: bytes, layout: RecordsLayout, clock: _Clock, sites: bytes) -> Record:
    """One record from its bytes and the texts of its rank's sites."""
    number, call, signature, size_bytes, arrived, started, ended, state, where = _RECORD.unpack(
        record
    )
    operation = Operation(signature & 0xFF)
    root = (signature >> 24 & 0xFFFF ^ 0x8000) - 0x8000
    message = operation in (Operation.SEND, Operation.RECV)
    makes_group = operation is Operation.NEW_GROUP
    primitive = primitive_of(operation.name.lower())
    is_split = operation is Operation.ALL_TO_ALL
    site = where & (1 << _SITE_BITS) - 1
    return Record(
        number=number,
        operation=primitive.name,
        dtype="" if operation is Operation.BARRIER or makes_group else dtype_name(signature >> 40),
        bytes=size_bytes,
        call=None if message or makes_group or not call else call,
        tag=(call ^ 1 << 63) - (1 << 63) if message else None,
        peer=root if message and root >= 0 else None,
        root=root if primitive.is_rooted else None,
        reduction=describe_reduction(signature >> 8 & 0xFF) if primitive.reduces else None,
        state=_STATES[state & 0xFFFF],
        status=_STATUS_NAMES[state >> 16 & 0xFF],
        arrived_s=clock.seconds(arrived),
        started_s=clock.seconds(started) if started else None,
        ended_s=clock.seconds(ended) if ended else None,
        site=_text(sites, site, layout) if site else None,
        step=where >> _SITE_BITS,
        thread=state >> 24,
        creation=call if makes_group else 0,
        balance=(signature >> 8 & 0xFF) << 16 | root & 0xFFFF if is_split else 0,
    )


class _Clock:
    """From the processor's ticks to seconds, by two moments known in both."""

    def __init__(self, opened_ticks: int, opened_ns: int) -> None:
        self._ticks, self._ns = opened_ticks, opened_ns
        self.look_again()

    def look_again(self) -> None:
        """The second moment is now: the later, the better."""
        ticks, ns = native.now()
        self._ns_per_tick: float = (ns - self._ns) / max(1, ticks - self._ticks)

    def seconds(self, moment: int) -> float:
        return (self._ns + (moment - self._ticks) * self._ns_per_tick) / 1e9


def _text(sites: bytes, number: int, layout: RecordsLayout) -> str | None:
    """The text of a site; None if another text has overwritten it."""
    at = number % layout.site_count * layout.site_bytes
    there, text = _SITE.unpack_from(sites, at)
    if there % (1 << _SITE_BITS) != number:
        return None
    text, _, _ = text.partition(b"\0")
    return str(text, errors="replace")


class NotASegment(UnisonoError):
    """A descriptor refers to something else."""


class _RankRing:
    """One rank's records, and how far they have been read. `under_way` are those that were not
    over when last seen, by number."""

    def __init__(
        self, memory: mmap.mmap, layout: RecordsLayout, rank: int, identity: _Identity
    ) -> None:
        self.rank = rank
        self.name, self.pid, self.global_rank, self._clock = identity
        self.dropped = 0
        self._memory: mmap.mmap | bytes = memory
        self._layout, self._base = layout, layout.control(rank)
        self._next = 1
        self._under_way: dict[int, Record] = {}
        self._kept: dict[int, Record] = {}
        self._copies: deque[tuple[float, bytes]] = deque()
        self._seen = self._copied = 0
        self.complete_since_s = 0.0

    def copy(self) -> bool:
        """Copy the ring, to be read later, if much of it is new: that takes less than to read it.
        Returns whether more than a little was new."""
        if self._number_at(self._seen + _LITTLE) < self._seen + _LITTLE:
            return False
        self._seen = self._newest()
        if self._seen - self._copied >= _MUCH:
            self._copied = self._seen
            end = self._base + self._layout.control_bytes
            self._copies.append((time.monotonic(), self._memory[self._base : end]))
            if len(self._copies) > _COPIES_KEPT:
                self.complete_since_s = self._copies.popleft()[0]
        return True

    def read(self, to_the_end: bool, last: int | None = None) -> list[Record]:
        """New records, and those that have ended since; at most the newest `last`."""
        found = []
        live = self._memory, self._base
        while self._copies:
            self._memory, self._base = self._copies.popleft()[1], 0
            found += self._read(False)
        self._memory, self._base = live
        return found + self._read(to_the_end, last)

    def _read(self, to_the_end: bool, last: int | None = None) -> list[Record]:
        if not self._under_way and not to_the_end and self._number_at(self._next) < self._next:
            return []  # nothing new, the usual case
        self._clock.look_again()
        layout, start = self._layout, self._base + self._layout.sites
        sites = self._memory[start : start + layout.site_count * layout.site_bytes]
        found = []
        for number, before in list(self._under_way.items()):
            record = self._record(number, sites)
            if record is None or record.ended_s is not None:
                del self._under_way[number]
            if record is not None and record.state != before.state:
                found.append(record)
        newest = self._next + layout.record_count  # at most: the writer may be faster than we are
        if to_the_end or not last or self._number_at(self._next + last) >= self._next + last:
            newest = self._newest()
            self._next = max(self._next, newest - last + 1 if last else 1)
        while self._next <= newest:
            record = self._record(self._next, sites)
            if record is not None:
                found.append(record)
                if record.ended_s is None:
                    self._under_way[self._next] = record
                self._next += 1
                continue
            oldest = self._number_at(self._next) - layout.record_count + 1
            if oldest > self._next:  # overwritten, with all that are as old
                self.dropped += oldest - self._next
                self._next = oldest
            elif to_the_end:
                self.dropped += 1
                self._next += 1
            else:
                break
        return found

    def read_again(self, last: int, kept: int) -> tuple[Record, ...]:
        """The newest `last` of the `kept` records that are known, and of those that are new."""
        if found := self.read(False, kept):
            self._kept |= {record.number: record for record in found}
            self._kept = dict(sorted(self._kept.items())[-kept:])
        return tuple(self._kept.values())[-last:]

    def known(self, records: tuple[Record, ...]) -> RankRecords:
        """The rank, with these records and its other notes."""
        about, reason = _NOTE.unpack_from(self._memory, self._base + self._layout.reason)
        text = reason.split(b"\0")[0].decode(errors="replace") if about else ""
        (progress,) = _WORD.unpack_from(self._memory, self._base + self._layout.progress)
        return RankRecords(self.rank, self.global_rank, self.pid, records, text, progress)

    def is_closed(self) -> bool:
        """Whether the rank has left the group."""
        return bool(_CLOSED.unpack_from(self._memory, self._base + self._layout.closed)[0])

    def _number_at(self, number: int) -> int:
        """The number of the record now in this number's slot; 0 while one is being written."""
        return int(_WORD.unpack_from(self._memory, self._offset(number))[0])

    def _newest(self) -> int:
        begin, layout = self._base + self._layout.records, self._layout
        numbers = self._memory[begin : begin + layout.record_count * layout.record_bytes]
        return max(memoryview(numbers).cast("Q")[:: layout.record_bytes // _WORD.size])

    def _offset(self, number: int) -> int:
        layout = self._layout
        return self._base + layout.records + number % layout.record_count * layout.record_bytes

    def _record(self, number: int, sites: bytes) -> Record | None:
        """The record of this number, if it is still there and complete."""
        at = self._offset(number)
        whole = self._memory[at : at + self._layout.record_bytes]
        if _WORD.unpack_from(whole)[0] != number or self._number_at(number) != number:
            return None
        return _parse_record(whole, self._layout, self._clock, sites)


class RecordFollower:
    """Reads the segment behind a descriptor, which stays the caller's: records stay readable
    when all members have left, up to the length of the ring. Raises UnisonoError if it is not a
    segment."""

    def __init__(self, descriptor: int) -> None:
        self.segment = segment_key(descriptor)
        self.size, self._layout, self._memory = map_segment(descriptor)
        self._rings: dict[int, _RankRing] = {}

    def close(self) -> None:
        self._memory.close()

    def group(self) -> GroupRecords:
        """Its members, without records."""
        return self._identify([ring.known(()) for _, ring in sorted(self._rings.items())])

    def dropped(self) -> dict[int, int]:
        """How many records of each rank were overwritten before they were read."""
        return {rank: ring.dropped for rank, ring in self._rings.items() if ring.dropped}

    def copy(self) -> bool:
        """Copy what will be overwritten soon, for `read`; returns whether much is written."""
        return sum(ring.copy() for ring in self._joined_rings()) > 0

    def complete_since_s(self) -> float:
        """Since when no copy has been dropped to make room."""
        return max((ring.complete_since_s for ring in self._rings.values()), default=0.0)

    def forget_dropped(self) -> None:
        """Reset the count of lost records."""
        for ring in self._rings.values():
            ring.dropped = 0

    def is_left(self) -> bool:
        """Whether every rank (of a part: of its host) has joined and closed the group."""
        rings = self._joined_rings()
        is_part = bool(rings) and read_name(rings[0].name)[2] is not None
        return (is_part or len(rings) == self.size) and all(ring.is_closed() for ring in rings)

    def read(self, to_the_end: bool = False) -> list[tuple[int, Record]]:
        """New records, and those that have ended since, with their rank. `to_the_end`: nothing
        is written any more, so incomplete records are skipped."""
        return [
            (ring.rank, record) for ring in self._joined_rings() for record in ring.read(to_the_end)
        ]

    def read_group(self, last: int | None, kept: int = 0) -> GroupRecords:
        """All current records, at most the newest `last` of each rank. To read them again and
        again, keep as many as are ever needed."""
        rings = self._joined_rings()
        if kept and last:
            return self._identify([ring.known(ring.read_again(last, kept)) for ring in rings])
        return self._identify([ring.known(tuple(ring.read(True, last))) for ring in rings])

    def has_left(self, pid: int) -> bool:
        """Whether this process has left the group."""
        return all(ring.is_closed() for ring in self._joined_rings() if ring.pid == pid)

    def _joined_rings(self) -> list[_RankRing]:
        for rank in range(self.size):
            if rank not in self._rings:
                known = _read_identity(self._memory, self._layout, rank)
                if known is not None:
                    self._rings[rank] = _RankRing(self._memory, self._layout, rank, known)
        return [ring for _, ring in sorted(self._rings.items())]

    def _identify(self, members: Sequence[RankRecords]) -> GroupRecords:
        """The group of this segment, with these ranks."""
        name, backend, part = read_name(self._rings[members[0].rank].name if members else "?")
        if part is None:
            return GroupRecords(name, self.size, tuple(members), backend, self.segment)
        here = tuple(replace(member, host=part.host) for member in members)
        segment = segment_of_key(part.key)
        return GroupRecords(name, self.size, here, backend, segment, is_part=True)


class OwnRecords:
    """The records of this process's groups while the watch runs. They stay mapped, and `kept` of
    each rank are remembered: `read_process` then makes no system calls, and parses what is new."""

    def __init__(self, kept: int) -> None:
        global _own
        self.kept, self._lock = kept, threading.Lock()
        self.followers: dict[tuple[int, int], RecordFollower] = {}
        for path in segments_of(os.getpid()):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                self._follow(file.fileno())
        listeners.append(self._follow)
        _own = self

    def read(self, last: int) -> list[GroupRecords]:
        """Those of the groups that this process has not left."""
        with self._lock:
            for key, follower in list(self.followers.items()):
                if follower.has_left(os.getpid()):
                    self.followers.pop(key).close()
            return [known.read_group(last, self.kept) for known in list(self.followers.values())]

    def close(self) -> None:
        global _own
        _own = None if _own is self else _own
        listeners.remove(self._follow)
        self.followers.clear()

    def _follow(self, descriptor: int) -> None:
        with contextlib.suppress(OSError, UnisonoError):  # the program can do without
            self.followers[segment_key(descriptor)] = RecordFollower(descriptor)


_own: OwnRecords | None = None
