"""One connection between two processes of this user: framed JSON, and descriptors beside it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from unisono.errors import RendezvousError

_LONGEST_MESSAGE_BYTES = 1 << 22
_FOR_EVER_S = 1e8  # the clocks of sockets and stores do not go much further
_MOST_DESCRIPTORS = 253  # that Linux lets travel with one message
_GLANCE_S = 0.2
"""How often whoever waits for a message checks that somebody can still send it."""


class Deadline:
    """A moment to come."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + min(timeout_s, _FOR_EVER_S)

    def left_s(self) -> float:
        """Seconds left, 0 if none."""
        return max(0.0, self._end - time.monotonic())


class Departed(RendezvousError):
    """Somebody left while a group was made: those who stayed may try again."""


class NoAnswer(RendezvousError):
    """The other side has said nothing until the deadline."""


class TooFewDescriptors(RendezvousError):
    """This process may open no more files, or the machine has no more."""

    def __init__(self, reason: str) -> None:
        limit = os.sysconf("SC_OPEN_MAX")  # the module `resource` may need one to be imported
        super().__init__(
            f"process {os.getpid()} has no file descriptors left for the group ({reason}; its "
            f"limit is {limit}): raise it (ulimit -n), two for each rank and ten more will do"
        )


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise TooFewDescriptors where the system's errors say so: no peer is to blame."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TooFewDescriptors(error.strerror or "") from error


class Connection:
    """A connected unix socket. Whatever arrives that is not a message raises ValueError."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unread = b""
        self.descriptors: list[int] = []
        """Descriptors that came with messages; ours to close."""

    @classmethod
    def connect(cls, address: str) -> Connection:
        """Connect to the lobby at `address`; its owner must be this user.

        BlockingIOError means that its queue of connections is full, for now.
        """
        with descriptors_needed():
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection = cls(caller)
        try:
            caller.settimeout(10.0)
            caller.connect(b"\0" + address.encode())
            if connection.peer_uid() != os.geteuid():
                raise RendezvousError(
                    f"rank 0 runs as user {connection.peer_uid()}, this rank as {os.geteuid()}"
                )
        except BaseException:
            caller.close()
            raise
        return connection

    def fileno(self) -> int:
        """For select and poll."""
        return self._socket.fileno()

    def peer_uid(self) -> int:
        """The user at the other end, as the kernel knows it."""
        return peer_uid(self._socket)

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        """Send a message, and descriptors with it."""
        data = json.dumps(message).encode()
        frame = struct.pack("<I", len(data)) + data
        self._socket.settimeout(10.0)
        sent = 0
        if descriptors:
            sent = socket.send_fds(self._socket, [frame], descriptors)
        if sent < len(frame):
            self._socket.sendall(frame[sent:])

    def try_send(self, message: dict[str, Any]) -> None:
        """As `send`; whoever is gone needs no message."""
        with contextlib.suppress(OSError):
            self.send(message)

    def poll(self) -> dict[str, Any] | None:
        """Read what is there without waiting; a message once one is complete."""
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            part = self._recv(1 << 16)
            if not part:
                raise ConnectionError("the other side closed the connection")
            self._unread += part
        if len(self._unread) < 4:
            return None
        length = _length(self._unread[:4])
        if len(self._unread) < 4 + length:
            return None
        data, self._unread = self._unread[4 : 4 + length], self._unread[4 + length :]
        return _message(data)

    def receive(
        self, deadline: Deadline, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for a message; an error that the other side reports is raised here. `check` is
        called now and then, and raises when no message will come; one that is there counts."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while deadline.left_s() and not poller.poll(1000 * min(_GLANCE_S, deadline.left_s())):
            try:
                check()
            except Exception:
                if not poller.poll(0):
                    raise
        self._socket.settimeout(max(deadline.left_s(), 0.001))
        try:
            message = _message(self._exactly(_length(self._exactly(4))))
        except TimeoutError as error:
            raise NoAnswer("the other side did not answer in time") from error
        if "error" in message:
            raise (Departed if message.get("again") else RendezvousError)(str(message["error"]))
        return message

    def is_closed(self) -> bool:
        """Whether the other side, of which nothing is expected now, has hung up."""
        self._socket.settimeout(0)  # with one, Python waits for it whatever the flags say
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._recv(count - len(data))
            if not part:
                raise ConnectionError("the other side closed the connection")
            data += part
        return data

    def _recv(self, count: int) -> bytes:
        # not socket.recv_fds, which ignores its flags
        room = socket.CMSG_LEN(_MOST_DESCRIPTORS * array("i").itemsize)
        data, extras, seen, _ = self._socket.recvmsg(count, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in extras:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.descriptors += received
        if seen & socket.MSG_CTRUNC:  # the kernel dropped those for which there was no room
            raise TooFewDescriptors("some that were sent have not arrived")
        return data

    def close(self) -> None:
        """Hang up, and close what came."""
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def peer_uid(connected: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _length(head: bytes) -> int:
    (length,) = struct.unpack("<I", head)
    if length > _LONGEST_MESSAGE_BYTES:
        raise ValueError("a message that is too long")
    return int(length)


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message that is not an object")
    return message
