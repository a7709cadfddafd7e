"""Connections between processes on different hosts, for urgent messages and for detecting silence.

A line carries very little. Messages on it are authenticated (frames.py). A process that ends closes
it. The kernels probe each other every second, so that a host that is down, or a cut cable, is
detected after UNISONO_LINK_PATIENCE_S, however busy the processes are. A connection that carries
data cannot do that: the kernel would also give up on a peer that is stopped and does not read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from unisono import variables
from unisono.comm.hosts.frames import Session, Stranger
from unisono.comm.meeting.deadline import Deadline, in_seconds
from unisono.comm.meeting.makings import look
from unisono.comm.meeting.network import socket_family
from unisono.comm.meeting.unix_socket import descriptors_needed
from unisono.errors import RendezvousError

PATIENCE_S = 4
"""How long a link may be down by default (UNISONO_LINK_PATIENCE_S)."""

_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44  # of linux/tcp.h

_CHECK_S = 0.25
"""How often a line with unacknowledged data is checked."""

ENDED = "has ended"
"""Completes "rank 3 ..." for a rank whose process hung up."""

_STRANGER_S = 5.0
"""How long a new connection may take to prove that it belongs to the job."""

_MOST_STRANGERS = 128
_AGAIN_S = 0.2
_GOODBYE_S = 0.5
_CLOSING_S = 10.0
"""How long closing may wait for the thread, which may be waiting for UCX."""
_READ = select.POLLIN | select.POLLHUP | select.POLLERR
_ENDED = {errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED}

_log = logging.getLogger("unisono")

Where = tuple[str, int]
"""An address and a port."""


class _Line:
    """A connection, and its unsent bytes."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.connection = connection
        self.session = session
        self.since = time.monotonic()
        self.unsent = bytearray(session.first_bytes())

    def flush(self) -> None:
        """Send what can be sent now. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]

    def silence_s(self) -> float | None:
        """How long the other host's kernel has been silent, if it owes an answer; else None."""
        told = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        unacknowledged, last_answer_ms = struct.unpack_from("=I28xI", told, 24)
        return last_answer_ms / 1000 if unacknowledged else None


class _Wanted:
    """A line that is wanted until `end`; `summons`: the other side does not know yet, and must
    be asked to connect."""

    end, again = 0.0, 0.0
    problem = "it has not connected"

    def __init__(self, where: Where, summons: bool) -> None:
        self.where, self.summons = where, summons
        self.is_there = threading.Event()


_all_lines: weakref.WeakSet[ControlLines] = weakref.WeakSet()


def _close_after_fork() -> None:
    """In a forked child: the sockets are the parent's, and must not outlive it."""
    for lines in list(_all_lines):
        lines.close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


