"""A line from each host to each other one: for what must not wait behind data, and for silence.

The leader of a host, its lowest rank, holds a TCP connection to every other host's leader; of two
hosts the later one calls. Messages are authenticated (frames.py). The kernels ask each other every
second whether they are still there, so that a host that is down, or a cut cable, shows within 4 s,
however busy or silent the processes are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from unisono.comm.hosts.frames import Session, Stranger
from unisono.comm.hosts.identity import Hosts
from unisono.comm.hosts.network import socket_family
from unisono.comm.rendezvous.store_exchange import exchange
from unisono.comm.rendezvous.unix_socket import Deadline, descriptors_needed
from unisono.comm.rendezvous.waiting import in_seconds
from unisono.errors import RendezvousError

SILENCE_MS = 2500
"""How long the other host's kernel may leave a question unanswered."""

_STRANGER_S = 5.0
"""How long somebody who has connected may take to prove that it belongs to the job."""

_MOST_STRANGERS = 128
_AGAIN_S = 0.2
_GOODBYE_S = 0.5
_READ = select.POLLIN | select.POLLHUP | select.POLLERR
_ENDED = {errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED}

_log = logging.getLogger("unisono")


class _Line:
    """A connection, and what is still to be sent on it."""

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


_all_lines: weakref.WeakSet[ControlLines] = weakref.WeakSet()


def _close_after_fork() -> None:
    """In a forked child: the sockets are the parent's, and must not outlive it."""
    for lines in list(_all_lines):
        lines.close_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


