"""Records: what every call of a rank left behind, read from outside while the job runs.

Each rank keeps its last thousand calls and messages in the group's shared memory. A process of the
same user finds that memory through /proc and reads it; the job does not notice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from unisono.comm.engine import (
    ABOUT_MESSAGES,
    Operation,
    Status,
    layout_version,
    now_by_both_clocks,
    records_layout,
)
from unisono.comm.reductions import REDUCTION_NAMES
from unisono.comm.shared_memory.error_texts import REDUCING, ROOTED, dtype_name
from unisono.comm.shared_memory.group_parts import in_whole_group, read_name, segment_of_key
from unisono.errors import UnisonoError

_MAGIC = 0x6F6E6F73696E75
_HEADER = struct.Struct("<QIIQI")
_IDENTITY = struct.Struct("<QQii104s")
_RECORD = struct.Struct("<7QII")
_NUMBER = struct.Struct("<Q56x")
_WORD = struct.Struct("<Q")
_SITE = struct.Struct("<Q120s")
_NOTE = struct.Struct("<Q248s")
_SITE_BITS = 12
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
        """Where the control block of a rank begins; of the first rank too many, where all end."""
        return self.first_control + rank * self.control_bytes


@dataclass(frozen=True)
class Record:
    """One call or message of one rank. Times are seconds of CLOCK_MONOTONIC (time.monotonic).

    `state` is "queued" (submitted, not begun), "waiting" (for the peers), "moving" (data),
    "finished" or "failed"; `started_s` is when all peers were there, or a message was matched.
    """

    number: int
    operation: str
    dtype: str
    bytes: int
    call: int | None
    tag: int | None
    peer: int | None
    root: int | None
    reduction: str | None
    state: str
    status: str
    arrived_s: float
    started_s: float | None
    ended_s: float | None
    site: str | None
    step: int = 0
    """The step of its thread in which it was called, modulo 2**20; see `unisono.watch.step`."""

    @property
    def count(self) -> int:
        """How many elements this rank gave, or took where it gave none."""
        bits = int("".join(filter(str.isdigit, self.dtype.partition("_")[0])) or 8)
        return self.bytes * 8 // bits


Process = tuple[str, int]
"""A host, "" where there is only this one, and a process id on it."""


@dataclass(frozen=True)
class RankRecords:
    """What one rank of a group did, oldest first. `reason` is why it left, where it said so."""

    rank: int
    global_rank: int
    pid: int
    records: tuple[Record, ...]
    reason: str = ""
    progress: int = 0
    """Turns of moving data that it has finished, over all calls of a shared-memory group."""
    host: str = ""
    """The name of its host, in a group over several, or where records of several were read."""

    @property
    def process(self) -> Process:
        """What tells its process from any other."""
        return self.host, self.pid


@dataclass(frozen=True)
class GroupRecords:
    """What the ranks of one group did. A rank that has not joined yet is left out.

    `backend` says who moves the data: "unisono", or the library whose calls are recorded.
    `segment` names the shared memory that was read, the same to all who read it. `is_part` says
    that the group is over several hosts, of which perhaps not all were read.
    """

    name: str
    size: int
    ranks: tuple[RankRecords, ...]
    backend: str = "unisono"
    segment: tuple[int, int] = (0, 0)
    is_part: bool = False


def read_process(pid: int, last: int | None = None) -> list[GroupRecords]:
    """The records of every group in which process `pid` is, of all their ranks; `last` is how
    many of each rank at most, the newest.

    Raises UnisonoError if there is no such process, or it is somebody else's.
    """
    groups: dict[tuple[int, int], GroupRecords] = {}
    for path in segments_of(pid):
        try:
            group = read_segment(path, last)
        except OSError:
            continue  # closed meanwhile
        if group is not None:
            groups.setdefault(group.segment, group)
    return list(groups.values())


def segments_of(pid: int) -> list[str]:
    """Paths of what may be segments of groups in which process `pid` is. Raises as above."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as links:
            paths = sorted(link.path for link in links)
    except (FileNotFoundError, ProcessLookupError):
        raise UnisonoError(f"there is no process {pid}") from None
    except PermissionError:
        raise UnisonoError(f"process {pid} belongs to somebody else") from None
    return [path for path in paths if _may_be_segment(path)]


