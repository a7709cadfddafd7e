"""Where a process is told that one of another host wants a connection to it.

Whoever wants one asks a process of that host to which it is connected already, and that one passes
the request on by a datagram: to a socket without a name in any file system, which only ranks of
this world know, and no other host can reach.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable


def _address(secret: bytes, global_rank: int) -> bytes:
    name = hmac.digest(secret, f"door {global_rank}".encode(), "sha256").hex()
    return b"\0unisono-" + name[:40].encode()


def knock(secret: bytes, global_rank: int, who: int) -> None:
    """Tell a process of this host, if it is still there, that the one of global rank `who` wants a
    connection to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        caller.settimeout(1.0)
        caller.sendto(str(who).encode(), _address(secret, global_rank))


class Door:
    """This process's; `on_knock` is called in a thread of its own with who wants a connection."""

    def __init__(self, secret: bytes, me: int, on_knock: Callable[[int], None]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(_address(secret, me))
        self._secret, self._me = secret, me
        self._on_knock = on_knock
        self._thread = threading.Thread(target=self._wait, name="unisono door", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while (who := int(self._socket.recv(32))) != self._me:
            self._on_knock(who)
        self._socket.close()

    def close(self) -> None:
        """Wait for nobody any more."""
        knock(self._secret, self._me, self._me)
        self._thread.join(1.0)
