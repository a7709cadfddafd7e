"""How the ranks of one machine find each other and come to share a segment.

Every process keeps a *lobby*: an abstract unix socket with a random name, open to this user
alone. The first member of a new group, its *leader*, receives the others in its lobby, makes the
segment and hands its descriptor over. Who the leader is, the members of an existing group know;
strangers learn it through an *exchange*: a torch Store, a file, or an inherited descriptor.
No port is opened and nothing has a name in the file system, the exchange's file aside.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from unisono.comm import engine
from unisono.errors import RendezvousError, UnisonoError

UNREACHABLE_S = 10.0
"""How long a leader that has announced itself may refuse connections."""

_LONGEST_MESSAGE_BYTES = 1 << 22


class Exchange(Protocol):
    """Where strangers leave word of themselves: rank 0 for all, the others for rank 0."""

    def announce(self, rank: int, word: dict[str, Any]) -> None: ...
    def look_up(self, rank: int) -> dict[str, Any] | None: ...
    def clear(self, rank: int) -> None: ...


class FileExchange:
    """An exchange in a file: a path that all ranks know, or a descriptor that all inherited.

    Only rank 0 leaves word here. A stale file of a dead job does no harm: its lobby is gone.
    """

    def __init__(self, where: str | os.PathLike[str] | int) -> None:
        self._where = where

    def announce(self, rank: int, word: dict[str, Any]) -> None:
        if rank != 0:
            return
        data = json.dumps(word).encode()
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            os.pwrite(self._where, data, 0)
            return
        path = Path(self._where)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RendezvousError(f"cannot write the rendezvous file {path}: {error}") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(draft, path)

    def look_up(self, rank: int) -> dict[str, Any] | None:
        if rank != 0:
            return None
        try:
            if isinstance(self._where, int):
                data = os.pread(self._where, 1 << 16, 0)
            else:
                with open(self._where, "rb") as file:
                    owner = os.fstat(file.fileno()).st_uid
                    if owner != os.geteuid():
                        raise RendezvousError(
                            f"the rendezvous file {self._where} belongs to user {owner}, not to "
                            f"{os.geteuid()}: use a path of your own"
                        )
                    data = file.read(1 << 16)
            word = json.loads(data)
        except (FileNotFoundError, ValueError):
            return None
        return word if isinstance(word, dict) else None

    def clear(self, rank: int) -> None:
        if rank != 0:
            return
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
        else:
            Path(self._where).unlink(missing_ok=True)


class StoreExchange:
    """An exchange in a torch Store (TCPStore, FileStore, PrefixStore, ...)."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def announce(self, rank: int, word: dict[str, Any]) -> None:
        self._store.set(f"unisono/{rank}", json.dumps(word))

    def look_up(self, rank: int) -> dict[str, Any] | None:
        key = f"unisono/{rank}"
        if not self._store.check([key]):
            return None
        try:
            word = json.loads(self._store.get(key))
        except ValueError:
            return None
        return word if isinstance(word, dict) else None

    def clear(self, rank: int) -> None:
        try:
            self._store.delete_key(f"unisono/{rank}")
        except (RuntimeError, NotImplementedError):
            self._store.set(f"unisono/{rank}", "")  # not every store can forget


@dataclass(frozen=True)
class Side:
    """What one rank brings to a meeting: the group's key, its place, and how to open it."""

    key: str
    rank: int
    size: int
    timeout_s: float
    open: Callable[[int, int, int, int], engine.Group]


@dataclass(frozen=True)
class Place:
    """What one rank takes from a meeting."""

    key: str
    rank: int
    size: int
    group: engine.Group
    addresses: tuple[str, ...]


