"""Types of the engine's objects, for type checkers: never imported at run time."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol, TypedDict

from unisono.comm.work import Work

Gathered = tuple[list[Any] | None, list[tuple[int, tuple[int, ...]]] | None]
"""Every rank's tensor; or, if one is not small, every rank's dtype, by DLPack's number, and
shape; or neither, if all are small and this rank wants none."""


class Block(Protocol):
    """Memory that all ranks of a group map: a buffer with a part for each."""

    address: int

    def use(self, number: int) -> None:
        """All ranks have opened it: calls may use it, under this number."""

    def part(self, rank: int) -> tuple[int, int]:
        """Where a rank's part begins in the buffer, and how many bytes it has."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class State(TypedDict):
    """The group as this rank sees it: its own calls, how often it read the memory of peers, the
    segment; and a rank, with what it posted in the place of a call. Zeros once it is closed."""

    calls: int
    reads: int
    descriptor: int
    has_closed: bool
    loss: int | None
    """How the rank's process ended, as the detail of a failure; None: it has not."""
    progress: int
    """The steps of moving data that it has finished."""
    waiting: tuple[int, int, int, int, int, int, int]
    """Whether it waits for a message, then an `AwaitedMessage`."""
    posted: tuple[int, int, int, int, int, int, int, int]
    """Call, operation, reduction, dtype, root, refused, bytes, hash."""
    sizes: tuple[int, ...]
    """Of a call that has some: the bytes that it gives to each rank, then wants from each."""


class Group(Protocol):
    """A rank of a group. The methods that take part in a call return a `Status`; `send` and
    `recv` return the rank at the other end, or a status below zero. The first argument of
    `submit`, `isend` and `irecv` is the GroupExceptions of their works. `run` and `submit` take
    operation, output, input, root, reduction, and optionally a factor, a compiled schedule, a
    timeout and a number of contributions."""

    timeout_ns: int
    is_reproducible: bool

    def all_reduce(self, tensor: Any, op: Any, reproducible: bool | None) -> int: ...
    def run_given(self, operation: int, output: Any, input: Any, options: Any) -> int: ...
    def exchange(self, integers: tuple[int, ...], ns: int) -> list[tuple[int, ...]] | int: ...
    def gather_ragged(
        self, tensor: Any, root: int, empty_like: Any, empty: Any
    ) -> Gathered | int | None: ...
    def run(self, *call: Any) -> int: ...
    def submit(self, exceptions: Any, *call: Any) -> Work | int: ...
    def send(self, tensor: Any, peer: int, tag: int) -> int: ...
    def recv(self, tensor: Any, peer: int | None, tag: int) -> int: ...
    def isend(self, exceptions: Any, frame: FrameType, *message: Any) -> Work: ...
    def irecv(self, exceptions: Any, frame: FrameType, *message: Any) -> Work: ...
    def unmatched(self, source: int) -> tuple[int, int]: ...
    def configure(self, eager_bytes: int, may_read: bool, copiers: int, spin_ns: int) -> None: ...
    def barrier(self) -> int: ...
    def refuse(self, operation: int) -> int: ...
    def abort(self, reason: str) -> None: ...
    def owner(self, address: int) -> int: ...
    def decide(self, book: int, serial: int, value: int = ...) -> int: ...
    def write_note(self, kind: int, about: int, text: str) -> None: ...
    def read_note(self, rank: int, kind: int, about: int) -> str | None: ...
    def introduce(self, name: str, global_rank: int, keeps_sites: bool) -> None: ...
    def watch(self, rank: int, identity: int, pidfd: int) -> bool: ...
    def span(
        self,
        local: Group,
        hosts: Sequence[int],
        key: int,
        workers: Sequence[tuple[bytes, int, int]],
    ) -> None:
        """Extend the group to ranks on other hosts. `local` is the group of those on this host,
        `hosts` the number of each rank's host, `workers` the address of its UCX worker, b"" on
        this host, the proof for it that messages to it carry, and the one in messages from it;
        `key` names the group on all hosts. Raises OSError."""

    def meet(self, timeout_s: float, asks: bool) -> tuple[int, ...]:
        """Wait for all ranks of other hosts; returns those that did not arrive in time. One whose
        arrival only a missing rank could tell is among them, unless it `asks` each of them."""

    def lose(self, rank: int, is_silent: bool) -> None:
        """The process of a rank on another host has ended, or no longer answers."""

    def leave(self, rank: int) -> None:
        """The process of a rank on another host has left all groups cleanly."""

    def set_flags(self, address: int) -> None: ...
    def open_block(self, descriptor: int, sizes: Sequence[int]) -> Block: ...
    def reopen_block(self, number: int) -> Block | None: ...
    def record_open(self, *call: int) -> int: ...
    def record_given(self, *call: Any) -> int | None: ...
    def record_cover(self, whether: bool) -> None: ...
    def record_end(self, record: int, status: int) -> None: ...
    def check(self, *call: int) -> int: ...
    def serve_operators(self, name: str) -> None:
        """Let torch's operators find the group by this name."""

    def release_works(self) -> bool: ...
    def finish(self) -> tuple[int, ...] | None: ...
    def close(self) -> None: ...
    def failure(self) -> tuple[int, int, int, int]: ...
    def state(self, rank: int = ..., call: int = ...) -> State: ...
