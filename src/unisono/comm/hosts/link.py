"""One connection between two processes of different hosts, by which all their groups talk.

gloo moves the bytes: its send and receive, on a process group of two that is made for this pair.
gloo closes every connection of such a group when a wait times out, so none ever does: a thread of
this process receives whatever the peer sends, in frames that say to which group they belong, and
whoever waits for a frame waits in Python, with a limit of its own. So a failure in one group
leaves the connection, and all other groups on it, as they are.

A process that ends in order says goodbye first. A connection that ends without is a process that
died. A network that is gone does not show here, but on the line beside it (control_line.py).
"""

from __future__ import annotations

import collections
import contextlib
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import numpy
import torch

FRAME_BYTES = 512 * 1024
"""The most that one frame carries."""

_HEADER = struct.Struct("<8sBqqI35x")  # payloads begin where any dtype may
_DEPTH = 4
"""How many receives are posted, and how many large sends may be under way."""

_SMALL_ONES = 32
"""How many small sends may have ended before their memory is given back."""

_SMALL_BYTES = 8 * 1024
_FOREVER = timedelta(days=3650)
_DATA_TAG, _NOBODYS_TAG = 1, 2
_SLICE_S = 0.05
_GOODBYE_S = 1.0


def memory_of(row: torch.Tensor) -> memoryview:
    """The memory of a row of bytes, for structs."""
    return memoryview(row.numpy())  # type: ignore[arg-type]


class Kind(IntEnum):
    """What a frame is."""

    DATA = 1
    CLOSED = 3
    """The sender has closed the group."""
    GOODBYE = 4
    """The sender's process has no more to say."""
    MESSAGE = 5
    """A message is announced; a small one is in it."""
    MATCHED = 6
    """A message has found its receive; of a large one the rest may come."""
    REST = 7


class Frame(NamedTuple):
    """What has arrived; `release` gives its memory back once `payload` has been read."""

    kind: int
    group: bytes
    tag: int
    extra: int
    payload: torch.Tensor
    release: Callable[[], None]


Check = Callable[[], None]
"""Raises when whoever waits should do so no longer."""


class _Buffer(NamedTuple):
    """Memory for a frame, as a tensor and, for what is short, as an array."""

    tensor: torch.Tensor
    array: Any

    @classmethod
    def of(cls, size_bytes: int) -> _Buffer:
        array = numpy.empty(size_bytes, numpy.uint8)
        return cls(torch.from_numpy(array), array)


def _nothing() -> None:
    pass


