"""One connection between two processes of different hosts, by which all their groups talk.

gloo moves the bytes: its send and receive, on a process group of two that is made for this pair.
gloo closes every connection of such a group when a wait times out, so none ever does: a thread of
this process receives whatever the peer sends, in frames that say to which group they belong, and
whoever waits for a frame waits in Python, with a limit of its own. So a failure in one group
leaves the connection, and all other groups on it, as they are.

A connection that ends wakes those who wait in gloo for what has not begun to move, and nobody else.
So the only wait in gloo is for the head of a frame, which is short; a large body goes ahead of its
head, and has come when that comes. Nobody waits for a send: each head says how many frames its
sender has received, and who hears that may use the memory of these again.

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

from unisono.torch_autograd import outlasting_inference_mode

FRAME_BYTES = 512 * 1024
"""The most that one frame carries."""

_HEAD = struct.Struct("<8sBqqIQ27x")  # payloads begin where any dtype may
_DEPTH = 4
"""How many receives of large bodies are posted, and how many may be under way."""

_HEADS = 16
"""How many receives of heads are posted, and how many frames may come without an answer."""

_SMALL_BYTES = 8 * 1024
"""What a head carries by itself."""

_FOREVER = timedelta(days=3650)
_HEAD_TAG, _BODY_TAG, _NOBODYS_TAG = 1, 2, 3
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
    RECEIVED = 8
    """Nothing but how many frames the sender has received."""


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


def _nothing() -> None:
    pass


class _Buffer(NamedTuple):
    """Memory for a frame, as a tensor and, for what is short, as an array."""

    tensor: torch.Tensor
    array: Any

    @classmethod
    def of(cls, size_bytes: int) -> _Buffer:
        array = numpy.empty(size_bytes, numpy.uint8)
        with outlasting_inference_mode():
            return cls(torch.from_numpy(array), array)


class _Sent(NamedTuple):
    """A frame that may not have arrived yet: its number, and what gloo still needs."""

    number: int
    works: list[Any]
    head: _Buffer
    body: _Buffer | None


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
        self._gloo: Any = gloo
        self._other = 1 - gloo.rank()
        self._on_frame = on_frame
        self._on_end = on_end
        self._room = threading.Condition()
        self._under_way: collections.deque[_Sent] = collections.deque()
        self._large_under_way = 0
        self._sent = 0
        self._received = 0
        self._unanswered = 0
        self._idle_buffers: list[_Buffer] = []
        self._is_over = False
        self._said_goodbye = False
        self._thread = threading.Thread(
            target=self._receive, name=f"unisono link to rank {peer}", daemon=True
        )

    def start(self) -> None:
        """Let frames come in, and not before whoever they are for can answer on this link."""
        self._thread.start()

    # -- sending ---------------------------------------------------------------------------------

    def send(
        self,
        kind: Kind,
        group: bytes,
        tag: int = 0,
        extra: int = 0,
        payload: torch.Tensor | None = None,
        check: Check = _nothing,
    ) -> None:
        """Send a frame; its payload, bytes in one piece, is free again when this returns. Frames
        arrive in the order in which they are sent. On a link that is over it does nothing.

        A large one waits until earlier ones have arrived, and calls `check` meanwhile."""
        length = 0 if payload is None else payload.numel()
        is_large = length > _SMALL_BYTES
        with self._room:
            while is_large and self._large_under_way >= _DEPTH and not self._is_over:
                self._room.wait(_SLICE_S)
                check()
            if self._is_over:
                return
            head = _Buffer.of(_HEAD.size + (0 if is_large else length))
            _HEAD.pack_into(head.array, 0, group, kind, tag, extra, length, self._received)
            body = None
            parts = [(head.tensor, _HEAD_TAG)]
            if payload is not None and is_large:
                body = self._buffer()
                body.array[:length] = payload.numpy()
                parts.insert(0, (body.tensor[:length], _BODY_TAG))
            elif payload is not None:
                head.array[_HEAD.size :] = payload.numpy()
            try:
                works = [self._gloo.send([part], self._other, its_tag) for part, its_tag in parts]
            except RuntimeError:
                return  # the receiving thread learns why
            self._sent += 1
            self._under_way.append(_Sent(self._sent, works, head, body))
            self._large_under_way += is_large
            self._unanswered = 0

    def send_row(
        self, group: bytes, tag: int, row: torch.Tensor, check: Check, kind: Kind = Kind.DATA
    ) -> None:
        """Send a row of bytes of any length, in as many frames as it takes; none for no bytes."""
        if 0 < row.numel() <= FRAME_BYTES:
            self.send(kind, group, tag, 0, row, check)
            return
        for begin in range(0, row.numel(), FRAME_BYTES):
            self.send(kind, group, tag, begin, row[begin : begin + FRAME_BYTES], check)

    def wake(self) -> None:
        """Have those who wait until they may send look whether to wait any longer."""
        with self._room:
            self._room.notify_all()

    # -- receiving -------------------------------------------------------------------------------

    def _receive(self) -> None:
        why = ""
        try:
            bodies = collections.deque(self._post(self._buffer(), _BODY_TAG) for _ in range(_DEPTH))
            small = (_Buffer.of(_HEAD.size + _SMALL_BYTES) for _ in range(_HEADS))
            heads = collections.deque(self._post(buffer, _HEAD_TAG) for buffer in small)
            while True:
                work, head = heads.popleft()
                work.wait(_FOREVER)
                self._deliver(head, bodies)
                heads.append(self._post(head, _HEAD_TAG))
        except Exception as error:  # also of those who get the frames: nobody may wait for more
            why = str(error).strip().partition("\n")[0] or repr(error)
            self.hang_up()  # so that the peer knows, too
        with self._room:
            self._is_over = True
            self._room.notify_all()
        self._on_end(self.peer, "" if self._said_goodbye else _describe_end(why))

    def _post(self, buffer: _Buffer, tag: int) -> tuple[Any, _Buffer]:
        return self._gloo.recv([buffer.tensor], self._other, tag), buffer

    def _deliver(self, head: _Buffer, bodies: collections.deque[tuple[Any, _Buffer]]) -> None:
        """Pass a frame on, and answer that it has come where its sender waits for that."""
        group, kind, tag, extra, length, has_received = _HEAD.unpack_from(head.array, 0)
        is_large = length > _SMALL_BYTES
        release: Callable[[], None] = _nothing
        if is_large:
            work, body = bodies.popleft()
            work.wait(_FOREVER)
            payload = body.tensor[:length]
            release = lambda: self._give_back(body)  # noqa: E731
            bodies.append(self._post(self._buffer(), _BODY_TAG))
        else:
            payload = torch.from_numpy(head.array[_HEAD.size : _HEAD.size + length].copy())
        with self._room:
            self._received += 1
            self._unanswered += kind != Kind.RECEIVED
            self._forget_sent(has_received)
            must_answer = is_large or self._unanswered >= _HEADS // 2 or kind == Kind.GOODBYE
        if must_answer:
            self.send(Kind.RECEIVED, b"")
        if kind == Kind.GOODBYE:
            self._said_goodbye = True
        elif kind != Kind.RECEIVED:
            self._on_frame(self.peer, Frame(kind, group, tag, extra, payload, release))

    def _forget_sent(self, received: int) -> None:
        """The peer has received so many frames in all; called with the lock."""
        while self._under_way and self._under_way[0].number <= received:
            body = self._under_way.popleft().body
            if body is not None:
                self._large_under_way -= 1
                self._idle_buffers.append(body)
            self._room.notify_all()

    def _buffer(self) -> _Buffer:
        with self._room:
            if self._idle_buffers:
                return self._idle_buffers.pop()
        return _Buffer.of(FRAME_BYTES)

    def _give_back(self, buffer: _Buffer) -> None:
        with self._room:
            if len(self._idle_buffers) < 2 * _DEPTH:
                self._idle_buffers.append(buffer)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, and end the connection, its thread, and what gloo has for it."""
        self.send(Kind.GOODBYE, b"")
        end = time.monotonic() + _GOODBYE_S
        with self._room:
            while self._under_way and not self._is_over and time.monotonic() < end:
                self._room.wait(_SLICE_S)
        self._said_goodbye = True
        self.hang_up()
        if self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_S)
        with self._room:
            self._is_over = True
            self._gloo = None  # whose sockets and threads go with its last owner
            self._under_way.clear()
            self._idle_buffers.clear()
            self._room.notify_all()

    def hang_up(self) -> None:
        """End the connection: gloo's abort does nothing, but a receive that times out closes it."""
        gloo = self._gloo
        if gloo is not None:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                work = gloo.recv([nothing], self._other, _NOBODYS_TAG)
                work.wait(timedelta(milliseconds=1))


def _describe_end(reason: str) -> str:
    """What follows a rank's name, by what gloo says."""
    if any(sign in reason.lower() for sign in ("closed by peer", "reset by peer", "broken pipe")):
        return "has ended"
    return f"cannot be reached any more ({reason})"
