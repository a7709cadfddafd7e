"""What is told of each new group's segment: the listeners of this process, and the launcher,
which gives its ranks a socket for copies of descriptors, of every segment and of notes of waits,
and for the watch's reports."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

SEGMENT = b"S"
REPORT = b"R"
NOTES = b"N"
_LONGEST = 1 << 16

listeners: list[Callable[[int], None]] = []
"""Called with the descriptor of each new group's segment."""
_socket: tuple[socket.socket, int] | None = None


def use_launcher_socket(descriptor: int) -> None:
    """The socket to the launcher; for this process only, not for its children."""
    global _socket
    os.set_inheritable(descriptor, False)
    _socket = socket.socket(fileno=descriptor), os.getpid()


def announce_segment(descriptor: int) -> None:
    """A group was made, with the segment behind this descriptor."""
    _send(SEGMENT, [descriptor])
    for listener in tuple(listeners):
        listener(descriptor)


def send_notes(descriptor: int) -> None:
    """Give the launcher this process's notes of its waits."""
    _send(NOTES + str(os.getpid()).encode(), [descriptor])


def tell_launcher(report: str) -> bool:
    """Send a report to the launcher; returns whether one listens."""
    text = report.encode()
    return len(text) < _LONGEST and _send(REPORT + text)


def receive_message(connection: socket.socket) -> tuple[bytes, list[int]]:
    """On the launcher's side: a message, and descriptors that the caller now owns. Empty if all
    senders have ended."""
    message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 4)
    return message, descriptors


def new_socket_pair() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the one that all its ranks inherit."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _send(message: bytes, descriptors: list[int] | None = None) -> bool:
    if _socket is None or _socket[1] != os.getpid():
        return False
    with contextlib.suppress(OSError):  # the launcher has ended, and so will we
        socket.send_fds(_socket[0], [message], descriptors or [])
        return True
    return False