@dataclass
class _Deadline:
    timeout_s: float

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Lobby:
    """This process's door: a listening socket, and the visitors that came too early.

    Shared by all groups that grew out of one world; the last one to close it closes the socket.
    """

    def __init__(self) -> None:
        self.address = f"unisono-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(b"\0" + self.address.encode())
        self._socket.listen(1024)
        self._early: dict[str, list[_Visitor]] = {}
        self._owners = 1
        self._pid = os.getpid()

    def share(self) -> Lobby:
        """Count one more owner."""
        self._owners += 1
        return self

    def close(self) -> None:
        """Count one owner less; the last one closes the door."""
        self._owners -= 1
        if self._owners == 0 and self._pid == os.getpid():
            for visitors in self._early.values():
                for visitor in visitors:
                    visitor.line.close()
            self._socket.close()

    def __enter__(self) -> Lobby:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- meeting -------------------------------------------------------------------------------

    def meet_by(self, exchange: Exchange, side: Side) -> Place:
        """Meet strangers: rank 0 leads, and is found through the exchange."""
        deadline = _Deadline(side.timeout_s)
        me = _about_me(self.address)
        exchange.announce(side.rank, me)
        if side.rank == 0:
            try:
                return self._lead(side, deadline, exchange)
            finally:
                for rank in range(side.size):
                    exchange.clear(rank)
        line = _find_leader(exchange, side, deadline, me)
        return self._follow(line, side, deadline)

    def meet_at(self, leader_address: str, side: Side) -> Place:
        """Meet acquaintances: the leader's address is known."""
        deadline = _Deadline(side.timeout_s)
        if side.rank == 0:
            return self._lead(side, deadline, None)
        try:
            line = _connect(leader_address)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 of the new group {side.key} cannot be reached: its process has ended or "
                f"closed the parent group ({error.strerror})"
            ) from error
        return self._follow(line, side, deadline)

    def _lead(self, side: Side, deadline: _Deadline, exchange: Exchange | None) -> Place:
        visitors: dict[int, _Visitor] = {}
        try:
            self._receive(side, deadline, exchange, visitors)
            return self._seat(side, deadline, visitors)
        except BaseException as error:
            reason = str(error) if isinstance(error, UnisonoError) else f"rank 0 failed: {error!r}"
            for visitor in visitors.values():
                visitor.line.try_send({"error": reason})
            raise
        finally:
            for visitor in visitors.values():
                visitor.line.close()

    def _receive(
        self,
        side: Side,
        deadline: _Deadline,
        exchange: Exchange | None,
        visitors: dict[int, _Visitor],
    ) -> None:
        """Wait until every other rank has come in."""
        seen_s: dict[int, float] = {}
        for early in self._early.pop(side.key, []):
            visitors[early.rank] = self._check(early, side, visitors)
        while len(visitors) < side.size - 1:
            missing = [rank for rank in range(1, side.size) if rank not in visitors]
            if not deadline.left_s():
                raise RendezvousError(
                    f"group {side.key}: rank(s) {_join(missing)} of {side.size} did not come "
                    f"within {side.timeout_s:g} s"
                )
            visitor = self._next_visitor(min(0.2, deadline.left_s()))
            if visitor is None:
                if exchange is not None:
                    _check_missing(exchange, missing, seen_s)
                continue
            if visitor.key != side.key:
                self._early.setdefault(visitor.key, []).append(visitor)
                continue
            visitors[visitor.rank] = self._check(visitor, side, visitors)

    def _next_visitor(self, timeout_s: float) -> _Visitor | None:
        self._socket.settimeout(max(timeout_s, 0.001))
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        line = _Line(accepted)
        try:
            if line.peer_uid() != os.geteuid():
                raise ValueError("another user")
            hello = line.receive(_Deadline(2.0))
            return _Visitor(line, hello, str(hello["key"]), int(hello["rank"]))
        except (OSError, ValueError, KeyError, TypeError):
            line.close()  # a stranger, or noise: not our business
            return None

    @staticmethod
    def _check(visitor: _Visitor, side: Side, present: dict[int, _Visitor]) -> _Visitor:
        hello = visitor.hello
        wrong = None
        if hello.get("layout") != engine.layout_version():
            wrong = "runs another build of unisono"
        elif hello.get("size") != side.size:
            wrong = f"thinks the group has {hello.get('size')} ranks, not {side.size}"
        elif not 0 < visitor.rank < side.size or visitor.rank in present:
            wrong = f"claims rank {visitor.rank} of {side.size}, which is not free"
        if wrong:
            reason = f"group {side.key}: process {hello.get('pid')} {wrong}"
            visitor.line.try_send({"error": reason})
            visitor.line.close()
            raise RendezvousError(reason)
        return visitor

    def _seat(self, side: Side, deadline: _Deadline, visitors: dict[int, _Visitor]) -> Place:
        """Make the segment, hand it to everyone, and go on once all have opened it."""
        everyone = [_about_me(self.address)] + [
            visitors[rank].hello for rank in range(1, side.size)
        ]
        cpus = set().union(*(member["cpus"] for member in everyone))
        cores = min(len(cpus), *(member["quota"] for member in everyone))
        nonce = secrets.randbits(63)
        addresses = tuple(str(member["address"]) for member in everyone)
        descriptor = engine.create_segment(side.size, cores, nonce)
        try:
            for visitor in visitors.values():
                visitor.line.send({"nonce": nonce, "addresses": addresses}, descriptor)
            group = side.open(descriptor, 0, side.size, nonce)
        finally:
            os.close(descriptor)
        try:
            for rank, visitor in visitors.items():
                answer = visitor.line.receive(deadline)
                if "error" in answer:
                    raise RendezvousError(f"rank {rank}: {answer['error']}")
            for visitor in visitors.values():
                visitor.line.send({"go": True})
        except BaseException as error:
            group.close()
            if isinstance(error, (OSError, ValueError)):
                raise RendezvousError(
                    f"a member of group {side.key} left while the group was made"
                ) from error
            raise
        return Place(side.key, 0, side.size, group, addresses)

    def _follow(self, line: _Line, side: Side, deadline: _Deadline) -> Place:
        group: engine.Group | None = None
        try:
            line.send(
                _about_me(self.address) | {"key": side.key, "rank": side.rank, "size": side.size}
            )
            invitation, descriptor = line.receive_with_descriptor(deadline)
            addresses = tuple(str(address) for address in invitation["addresses"])
            try:
                group = side.open(descriptor, side.rank, side.size, int(invitation["nonce"]))
            except (UnisonoError, ValueError) as error:
                line.try_send({"error": str(error)})
                raise
            finally:
                os.close(descriptor)
            line.send({"opened": True})
            line.receive_checked(deadline)
            return Place(side.key, side.rank, side.size, group, addresses)
        except BaseException as error:
            if group is not None:
                group.close()
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise RendezvousError(
                    f"group {side.key}: rank 0 went away while the group was made ({error})"
                ) from error
            raise
        finally:
            line.close()


