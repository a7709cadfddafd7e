"""Connections between processes of this user, and the socket that accepts them.

No port is opened and nothing has a name in the file system: a process that makes groups has an
abstract unix socket with a random name, its *rendezvous server*. A message is one packet of
JSON, and may carry file descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.makings import look
from unisono.errors import GroupsDiffer, RendezvousError

_LONGEST_MESSAGE_BYTES = 1 << 19
_ROOM_FOR_DESCRIPTORS = socket.CMSG_LEN(253 * array("i").itemsize)  # the most per message
_SEND_S = 10.0
"""How long the other side may take to read earlier messages."""
_HELLO_S = 10.0
"""How long a connection may stay silent before it is closed."""
_GLANCE_S = 0.1
"""How often a wait for a message checks that it can still arrive."""


class Departed(RendezvousError):
    """A process left while a group was made: the others may try again."""


class TooFewDescriptors(RendezvousError):
    """This process, or the machine, has no file descriptors left."""

    def __init__(self, reason: str) -> None:
        limit = os.sysconf("SC_OPEN_MAX")  # importing the module `resource` may need one
        super().__init__(
            f"process {os.getpid()} has no file descriptors left for the group ({reason}; its "
            f"limit is {limit}): raise it (ulimit -n); two for each rank and ten more are enough"
        )


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise TooFewDescriptors if the system's errors say so: no peer is at fault."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TooFewDescriptors(error.strerror or "") from error


def new_socket() -> socket.socket:
    with descriptors_needed():
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def peer_uid(connected: socket.socket) -> int:
    """The user at the other end, according to the kernel."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


class Connection:
    """A connected unix socket. A malformed message raises ValueError."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_MESSAGE_BYTES)
        self.descriptors: list[int] = []
        """Descriptors that came with messages; ours to close."""
        self.hello: dict[str, Any] = {}
        """What a visitor sent first: its group (`key`), its `rank`, and more."""
        self.key, self.rank = "", -1

    @classmethod
    def connect(cls, address: str) -> Connection:
        """Connect to the server at `address`; its owner must be this user. BlockingIOError means
        that its queue of connections is full, for now."""
        caller = new_socket()
        try:
            caller.settimeout(_SEND_S)
            caller.connect(b"\0" + address.encode())
            if peer_uid(caller) != os.geteuid():
                raise RendezvousError(
                    f"rank 0 runs as user {peer_uid(caller)}, but this rank as {os.geteuid()}"
                )
        except BaseException:
            caller.close()
            raise
        return cls(caller)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        self._socket.settimeout(_SEND_S)
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def try_send(self, message: dict[str, Any]) -> None:
        """As `send`, but do nothing if the other side is gone."""
        with contextlib.suppress(OSError):
            self.send(message)

    def poll(self) -> dict[str, Any] | None:
        """The next message if it has arrived."""
        self._socket.settimeout(0)
        read = self._socket.recvmsg
        limits = _LONGEST_MESSAGE_BYTES, _ROOM_FOR_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        try:
            try:
                data, extras, seen, _ = read(*limits)
            except ConnectionResetError:  # raised once, before pending messages
                data, extras, seen, _ = read(*limits)
        except BlockingIOError:
            return None
        for level, kind, payload in extras:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self.descriptors += received
        if seen & socket.MSG_CTRUNC:  # the kernel dropped those for which there was no room
            raise TooFewDescriptors("some descriptors that were sent did not arrive")
        if not data:
            raise ConnectionError("the other side closed the connection")
        try:
            message = json.loads(data)
        except RecursionError:
            raise ValueError("a message is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("a message is not a JSON object")
        return message

    def receive(
        self, deadline: Deadline, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for a message; an error that the other side reports is raised here. `check` is
        called periodically, and raises when no message will come; one that has arrived counts.
        TimeoutError: the deadline has passed."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while (message := self.poll()) is None:
            left_s = deadline.left_s()
            if not left_s:
                raise TimeoutError("the other side did not answer in time")
            if not poller.poll(1000 * min(_GLANCE_S, left_s)):
                look()
                try:
                    check()
                except Exception:
                    if not poller.poll(0):
                        raise
        if "error" in message:
            kind = GroupsDiffer if message.get("differs") else RendezvousError
            raise (Departed if message.get("again") else kind)(str(message["error"]))
        return message

    def is_closed(self) -> bool:
        """Whether the other side, from which no message is expected now, has hung up."""
        self._socket.settimeout(0)  # with a timeout, Python waits despite the flags
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def dismiss(self, answer: dict[str, Any]) -> None:
        self.try_send(answer)
        self.close()

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


_servers: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _close_after_fork() -> None:
    """In a forked child: the sockets are the parent's, and must not stay open when it ends."""
    for server in list(_servers):
        server.close_socket()