def _may_be_segment(path: str) -> bool:
    try:
        target = os.readlink(path)
    except OSError:
        return False
    return target.startswith(("/memfd:unisono (", "/dev/shm/"))


def read_segment(path: str | int, last: int | None = None) -> GroupRecords | None:
    """The records in the segment at a path, or behind a descriptor; None if it is none."""
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        mapped = map_segment(file.fileno())
        if mapped is None:
            return None
        size, layout, memory = mapped
        with memory:
            identities = [read_identity(memory, layout, rank) for rank in range(size)]
            known = [(rank, found) for rank, found in enumerate(identities) if found is not None]
            ranks = tuple(_read_rank(memory, layout, *of_rank, last) for of_rank in known)
        segment = segment_key(file.fileno())
        return identify_group(size, ranks, [identity[0] for _, identity in known], segment)


def identify_group(
    size: int, ranks: tuple[RankRecords, ...], names: Sequence[str], segment: tuple[int, int]
) -> GroupRecords:
    """A group of which a segment has these ranks, who call themselves so."""
    read = [read_name(text) for text in names]
    name, backend, _ = read[0] if read else ("?", "unisono", None)
    parts = [part for _, _, part in read if part is not None]
    if len(parts) < len(read) or not parts:  # also while not all know yet that it is a part
        return GroupRecords(name, size, ranks, backend, segment)
    numbers = {member.rank: part.rank for member, part in zip(ranks, parts, strict=True)}
    members = [
        replace(
            member,
            rank=part.rank,
            host=part.host,
            records=tuple(in_whole_group(record, numbers) for record in member.records),
        )
        for member, part in zip(ranks, parts, strict=True)
    ]
    ordered = tuple(sorted(members, key=lambda member: member.rank))
    whole = segment_of_key(parts[0].key)
    return GroupRecords(name, parts[0].size, ordered, backend, whole, is_part=True)


def map_segment(
    descriptor: int, access: int = mmap.ACCESS_READ
) -> tuple[int, RecordsLayout, mmap.mmap] | None:
    """How many ranks the segment behind a descriptor is for, where things lie in it, and its
    control blocks; None if it is none. Raises UnisonoError if it was written by another version."""
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return None
    magic, version, size, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        return None
    if version != layout_version():
        raise UnisonoError("this shared memory was written by another version of unisono")
    layout = RecordsLayout(*records_layout(size))
    return size, layout, mmap.mmap(descriptor, layout.control(size), access=access)