@dataclass
class _Visitor:
    line: _Line
    hello: dict[str, Any]
    key: str
    rank: int


class _Line:
    """One connection: framed JSON, and descriptors beside it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def peer_uid(self) -> int:
        credentials = self._connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        return int(struct.unpack("3i", credentials)[1])

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        data = json.dumps(message).encode()
        frame = struct.pack("<I", len(data)) + data
        self._connection.settimeout(10.0)
        sent = 0
        if descriptor is not None:
            sent = socket.send_fds(self._connection, [frame], [descriptor])
        self._connection.sendall(frame[sent:])

    def try_send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever is gone needs no message
            self.send(message)

    def receive(self, deadline: _Deadline) -> dict[str, Any]:
        return self._receive(deadline)[0]

    def receive_checked(self, deadline: _Deadline) -> dict[str, Any]:
        """As `receive`, but an error that the other side reports is raised here."""
        message = self.receive(deadline)
        if "error" in message:
            raise RendezvousError(str(message["error"]))
        return message

    def receive_with_descriptor(self, deadline: _Deadline) -> tuple[dict[str, Any], int]:
        message, descriptors = self._receive(deadline, 1)
        if "error" in message:
            raise RendezvousError(str(message["error"]))
        if len(descriptors) != 1:
            raise ValueError("a message without the segment")
        return message, descriptors[0]

    def _receive(
        self, deadline: _Deadline, descriptors_wanted: int = 0
    ) -> tuple[dict[str, Any], list[int]]:
        self._connection.settimeout(max(deadline.left_s(), 0.001))
        try:
            head, descriptors, _, _ = socket.recv_fds(self._connection, 4, descriptors_wanted)
            head += self._exactly(4 - len(head))
            (length,) = struct.unpack("<I", head)
            if length > _LONGEST_MESSAGE_BYTES:
                raise ValueError("a message that is too long")
            message = json.loads(self._exactly(length))
        except TimeoutError as error:
            raise RendezvousError("the other side did not answer in time") from error
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message, descriptors

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the other side closed the connection")
            data += part
        return data

    def close(self) -> None:
        self._connection.close()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _about_me(address: str) -> dict[str, Any]:
    return {
        "address": address,
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid": os.getpid(),
        "layout": engine.layout_version(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "quota": engine.cpu_quota(),
    }


def _connect(address: str) -> _Line:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(10.0)
        connection.connect(b"\0" + address.encode())
    except BaseException:
        connection.close()
        raise
    line = _Line(connection)
    if line.peer_uid() != os.geteuid():
        uid = line.peer_uid()
        line.close()
        raise RendezvousError(f"rank 0 runs as user {uid}, this rank as {os.geteuid()}")
    return line


def _find_leader(exchange: Exchange, side: Side, deadline: _Deadline, me: dict[str, Any]) -> _Line:
    """Wait for rank 0's word and connect to its lobby."""
    pause_s = 0.001
    refused_since: tuple[str, float] | None = None
    while True:
        word = exchange.look_up(0)
        if word is not None:
            _check_same_host(0, word, side.rank, me)
            address = str(word["address"])
            try:
                return _connect(address)
            except OSError as error:
                if refused_since is None or refused_since[0] != address:
                    refused_since = (address, time.monotonic())
                if time.monotonic() - refused_since[1] > UNREACHABLE_S:
                    raise RendezvousError(
                        f"rank {side.rank} (pid {me['pid']}) cannot reach rank 0 (pid "
                        f"{word.get('pid')}) on host {me['host']}, though both are on it: rank 0 "
                        f"has ended, or lives in another network namespace ({error.strerror})"
                    ) from error
        if not deadline.left_s():
            raise RendezvousError(
                f"group {side.key}: rank 0 did not come within {side.timeout_s:g} s"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def _check_missing(exchange: Exchange, missing: list[int], seen_s: dict[int, float]) -> None:
    """Say at once if a missing rank has announced itself from where it cannot come."""
    for rank in missing:
        word = exchange.look_up(rank)
        if word is None:
            continue
        _check_same_host(rank, word, 0, _about_me(""))
        first = seen_s.setdefault(rank, time.monotonic())
        if time.monotonic() - first > UNREACHABLE_S:
            raise RendezvousError(
                f"rank {rank} (pid {word.get('pid')}) is on this host but does not reach rank 0 "
                f"(pid {os.getpid()}): it has ended, or lives in another network namespace"
            )


def _check_same_host(rank: int, word: dict[str, Any], my_rank: int, me: dict[str, Any]) -> None:
    if word.get("boot") != me["boot"]:
        raise RendezvousError(
            f"rank {rank} is on host {word.get('host')}, rank {my_rank} on host {me['host']}: "
            "shared memory does not reach from one to the other; use a backend for several "
            "machines (gloo, nccl, mpi)"
        )


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
