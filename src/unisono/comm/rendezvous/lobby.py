"""Where a process receives those who come to make a group with it.

A *lobby* is an abstract unix socket with a random name, open to this user alone. No port is opened
and nothing has a name in the file system.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from unisono.comm.rendezvous.announcements import Announcement
from unisono.comm.rendezvous.unix_socket import (
    Connection,
    Deadline,
    TooFewDescriptors,
    descriptors_needed,
)

_HELLO_S = 10.0
"""How long a connection may stay silent before it is hung up."""


class Visitor:
    """A process that has said for which group it comes, and as which rank."""

    def __init__(self, connection: Connection, hello: Announcement) -> None:
        self.connection = connection
        self.hello = hello
        self.key = str(hello["key"])
        self.rank = int(hello["rank"])

    def dismiss(self, answer: dict[str, Any]) -> None:
        """Say why, and hang up."""
        self.connection.try_send(answer)
        self.connection.close()


_lobbies: weakref.WeakSet[Lobby] = weakref.WeakSet()


def _close_after_fork() -> None:
    """In a forked child: the sockets are the parent's, and must not stay open when it ends."""
    for lobby in list(_lobbies):
        lobby.close_socket()


if hasattr(os, "register_at_fork"):  # the package also installs where the engine cannot run
    os.register_at_fork(after_in_child=_close_after_fork)


class Lobby:
    """A listening socket of this process, and the visitors that came too early.

    Shared by all groups that grew out of one world; the last one to close it closes the socket.
    """

    def __init__(self) -> None:
        self.address = f"unisono-{os.urandom(16).hex()}"
        self.pid = os.getpid()
        with descriptors_needed():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._spares: list[int] = []
        self._socket.bind(b"\0" + self.address.encode())
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self._silent: dict[Connection, Deadline] = {}
        self._early: dict[str, list[Visitor]] = {}
        self._owners = 1
        self._lock = threading.Lock()
        _lobbies.add(self)

    def share(self) -> Lobby:
        """Count one more owner."""
        self._owners += 1
        return self

    def close(self) -> None:
        """Count one owner less; the last one closes the socket."""
        self._owners -= 1
        if self._owners == 0 and self.pid == os.getpid():
            self.close_socket()

    def close_socket(self) -> None:
        """Close the socket, and hang up on all visitors."""
        for visitors in self._early.values():
            for visitor in visitors:
                visitor.connection.close()
        for connection in self._silent:
            connection.close()
        self._early.clear()
        self._silent.clear()
        self._socket.close()
        self.use_spare()

    def keep_spare(self) -> None:
        """Keep a descriptor back, by which the others are told if there are no more of them."""
        if not self._spares:
            self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def use_spare(self) -> None:
        """Free the descriptor that was kept back; of several threads each frees what it took."""
        with contextlib.suppress(IndexError):
            while True:
                os.close(self._spares.pop())

    def visitors_for(self, key: str, timeout_s: float) -> list[Visitor]:
        """Those who have come for this group; whoever comes for another waits for it."""
        with self._lock:
            if key not in self._early:
                for visitor in self._new_visitors(timeout_s):
                    self._early.setdefault(visitor.key, []).append(visitor)
            return self._early.pop(key, [])

    def keep_waiting(self, key: str, visitors: Sequence[Visitor]) -> None:
        """Let visitors for this group be found again by the next who asks."""
        self._early[key] = list(visitors)

    def answer_silent(self, answer: dict[str, Any]) -> None:
        """Answer those who have not said yet for which group they come."""
        for connection in self._silent:
            connection.try_send(answer)

    def _new_visitors(self, timeout_s: float) -> list[Visitor]:
        """Accept connections for a while; the visitors that have said who they are."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        for connection in self._silent:
            poller.register(connection, select.POLLIN)
        if not poller.poll(max(1, int(timeout_s * 1000))):
            return []
        with contextlib.suppress(OSError), descriptors_needed():  # nobody there, or gone again
            accepted, _ = self._socket.accept()
            self._silent[Connection(accepted)] = Deadline(_HELLO_S)
        visitors = []
        for connection, patience in list(self._silent.items()):
            hello = None
            try:
                if connection.peer_uid() != os.geteuid() or not patience.left_s():
                    raise ValueError("another user's, or one that says nothing")
                hello = connection.poll()
                if hello is None:
                    continue
                visitors.append(Visitor(connection, hello))
            except TooFewDescriptors as error:
                connection.try_send({"error": f"rank 0: {error}"})
                connection.close()
                raise
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                connection.close()  # noise: not our business
            finally:
                if hello is not None or connection.fileno() < 0:
                    del self._silent[connection]
        return visitors