class Link:
    """A connection to the process of global rank `peer`. `on_frame` is called with what arrives,
    `on_end` once when nothing can arrive any more, with what follows the rank's name in a sentence,
    or "" after a goodbye; both in a thread of the link's own, from `start` on."""

    def __init__(
        self,
        peer: int,
        gloo: Any,
        on_frame: Callable[[int, Frame], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        self.peer = peer
        self._gloo = gloo
        self._other = 1 - gloo.rank()
        self._on_frame = on_frame
        self._on_end = on_end
        self._room = threading.Condition()
        self._under_way: collections.deque[tuple[Any, _Buffer]] = collections.deque()
        self._large_under_way = 0
        self._idle_buffers: list[_Buffer] = []
        self._is_over = False
        self._said_goodbye = False
        self._threads = [
            threading.Thread(target=target, name=f"unisono link to rank {peer}", daemon=True)
            for target in (self._receive, self._reap)
        ]

    def start(self) -> None:
        """Let frames come in, and not before whoever they are for can answer on this link."""
        for thread in self._threads:
            thread.start()

    # -- sending ---------------------------------------------------------------------------------

    def send(
        self,
        kind: Kind,
        group: bytes,
        tag: int = 0,
        extra: int = 0,
        payload: torch.Tensor | None = None,
        check: Check | None = lambda: None,
    ) -> None:
        """Send a frame; its payload, bytes in one piece, is free again when this returns. Frames
        arrive in the order in which they are sent. On a link that is over it does nothing.

        It waits until earlier ones are on their way; without a `check`, for small frames from a
        link's own thread, it does not."""
        length = 0 if payload is None else payload.numel()
        with self._room:
            while check and self._large_under_way >= _DEPTH and not self._is_over:
                self._room.wait(_SLICE_S)
                check()
            if self._is_over:
                return
            size = _HEADER.size + length
            buffer = self._buffer() if size > _SMALL_BYTES else _Buffer.of(size)
            _HEADER.pack_into(buffer.array, 0, group, kind, tag, extra, length)
            if payload is not None:
                if size > _SMALL_BYTES:
                    buffer.tensor[_HEADER.size : size].copy_(payload)
                else:
                    buffer.array[_HEADER.size :] = payload.numpy()
            frame = buffer.tensor if size <= _SMALL_BYTES else buffer.tensor[:size]
            try:
                work = self._gloo.send([frame], self._other, _DATA_TAG)
            except RuntimeError:
                return  # the receiving thread learns why
            self._under_way.append((work, buffer))
            self._large_under_way += size > _SMALL_BYTES
            if self._large_under_way or len(self._under_way) > _SMALL_ONES:
                self._room.notify_all()  # of a few small ones nobody needs to know yet

    def send_row(
        self, group: bytes, tag: int, row: torch.Tensor, check: Check, kind: Kind = Kind.DATA
    ) -> None:
        """Send a row of bytes of any length, in as many frames as it takes; none for no bytes."""
        if 0 < row.numel() <= FRAME_BYTES:
            self.send(kind, group, tag, 0, row, check)
            return
        for begin in range(0, row.numel(), FRAME_BYTES):
            self.send(kind, group, tag, begin, row[begin : begin + FRAME_BYTES], check)

    def _reap(self) -> None:
        """Wait for sends, so that nobody else has to."""
        while True:
            with self._room:
                while not self._under_way:
                    if self._is_over:
                        return
                    self._room.wait()
                work, buffer = self._under_way[0]
            with contextlib.suppress(RuntimeError):  # the receiving thread learns why
                work.wait(_FOREVER)
            with self._room:
                self._under_way.popleft()
                if buffer.array.size > _SMALL_BYTES:
                    self._large_under_way -= 1
                    self._idle_buffers.append(buffer)
                self._room.notify_all()

    # -- receiving -------------------------------------------------------------------------------

    def _receive(self) -> None:
        why = ""
        try:
            posted = collections.deque(self._post(self._buffer()) for _ in range(_DEPTH))
            while True:
                work, buffer = posted.popleft()
                work.wait(_FOREVER)
                posted.append(self._post(self._deliver(buffer)))
        except Exception as error:  # also of those who get the frames: nobody may wait for more
            why = str(error).strip().partition("\n")[0] or repr(error)
            self.hang_up()  # so that the peer knows, too
        with self._room:
            self._is_over = True
            self._room.notify_all()
        self._on_end(self.peer, "" if self._said_goodbye else _describe_end(why))

    def _post(self, buffer: _Buffer) -> tuple[Any, _Buffer]:
        return self._gloo.recv([buffer.tensor], self._other, _DATA_TAG), buffer

    def _deliver(self, buffer: _Buffer) -> _Buffer:
        """Pass a frame on; the memory for the next one."""
        group, kind, tag, extra, length = _HEADER.unpack_from(buffer.array, 0)
        end = _HEADER.size + length
        if kind == Kind.GOODBYE:
            self._said_goodbye = True
            return buffer
        if length <= _SMALL_BYTES:
            payload = torch.from_numpy(buffer.array[_HEADER.size : end].copy())
            self._on_frame(self.peer, Frame(kind, group, tag, extra, payload, _nothing))
            return buffer
        payload = buffer.tensor[_HEADER.size : end]
        frame = Frame(kind, group, tag, extra, payload, lambda: self._give_back(buffer))
        self._on_frame(self.peer, frame)
        return self._buffer()

    def _buffer(self) -> _Buffer:
        with self._room:
            if self._idle_buffers:
                return self._idle_buffers.pop()
        return _Buffer.of(_HEADER.size + FRAME_BYTES)

    def _give_back(self, buffer: _Buffer) -> None:
        with self._room:
            if len(self._idle_buffers) < 2 * _DEPTH:
                self._idle_buffers.append(buffer)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, and end the connection and its threads."""
        self.send(Kind.GOODBYE, b"")
        with self._room:
            self._room.notify_all()
        end = time.monotonic() + _GOODBYE_S
        with self._room:
            while self._under_way and not self._is_over and time.monotonic() < end:
                self._room.wait(_SLICE_S)
        self._said_goodbye = True
        self.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_GOODBYE_S)

    def hang_up(self) -> None:
        """End the connection: gloo's abort does nothing, but a receive that times out closes it."""
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            work = self._gloo.recv([nothing], self._other, _NOBODYS_TAG)
            work.wait(timedelta(milliseconds=1))


def _describe_end(reason: str) -> str:
    """What follows a rank's name, by what gloo says."""
    if any(sign in reason.lower() for sign in ("closed by peer", "reset by peer", "broken pipe")):
        return "has ended"
    return f"cannot be reached any more ({reason})"