def segment_key(descriptor: int) -> tuple[int, int]:
    """What names a segment: the same to all who have it."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


Identity = tuple[str, int, int, "Clock"]
"""Of a rank: its group (with its backend), process, global rank and clock."""


def read_identity(memory: mmap.mmap, layout: RecordsLayout, rank: int) -> Identity | None:
    """The identity of a rank; None where it has not joined."""
    identity = _IDENTITY.unpack_from(memory, layout.control(rank) + layout.identity)
    opened_ticks, opened_ns, pid, global_rank, name = identity
    if not pid:
        return None
    text = name.split(b"\0")[0].decode(errors="replace")
    return text, pid, global_rank, Clock(opened_ticks, opened_ns)


def _read_rank(
    memory: mmap.mmap, layout: RecordsLayout, rank: int, identity: Identity, last: int | None
) -> RankRecords:
    base = layout.control(rank)
    _, pid, global_rank, clock = identity
    start, end = base + layout.records, base + layout.sites
    # A record that is being written over differs between two looks.
    first, second = memory[start:end], memory[start:end]
    sites = memory[end : end + layout.site_count * layout.site_bytes]
    records = sorted(
        _read_ring(first, second, layout, clock, sites, last), key=lambda record: record.number
    )
    about, reason = _NOTE.unpack_from(memory, base + layout.reason)
    text = reason.split(b"\0")[0].decode(errors="replace") if about else ""
    (progress,) = _WORD.unpack_from(memory, base + layout.progress)
    return RankRecords(rank, global_rank, pid, tuple(records), text, progress)


def leave_reason(text: str) -> None:
    """Say in every group of this process why it ends, for those who read its records later."""
    note = text.encode()[: _NOTE.size - 9]
    for path in segments_of(os.getpid()):
        with contextlib.suppress(OSError, ValueError, UnisonoError), open(path, "r+b") as file:
            mapped = map_segment(file.fileno(), mmap.ACCESS_WRITE)
            if mapped is None:
                continue
            size, layout, memory = mapped
            with memory:
                for rank in range(size):
                    known = read_identity(memory, layout, rank)
                    if known is not None and known[1] == os.getpid():
                        at = layout.control(rank) + layout.reason
                        _NOTE.pack_into(memory, at, ABOUT_MESSAGES, note)


def _read_ring(
    first: bytes,
    second: bytes,
    layout: RecordsLayout,
    clock: Clock,
    sites: bytes,
    last: int | None,
) -> Iterator[Record]:
    numbers = [number for (number,) in _NUMBER.iter_unpack(first)]
    oldest = max(0, max(numbers) - last) if last is not None else 0
    for index, number in enumerate(numbers):
        if number <= oldest:
            continue
        at = index * layout.record_bytes
        record = first[at : at + layout.record_bytes]
        if record[:8] == second[at : at + 8]:
            yield parse_record(record, layout, clock, sites)


def parse_record(record: bytes, layout: RecordsLayout, clock: Clock, sites: bytes) -> Record:
    """One record out of its bytes and the texts of its rank's sites."""
    number, call, signature, size_bytes, arrived, started, ended, state, where = _RECORD.unpack(
        record
    )
    operation = Operation(signature & 0xFF)
    root = (signature >> 24 & 0xFFFF ^ 0x8000) - 0x8000
    message = operation in (Operation.SEND, Operation.RECV)
    reducing = operation in REDUCING
    site = where & (1 << _SITE_BITS) - 1
    return Record(
        number=number,
        operation=operation.name.lower(),
        dtype="" if operation is Operation.BARRIER else dtype_name(signature >> 40),
        bytes=size_bytes,
        call=None if message or not call else call,
        tag=(call ^ 1 << 63) - (1 << 63) if message else None,
        peer=root if message and root >= 0 else None,
        root=root if operation in ROOTED else None,
        reduction=REDUCTION_NAMES[signature >> 8 & 0xFF] if reducing else None,
        state=_STATES[state & 0xFFFF],
        status=_STATUS_NAMES[state >> 16],
        arrived_s=clock.seconds(arrived),
        started_s=clock.seconds(started) if started else None,
        ended_s=clock.seconds(ended) if ended else None,
        site=_text(sites, site, layout) if site else None,
        step=where >> _SITE_BITS,
    )


class Clock:
    """From the processor's ticks to seconds, by two moments known in both."""

    def __init__(self, opened_ticks: int, opened_ns: int) -> None:
        self._ticks, self._ns = opened_ticks, opened_ns
        self.look_again()

    def look_again(self) -> None:
        """The second moment is now: the later, the better."""
        ticks, ns = now_by_both_clocks()
        self._ns_per_tick = (ns - self._ns) / max(1, ticks - self._ticks)

    def seconds(self, moment: int) -> float:
        """A moment of CLOCK_MONOTONIC."""
        return (self._ns + (moment - self._ticks) * self._ns_per_tick) / 1e9


def _text(sites: bytes, number: int, layout: RecordsLayout) -> str | None:
    """The text of a site; None where another text has been written over it."""
    at = number % layout.site_count * layout.site_bytes
    there, text = _SITE.unpack_from(sites, at)
    if there % (1 << _SITE_BITS) != number:
        return None
    text, _, _ = text.partition(b"\0")
    return str(text, errors="replace")
