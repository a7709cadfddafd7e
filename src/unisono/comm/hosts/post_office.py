"""Messages from other hosts that wait for their receives, and receives that wait for messages."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.hosts.causes import Cause
from unisono.comm.hosts.link import Frame, Kind, memory_of
from unisono.comm.hosts.mailbox import SLICE_S
from unisono.comm.shared_memory.error_texts import unfit_text
from unisono.comm.work import Work
from unisono.errors import CollectiveTimeout, GroupError

if TYPE_CHECKING:
    from unisono.comm.hosts.deadlocks import DeadlockSearch
    from unisono.comm.hosts.messages import HostsMessages

_ABOUT = struct.Struct("<q24s192s")
MOST_ABOUT_BYTES = _ABOUT.size


@dataclass(frozen=True)
class Arrival:
    """A message that another host has announced; `data` has its bytes where they are few, `side`
    what errors say of it."""

    peer: int
    tag: int
    serial: int
    size_bytes: int
    dtype: str
    side: str
    data: torch.Tensor


def encode_message(size_bytes: int, dtype: str, side: str, data: torch.Tensor) -> torch.Tensor:
    """What announces a message."""
    payload = torch.empty(_ABOUT.size + data.numel(), dtype=torch.uint8)
    _ABOUT.pack_into(memory_of(payload), 0, size_bytes, dtype.encode(), side.encode())
    payload[_ABOUT.size :].copy_(data)
    return payload


def decode_message(frame: Frame) -> tuple[int, str, str, torch.Tensor]:
    """The reverse: bytes, dtype, side and data."""
    size_bytes, *texts = _ABOUT.unpack_from(memory_of(frame.payload), 0)
    dtype, side = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    data = frame.payload[_ABOUT.size :].clone()
    frame.release()
    return size_bytes, dtype, side, data


class LinkMessage(Work):
    """A message to or from another host. `peer` is a global rank, None for anybody."""

    def __init__(self, group: HostsMessages, doing: str, peer: int | None, tensor: Any) -> None:
        self.doing = doing
        self.peer = peer
        self.rest: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.dtype = self.side = ""
        self.record = 0
        self.finish: Callable[[], None] = lambda: None
        self.moved = 0
        self._tensor = tensor
        self._group = group
        self._matched = threading.Event()
        self._done = threading.Event()
        self._limit_s = group.timeout_s
        self._error: Exception | None = None

    def match(self, peer: int) -> None:
        """It has found its other end."""
        self.peer = peer
        self._matched.set()

    def is_matched(self) -> bool:
        return self._matched.is_set()

    def await_match(self, seconds: float) -> None:
        """Return once it has found its other end, or the time is over."""
        self._matched.wait(seconds)

    def complete(self) -> None:
        """It is over; called by a thread of the group's."""
        with torch.inference_mode():
            self.finish()
        self.rest = self.target = self._tensor = None
        self._group.records.end(self.record)
        self._matched.set()
        self._done.set()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            if timeout_s is not None:
                self._wait(timeout_s, None, timeout_s)
                return
            with self._group.deadlocks.waiting(self):
                self._wait(self._limit_s, self._group.deadlocks, None)
        except GroupError as error:
            raise self._group.with_report(error) from None

    def _wait(
        self, limit_s: float, deadlocks: DeadlockSearch | None, timeout_s: float | None
    ) -> None:
        end = time.monotonic() + limit_s
        while not self._done.wait(max(0.0, min(SLICE_S, end - time.monotonic()))):
            self._check()
            if deadlocks is not None:
                deadlocks.look()
            if time.monotonic() < end:
                continue
            if timeout_s is not None:
                raise CollectiveTimeout(f"{self.doing} is still under way")
            text = (
                f"{self.doing} on group {self._group.name} was not matched by its deadline of "
                f"{limit_s:g} s"
            )
            self._group.records.end(self.record, failed=True)
            missing = () if self.peer is None else (self._group.placement.members.index(self.peer),)
            raise self._group.end(Cause("CollectiveTimeout", text, missing=missing))

    def _check(self) -> None:
        try:
            if self.peer is None:
                self._group.check()
            else:
                self._group.check_peer(self.peer)
        except Exception as error:
            if not self._done.is_set():  # it may have come just before
                self._group.records.end(self.record, failed=True)
                self._error = error
                raise

    def is_completed(self) -> bool:
        return self._done.is_set() or self.exception() is not None

    def exception(self) -> Exception | None:
        if not self._done.is_set() and self._error is None:
            self._error = self._group.errored
        return self._error

    def source_rank(self) -> int:
        if self.dtype == "":
            return super().source_rank()
        self.wait()
        assert self.peer is not None
        return self._group.placement.members.index(self.peer)


