"""Records of every call of a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One call or message of one rank. Times are seconds of time.monotonic. `state` is "queued"
    (submitted, not begun), "waiting" (for the peers), "moving" (data), "finished" or "failed";
    `started_s` is when all peers had arrived, or a message was matched."""

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
    """The step of its thread in which it was made, modulo 2**20; see `unisono.watch.step`."""
    thread: int = 0
    """A number for each calling thread of its process; 1 is the main thread."""
    creation: int = 0
    """If it makes a group: its number among such calls of its process; in the records of the
    world."""
    balance: int = 0
    """For an all_to_all of another library: the sum over all ranks is 0, modulo 2**24, if every
    rank sends what its peer expects."""

    @property
    def count(self) -> int:
        """How many elements this rank sent, or received if it sent none."""
        bits = int("".join(filter(str.isdigit, self.dtype.partition("_")[0])) or 8)
        return self.bytes * 8 // bits


Process = tuple[str, int]
"""A host, "" if there is only this one, and a PID on it."""


@dataclass(frozen=True)
class RankRecords:
    """What one rank of a group did, oldest first. `reason` is why it left, if it said so."""

    rank: int
    global_rank: int
    pid: int
    records: tuple[Record, ...]
    reason: str = ""
    progress: int = 0
    """Steps of moving data that it has finished, over all calls of a shared-memory group."""
    host: str = ""
    """The name of its host, in a group over several hosts, or if records of several were read."""
    heard_s: float = 0.0
    """When its host sent these records, by time.monotonic; 0.0: they are those of now."""

    @property
    def process(self) -> Process:
        """What identifies its process."""
        return self.host, self.pid


@dataclass(frozen=True)
class GroupRecords:
    """What the ranks of one group did; one that has not joined yet is left out. `backend` is
    what moves the data: "unisono", or the library whose calls are recorded. `segment` names the
    shared memory that was read. `is_part`: not all hosts of the group were read."""

    name: str
    size: int
    ranks: tuple[RankRecords, ...]
    backend: str = "unisono"
    segment: tuple[int, int] = (0, 0)
    is_part: bool = False