class ControlLines:
    """This host's lines to all others; made by the leader of each host, and connected then.

    `on_message(host, message)` is called with what another host's leader has sent, in order;
    `on_lost(host, why)` once for a host whose line breaks without a goodbye: its leader has ended,
    or it does not answer any more. Both run in the lines' own thread, and must not wait.

    Raises RendezvousError if a host cannot be reached within `timeout_s`.
    """

    def __init__(
        self,
        store: Any,
        hosts: Hosts,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
        timeout_s: float = 60.0,
    ) -> None:
        self._hosts = hosts
        self._on_message, self._on_lost = on_message, on_lost
        self._lock = threading.Lock()  # of _lines, and of what is sent on them
        self._lines: dict[int, _Line] = {}
        self._strangers: list[_Line] = []
        self._missing = set(range(hosts.count)) - {hosts.mine}
        self._problems: dict[int, str] = {}
        self._connected = threading.Event()
        self._is_closing = False
        self._again = 0.0
        self._pid = os.getpid()
        deadline = Deadline(timeout_s)
        with contextlib.ExitStack() as stack:
            with descriptors_needed():
                family = socket_family(hosts.address)
                self._listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                self._wake, self._awake = socket.socketpair()
                stack.callback(self.close_sockets)
            self._listener.bind((hosts.address, 0))
            self._listener.listen(1024)
            for mine in (self._listener, self._wake, self._awake):
                mine.setblocking(False)
            leaders = [hosts.leader(host) for host in range(hosts.count)]
            where = json.dumps(self._listener.getsockname()[:2])
            texts = exchange(store, "lines", leaders[hosts.mine], leaders, where, deadline)
            self._addresses = [tuple(json.loads(text)) for text in texts]
            _all_lines.add(self)
            self._thread = threading.Thread(target=self._serve, name="unisono lines", daemon=True)
            self._thread.start()
            stack.callback(self.close)
            if not self._connected.wait(deadline.left_s()):
                raise RendezvousError(self._describe_missing(timeout_s))
            stack.pop_all()

    def send(self, host: int, message: dict[str, Any]) -> None:
        """Send a message to a host; nothing happens if that is lost, or has said goodbye.

        Raises ValueError if the message is too long.
        """
        with self._lock:
            line = self._lines.get(host)
            if line is None or self._is_closing:
                return
            line.unsent += line.session.encode(message)
            with contextlib.suppress(OSError):  # which the thread will meet, too
                line.flush()
            if not line.unsent:
                return
        self._rouse()

    def send_all(self, message: dict[str, Any]) -> None:
        """Send a message to every other host."""
        for host in range(self._hosts.count):
            self.send(host, message)

    def close(self) -> None:
        """Say goodbye to all hosts, and hang up."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closing = True
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_sockets(self) -> None:
        """Close them without a word."""
        for line in [*self._lines.values(), *self._strangers]:
            line.connection.close()
        for mine in (self._listener, self._wake, self._awake):
            mine.close()

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._call_missing()
                self._wait_and_handle(0.05 if self._missing or self._strangers else None)
                self._drop_slow_strangers()
            self._say_goodbye()
        finally:
            self._missing.clear()
            with self._lock:
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
        if line.session.is_proved and not was_proved:
            self._admit(line)
        for message in messages:
            self._tell(self._on_message, line.session.peer, message)
        if line.session.has_left:
            self._forget(line)

    def _tell(self, listener: Callable[..., None], host: int, what: Any) -> None:
        try:
            listener(host, what)
        except Exception:
            _log.exception("unisono: what came from host %s was not understood: %s", host, what)

    # -- beginning -----------------------------------------------------------------------------

    def _call_missing(self) -> None:
        """Call the hosts before this one that there is no line to, now and then."""
        if time.monotonic() < self._again:
            return
        self._again = time.monotonic() + _AGAIN_S
        called = {line.session.peer for line in self._strangers}
        for host in self._missing - called:
            if host < self._hosts.mine:
                connection = socket.socket(self._listener.family, socket.SOCK_STREAM)
                connection.setblocking(False)
                session = Session(self._hosts.secret, self._hosts.mine, host)
                self._strangers.append(_Line(connection, session))
                reason = connection.connect_ex(self._addresses[host])
                if reason not in (0, errno.EINPROGRESS):
                    self._lose(self._strangers[-1], OSError(reason, os.strerror(reason)))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            session = Session(self._hosts.secret, self._hosts.mine)
            self._strangers.append(_Line(connection, session))

    def _admit(self, line: _Line) -> None:
        """The other side has proved that it belongs to the job."""
        host = line.session.peer
        self._strangers.remove(line)
        if host not in self._missing:
            line.connection.close()
            return
        _keep_asking(line.connection)
        with self._lock:
            self._lines[host] = line
        self._missing.discard(host)
        if not self._missing:
            self._listener.close()
            self._connected.set()

    def _drop_slow_strangers(self) -> None:
        end = time.monotonic() - _STRANGER_S
        late = [line for line in self._strangers if line.since < end]
        for line in late or self._strangers[:-_MOST_STRANGERS]:
            self._lose(line, TimeoutError(errno.ETIMEDOUT, "it does not answer"))

    def _describe_missing(self, timeout_s: float) -> str:
        lacking = sorted(self._missing)
        texts = []
        for host in lacking:
            address, port = self._addresses[host]
            why = self._problems.get(host, "it has not called" if host > self._hosts.mine else "")
            texts.append(f"{self._hosts.name_host(host)} at {address} port {port}: {why}")
        return (
            f"{self._hosts.names[self._hosts.mine]} has no line to {len(lacking)} of "
            f"{self._hosts.count - 1} other hosts after {in_seconds(timeout_s)}; may the hosts "
            "reach each other on all ports? If they have several interfaces, set "
            "GLOO_SOCKET_IFNAME\n" + "\n".join(texts)
        )

    # -- ending --------------------------------------------------------------------------------

    def _lose(self, line: _Line, error: Exception) -> None:
        host = line.session.peer
        line.connection.close()
        if line in self._strangers:
            self._strangers.remove(line)
            if host in self._missing and host < self._hosts.mine:
                self._problems[host] = getattr(error, "strerror", None) or str(error)
            return
        with self._lock:
            if self._lines.get(host) is not line:
                return
            del self._lines[host]
        if not self._is_closing:
            self._tell(self._on_lost, host, self._describe_loss(host, error))

    def _describe_loss(self, host: int, error: Exception) -> str:
        leader = self._hosts.name_rank(self._hosts.leader(host))
        if isinstance(error, OSError) and error.errno in _ENDED:
            return f"{leader} has ended"
        if isinstance(error, OSError):
            return (
                f"{self._hosts.name_host(host)} does not answer any more ({error.strerror}): it is "
                "down, or the network to it is"
            )
        return f"what came from {leader} makes no sense: {error}"

    def _forget(self, line: _Line) -> None:
        """The other side has said goodbye."""
        line.connection.close()
        with self._lock:
            self._lines.pop(line.session.peer, None)

    def _say_goodbye(self) -> None:
        with self._lock:
            for line in self._lines.values():
                line.unsent += line.session.encode_goodbye()
        self._listener.close()
        for line in list(self._strangers):
            self._lose(line, ConnectionAbortedError())
        end = time.monotonic() + _GOODBYE_S
        while self._lines and time.monotonic() < end:  # until they have heard it, and hang up
            self._wait_and_handle(0.05)

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")


def _keep_asking(connection: socket.socket) -> None:
    """Let the kernel ask every second whether the other one is there, and send without delay."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