if hasattr(os, "register_at_fork"):  # the package also installs where the engine cannot run
    os.register_at_fork(after_in_child=_close_after_fork)


class RendezvousServer:
    """A listening socket of this process, and early visitors. Shared by all groups that come
    from one world. A group of one has no socket, unless it grows."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._opened: tuple[socket.socket, str] | None = None
        self._opening = threading.Lock()
        self._spares: list[int] = []
        self._silent: dict[Connection, Deadline] = {}
        self._early: dict[str, list[Connection]] = {}
        self._owners = 1
        self._lock = threading.Lock()
        _servers.add(self)

    @property
    def address(self) -> str:
        """Where it listens, from the moment that this is asked."""
        return self._open()[1]

    def _open(self) -> tuple[socket.socket, str]:
        with self._opening:  # threads may ask at the same time
            if self._opened is None:
                opened, address = new_socket(), f"unisono-{os.urandom(16).hex()}"
                opened.bind(b"\0" + address.encode())
                opened.listen(1024)
                opened.setblocking(False)
                self._opened = opened, address
            return self._opened

    def share(self) -> RendezvousServer:
        self._owners += 1
        return self

    def close(self) -> None:
        """Count one owner fewer; the last one closes the socket."""
        self._owners -= 1
        if self._owners == 0 and self.pid == os.getpid():
            self.close_socket()

    def close_socket(self) -> None:
        for visitors in (*self._early.values(), self._silent):
            for visitor in visitors:
                visitor.close()
        self._early.clear()
        self._silent.clear()
        if self._opened is not None:
            self._opened[0].close()
        self.use_spare()

    def keep_spare(self) -> None:
        """Reserve a descriptor, to tell the others if there are none left."""
        if not self._spares:
            self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def use_spare(self) -> None:
        """Free the reserved descriptor; each of several threads frees its own."""
        with contextlib.suppress(IndexError):
            while True:
                os.close(self._spares.pop())

    def visitors_for(self, key: str, timeout_s: float) -> list[Connection]:
        """The visitors for this group; visitors for other groups stay queued."""
        with self._lock:
            if key not in self._early:
                for visitor in self._new_visitors(timeout_s):
                    self._early.setdefault(visitor.key, []).append(visitor)
            return self._early.pop(key, [])

    def keep_waiting(self, key: str, visitors: Sequence[Connection]) -> None:
        """Put visitors for this group back, for the next call."""
        self._early[key] = list(visitors)

    def answer_silent(self, answer: dict[str, Any]) -> None:
        """Answer visitors that have not said yet which group they come for."""
        for connection in self._silent:
            connection.try_send(answer)

    def _new_visitors(self, timeout_s: float) -> list[Connection]:
        """Accept connections for a while; returns the visitors that have said who they are."""
        poller, (listener, _) = select.poll(), self._open()
        poller.register(listener, select.POLLIN)
        for connection in self._silent:
            poller.register(connection, select.POLLIN)
        if not poller.poll(max(1, int(timeout_s * 1000))):
            return []
        with contextlib.suppress(OSError), descriptors_needed():  # none there, or gone again
            accepted, _ = listener.accept()
            if peer_uid(accepted) == os.geteuid():
                self._silent[Connection(accepted)] = Deadline(_HELLO_S)
            else:
                accepted.close()
        visitors = []
        for connection, patience in list(self._silent.items()):
            try:
                hello = connection.poll()
                if hello is not None:
                    connection.hello = hello
                    connection.key, connection.rank = str(hello["key"]), int(hello["rank"])
                    visitors.append(connection)
                elif not patience.left_s():
                    raise ValueError("it sent no hello")
                else:
                    continue
            except TooFewDescriptors as error:
                connection.dismiss({"error": f"rank 0: {error}"})
                del self._silent[connection]
                raise
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                connection.close()  # not one of ours
            del self._silent[connection]
        return visitors
