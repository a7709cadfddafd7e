"""Who else holds on to the records of this process's groups, from the moment a group is there.

A launcher gives its ranks a socket: on it goes a copy of every segment's descriptor, which is then
readable whatever becomes of this process, and what the watch has to say to the launcher. Inside
the process whoever follows the groups is called.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

SEGMENT = b"S"
REPORT = b"R"
_LONGEST = 1 << 16

listeners: list[Callable[[int], None]] = []
"""Called with the descriptor of each new group's segment."""
_line: tuple[socket.socket, int] | None = None


def take_line(descriptor: int) -> None:
    """The socket to the launcher; this process's alone, and not its children's."""
    global _line
    os.set_inheritable(descriptor, False)
    _line = socket.socket(fileno=descriptor), os.getpid()


def announce(descriptor: int) -> None:
    """A group has come to be; its segment is behind this descriptor."""
    _send(SEGMENT, [descriptor])
    for listener in tuple(listeners):
        listener(descriptor)


def tell_launcher(report: str) -> bool:
    """Have the launcher know a report; whether there is one who listens."""
    text = report.encode()
    return len(text) < _LONGEST and _send(REPORT + text)


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """What came, on the launcher's side, and descriptors that are the caller's now. Nothing where
    all who could speak have ended."""
    message, descriptors, _, _ = socket.recv_fds(line, _LONGEST, 4)
    return message, descriptors


def new_line() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the one that all its ranks inherit."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _send(message: bytes, descriptors: list[int] | None = None) -> bool:
    if _line is None or _line[1] != os.getpid():
        return False
    with contextlib.suppress(OSError):  # the launcher has ended, and we are about to
        socket.send_fds(_line[0], [message], descriptors or [])
        return True
    return False