class ControlLines:
    """The lines of this process, which is global rank `me` and listens at `address`; others connect
    to `where`. Any process that knows the `secret` may.

    `on_message(peer, message)` is called with what another rank has sent, in order; `on_lost(peer,
    why)` once for a rank whose line breaks without a goodbye, with a text that completes "rank 3
    ...": "has ended", or "no longer answers ..."; `on_left(peer)` once it has said goodbye;
    `on_summons(peer)` when a rank asks for a connection, by `connect`. All run in the lines' own
    thread, and must not wait.
    """

    def __init__(
        self,
        address: str,
        me: int,
        secret: bytes,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
        on_summons: Callable[[int], None] = lambda peer: None,
        on_left: Callable[[int], None] = lambda peer: None,
    ) -> None:
        self._me, self._secret = me, secret
        self._on_message, self._on_lost = on_message, on_lost
        self._on_summons, self._on_left = on_summons, on_left
        self._patience_s = variables.LINK_PATIENCE_S.read() or PATIENCE_S
        self._lock = threading.Lock()  # of _lines, of what is sent on them, and of _wanted
        self._lines: dict[int, _Line] = {}
        self._wanted: dict[int, _Wanted] = {}
        self._strangers: list[_Line] = []
        self._awaits_answers = False  # something sent may not be acknowledged yet
        self._is_closing = False
        self._pid = os.getpid()
        with contextlib.ExitStack() as stack:
            with descriptors_needed():
                self._listener = socket.socket(socket_family(address), socket.SOCK_STREAM)
                stack.callback(self._listener.close)
                self._wake, self._awake = socket.socketpair()
            self._listener.bind((address, 0))
            self._listener.listen(1024)
            stack.pop_all()
        for mine in (self._listener, self._wake, self._awake):
            mine.setblocking(False)
        self.where: Where = (address, int(self._listener.getsockname()[1]))
        _all_lines.add(self)
        self._thread = threading.Thread(target=self._serve, name="unisono lines", daemon=True)
        self._thread.start()

    def connect(
        self, peer: int, where: Where, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connect a line to another rank, which does the same: the higher one to the lower.

        Raises RendezvousError if there is none within `timeout_s`; and what `check` raises, which
        is called again and again.
        """
        wanted, limit = self.want(peer, where, timeout_s), Deadline(timeout_s)
        while wanted is not None and not wanted.is_there.wait(min(0.1, limit.left_s())):
            check()
            look()
            if not limit.left_s():
                break
        else:
            return
        assert wanted is not None
        with self._lock:
            self._wanted.pop(peer, None)
        to = f"{where[0]} port {where[1]} within {in_seconds(timeout_s)}"
        raise RendezvousError(f"no connection to {to} ({wanted.problem})")

    def want(
        self, peer: int, where: Where, timeout_s: float, *, summons: bool = False
    ) -> _Wanted | None:
        """The same without waiting for it; None if there is one already. `summons`: the other rank
        is asked to connect."""
        with self._lock:
            if peer in self._lines:
                return None
            wanted = self._wanted.setdefault(peer, _Wanted(where, summons))
            wanted.end = max(wanted.end, time.monotonic() + timeout_s)
        self._rouse()
        return wanted

    def reaches(self, peer: int) -> bool:
        """Whether there is a line to a rank."""
        with self._lock:
            return peer in self._lines

    def send(self, peer: int, message: dict[str, Any]) -> bool:
        """Send a message to a rank; returns False if it is lost, or has said goodbye.

        Raises ValueError if the message is too long.
        """
        with self._lock:
            line = self._lines.get(peer)
            if line is None or self._is_closing:
                return False
            line.unsent += line.session.encode(message)
            with contextlib.suppress(OSError):  # the thread handles it
                line.flush()
            if not line.unsent and self._awaits_answers:
                return True
            self._awaits_answers = True
        self._rouse()
        return True

    def close(self) -> None:
        """Say goodbye to all, and hang up."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closing = True
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_S)

    def close_sockets(self) -> None:
        """Close them without a goodbye."""
        for line in [*self._lines.values(), *self._strangers]:
            line.connection.close()
        for mine in (self._listener, self._wake, self._awake):
            mine.close()

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                must_look_again = self._call_wanted() or bool(self._strangers)
                idle_s = _CHECK_S if self._awaits_answers else None
                self._wait_and_handle(0.05 if must_look_again else idle_s)
                self._drop_slow_strangers()
                self._drop_silent_lines()
            self._say_goodbye()
        finally:
            with self._lock:
                self._is_closing = True
                self.close_sockets()
                self._lines.clear()

    def _wait_and_handle(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        if self._listener.fileno() >= 0:
            poll.register(self._listener, select.POLLIN)
        with self._lock:
            lines = [*self._lines.values(), *self._strangers]
            for line in lines:
                poll.register(line.connection, _READ | (select.POLLOUT if line.unsent else 0))
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if self._awake.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._awake.recv(4096)
        if self._listener.fileno() in ready:
            self._accept()
        for line in lines:
            if line.connection.fileno() in ready:
                self._handle(line, ready[line.connection.fileno()])

    def _handle(self, line: _Line, events: int) -> None:
        try:
            if events & select.POLLOUT:
                with self._lock:
                    line.flush()
            if events & _READ:
                self._read(line)
        except (OSError, Stranger) as error:
            self._lose(line, error)

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        was_proved = line.session.is_proved
        answer, messages = line.session.receive(data)
        with self._lock:
            line.unsent += answer
            line.flush()
        if line.session.is_proved and not was_proved and not self._admit(line):
            return
        for message in messages:
            self._tell(self._on_message, line.session.peer, message)
        if line.session.has_left:
            self._forget(line)

    def _tell(self, listener: Callable[[int, Any], None], peer: int, what: Any) -> None:
        try:
            listener(peer, what)
        except Exception:
            _log.exception("unisono: the handling of a message from rank %d failed: %s", peer, what)

    # -- beginning -----------------------------------------------------------------------------

    def _call_wanted(self) -> bool:
        """Retry connections to wanted ranks that are lower, or have not been summoned yet;
        returns whether there are any."""
        now = time.monotonic()
        with self._lock:
            self._wanted = {peer: want for peer, want in self._wanted.items() if now < want.end}
            to_call = {
                peer: wanted
                for peer, wanted in self._wanted.items()
                if peer < self._me or wanted.summons
            }
        called = {line.session.peer for line in self._strangers}
        for peer, wanted in to_call.items():
            if peer in called or time.monotonic() < wanted.again:
                continue
            wanted.again = time.monotonic() + _AGAIN_S
            try:
                connection = socket.socket(socket_family(wanted.where[0]), socket.SOCK_STREAM)
            except OSError as error:
                wanted.problem = error.strerror or str(error)
                continue
            connection.setblocking(False)
            session = Session(self._secret, self._me, peer, is_summons=peer > self._me)
            line = _Line(connection, session)
            self._strangers.append(line)
            reason = connection.connect_ex(wanted.where)
            if reason not in (0, errno.EINPROGRESS):
                self._lose(line, OSError(reason, os.strerror(reason)))
        return bool(to_call)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._strangers.append(_Line(connection, Session(self._secret, self._me)))

    def _admit(self, line: _Line) -> bool:
        """The other side has proved that it belongs to the job; whether this is a line to it."""
        self._strangers.remove(line)
        peer = line.session.peer
        with self._lock:
            is_line = peer not in self._lines and not line.session.is_summons
            wanted = self._wanted.get(peer)
            if is_line:
                _keep_asking(line.connection, self._patience_s)
                self._lines[peer] = line
                self._wanted.pop(peer, None)
            else:
                line.connection.close()
                if wanted is not None:
                    wanted.summons = False  # the other side knows now
        if line.session.is_summons and not line.session.is_caller and wanted is None:
            self._tell(lambda peer, _: self._on_summons(peer), peer, None)
        if is_line and wanted is not None:
            wanted.is_there.set()
        return is_line

    def _drop_slow_strangers(self) -> None:
        end = time.monotonic() - _STRANGER_S
        late = [line for line in self._strangers if line.since < end]
        for line in late or self._strangers[:-_MOST_STRANGERS]:
            self._lose(line, TimeoutError(errno.ETIMEDOUT, "it does not answer"))

    def _drop_silent_lines(self) -> None:
        """The kernel counts from the first unacknowledged packet, however late in an outage it
        was sent; this counts from the last answer."""
        with self._lock:
            lines = list(self._lines.values()) if self._awaits_answers else []
            silences_s = [line.silence_s() for line in lines]
            self._awaits_answers = any(silence_s is not None for silence_s in silences_s)
        for line, silence_s in zip(lines, silences_s, strict=True):
            if silence_s is not None and silence_s > self._patience_s + 1:
                self._lose(line, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    # -- ending --------------------------------------------------------------------------------

    def _lose(self, line: _Line, error: Exception) -> None:
        peer = line.session.peer
        line.connection.close()
        if line in self._strangers:
            self._strangers.remove(line)
            with self._lock:
                if peer in self._wanted and line.session.is_caller:
                    self._wanted[peer].problem = getattr(error, "strerror", None) or str(error)
            return
        with self._lock:
            if self._lines.get(peer) is not line:
                return
            del self._lines[peer]
        if not self._is_closing:
            self._tell(self._on_lost, peer, _describe_loss(error))

    def _forget(self, line: _Line) -> None:
        """The other side has said goodbye."""
        line.connection.close()
        with self._lock:
            self._lines.pop(line.session.peer, None)
        self._tell(lambda peer, _: self._on_left(peer), line.session.peer, None)

    def _say_goodbye(self) -> None:
        with self._lock:
            for line in self._lines.values():
                line.unsent += line.session.encode_goodbye()
        self._listener.close()
        for line in list(self._strangers):
            self._lose(line, ConnectionAbortedError())
        end = time.monotonic() + _GOODBYE_S
        while self._lines and time.monotonic() < end:  # until the peers hang up
            self._wait_and_handle(0.05)

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")


def _describe_loss(error: Exception) -> str:
    """Completes "rank 3 ..."."""
    if not isinstance(error, OSError):
        return f"sent a malformed message: {error}"
    if error.errno in _ENDED:
        return ENDED
    return f"no longer answers ({error.strerror}): its host, or the network to it, is down"


def _keep_asking(connection: socket.socket, patience_s: int) -> None:
    """Let the kernel probe the peer every second, and send without delay.

    It counts from the last answer, which may be a second older than the outage, and checks when it
    probes: so it gives up between `patience_s` and a second later. Retransmissions usually come at
    doubling intervals, so that the last may be well before the end of an outage: here the first
    ones come at short intervals, and all of them on Linux 6.15 and later.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
    with contextlib.suppress(OSError):  # BBR would make the next option ineffective
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_s * 1000 + 500)