class PostOffice:
    """The messages of one group from other hosts, on one rank."""

    def __init__(self, group: HostsMessages) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._unmatched: list[Arrival] = []
        self._wanted: list[tuple[int, LinkMessage]] = []
        self._replies: dict[tuple[int, int], LinkMessage] = {}
        self._coming: dict[tuple[int, int], LinkMessage] = {}

    def is_alone(self, work: LinkMessage | None) -> bool:
        """Whether this message waits for its match, and nothing else is to come in, or nothing at
        all without a message. Sends that have been announced need nothing of this rank."""
        with self._lock:
            receives = [wanted for _, wanted in self._wanted]
            if self._coming or receives not in ([], [work]):
                return False
            return work is None or bool(receives) or work in self._replies.values()

    def expect_reply(self, peer: int, serial: int, work: LinkMessage) -> None:
        """A send waits until its message is matched."""
        with self._lock:
            self._replies[peer, serial] = work

    def replied(self, peer: int, serial: int) -> LinkMessage | None:
        """The send whose message has been matched."""
        with self._lock:
            return self._replies.pop((peer, serial), None)

    def want(self, work: LinkMessage, tag: int) -> None:
        """A receive waits for a message, or takes the oldest one that fits."""
        with self._lock:
            for arrival in self._unmatched:
                if arrival.tag == tag and work.peer in (None, arrival.peer):
                    self._unmatched.remove(arrival)
                    break
            else:
                self._wanted.append((tag, work))
                return
        self._match(work, arrival)

    def withdraw(self, work: LinkMessage) -> bool:
        """Whether a receive could be taken back, because it has not been matched."""
        with self._lock:
            for entry in self._wanted:
                if entry[1] is work:
                    self._wanted.remove(entry)
                    return True
        return False

    def arrive(self, arrival: Arrival) -> None:
        """A message goes to the oldest receive that it fits, or waits for one."""
        with self._lock:
            for entry in self._wanted:
                if entry[0] == arrival.tag and entry[1].peer in (None, arrival.peer):
                    self._wanted.remove(entry)
                    break
            else:
                self._unmatched.append(arrival)
                return
        self._match(entry[1], arrival)

    def _match(self, work: LinkMessage, arrival: Arrival) -> None:
        assert work.target is not None
        group = self._group
        if arrival.dtype[:24] != work.dtype[:24] or arrival.size_bytes != work.target.numel():
            source = group.placement.members.index(arrival.peer)
            here = group.rank, work.side
            text = unfit_text(group.name, arrival.tag, source, arrival.side, *here)
            cause = Cause("MessageMismatch", text)
            # beside this thread, which may be a link's and must not wait
            threading.Thread(target=group.end, args=(cause,), name="unisono tells").start()
            return
        work.match(arrival.peer)
        is_whole = arrival.data.numel() == arrival.size_bytes
        if is_whole:
            with torch.inference_mode():
                work.target.copy_(arrival.data)
        else:
            with self._lock:
                self._coming[arrival.peer, arrival.serial] = work
        group.deadlocks.count_sent(arrival.peer)
        group.link(arrival.peer).send(Kind.MATCHED, group.key, arrival.serial)
        if is_whole:
            work.complete()

    def take_rest(self, peer: int, frame: Frame) -> None:
        """A piece of a large message, which has found its receive."""
        with self._lock:
            work = self._coming.get((peer, frame.tag))
        if work is None or work.target is None:
            frame.release()
            return
        end = frame.extra + frame.payload.numel()
        with torch.inference_mode():
            work.target[frame.extra : end].copy_(frame.payload)
        work.moved += frame.payload.numel()
        frame.release()
        if work.moved == work.target.numel():
            with self._lock:
                del self._coming[peer, frame.tag]
            work.complete()
