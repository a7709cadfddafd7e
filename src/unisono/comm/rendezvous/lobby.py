"""How the ranks of one machine find each other and come to share a segment.

Every process keeps a *lobby*: an abstract unix socket with a random name, open to this user
alone. The first member of a new group, its *leader*, receives the others in its lobby, makes the
segment and hands its descriptor over. Who the leader is, the members of an existing group know;
ranks that do not know each other yet learn it from announcements.py. No port is opened and nothing
has a name in the file system, the file of announcements aside.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from unisono.comm import engine
from unisono.comm.rendezvous.announcements import (
    Announcement,
    Announcements,
)
from unisono.comm.rendezvous.discovery import about_me, check_missing, clear_if_over, find_leader
from unisono.comm.rendezvous.membership import JoinRequest, Member, Membership
from unisono.comm.rendezvous.unix_socket import (
    Connection,
    Deadline,
    Departed,
    NoAnswer,
    TooFewDescriptors,
    descriptors_needed,
)
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import GroupClosed, RendezvousError, UnisonoError
from unisono.wording import name_ranks

_HELLO_S = 10.0
"""How long a connection may stay silent before it is hung up."""

_QUIET_S = 0.2
"""After so long without a visitor, a leader looks where the missing ones are."""

_MOST_PIDFDS = 250
"""Larger groups are not watched: so many descriptors do not fit into one message."""

_GRACE_S = 2.0
"""How much longer followers wait than their leader, so that they hear its reason."""


@dataclass
class _Visitor:
    connection: Connection
    hello: Announcement
    key: str
    rank: int


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
        self.address = f"unisono-{secrets.token_hex(16)}"
        with descriptors_needed():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._spare = -1
        self._socket.bind(b"\0" + self.address.encode())
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self._silent: dict[Connection, Deadline] = {}
        self._early: dict[str, list[_Visitor]] = {}
        self._owners = 1
        self._pid = os.getpid()
        self._lock = threading.Lock()
        _lobbies.add(self)

    def share(self) -> Lobby:
        """Count one more owner."""
        self._owners += 1
        return self

    def close(self) -> None:
        """Count one owner less; the last one closes the socket."""
        self._owners -= 1
        if self._owners == 0 and self._pid == os.getpid():
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
        self._use_spare()

    def _keep_spare(self) -> None:
        """Keep a descriptor back, by which the others are told if there are no more of them."""
        if self._spare < 0:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _use_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1

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

    def meet_by(self, announcements: Announcements, request: JoinRequest) -> Membership:
        """Meet ranks that do not know each other: rank 0 leads, and has announced itself."""
        with descriptors_needed():
            deadline = request.deadline
            me = about_me(self.address)
            announcements.announce(request.rank, me)
            if request.rank == 0:
                try:
                    return self._lead(request, deadline, announcements, me)
                except BaseException:
                    announcements.clear(0, me)
                    raise
            try:
                connection = find_leader(announcements, request, deadline, me)
            except TooFewDescriptors as error:
                self._decline(announcements, request, me, error)
                raise
            try:
                return self._follow(connection, request, deadline, me, sends_pidfd=True)
            except Departed:
                clear_if_over(announcements, me)
                raise

    def meet_at(self, leader_address: str, request: JoinRequest) -> Membership:
        """Meet members of an existing group: the leader's address is known."""
        if self._pid != os.getpid():
            raise GroupClosed(
                f"the parent group belongs to process {self._pid}: a forked child cannot split it"
            )
        with descriptors_needed():
            deadline = request.deadline
            if request.rank == 0:
                return self._lead(request, deadline, None, about_me(self.address))
            connection = self._call(leader_address, request, deadline)
            return self._follow(
                connection, request, deadline, about_me(self.address), sends_pidfd=False
            )

    @staticmethod
    def _call(leader_address: str, request: JoinRequest, deadline: Deadline) -> Connection:
        while True:
            try:
                return Connection.connect(leader_address)
            except BlockingIOError as error:  # its queue is full until it makes groups again
                request.check()
                if not deadline.left_s():
                    raise RendezvousError(
                        f"rank 0 of the new group {request.key} has let nobody in for "
                        f"{in_seconds(request.deadline.timeout_s)}: its queue of connections is "
                        "full"
                    ) from error
                time.sleep(0.01)
            except OSError as error:
                raise RendezvousError(
                    f"rank 0 of the new group {request.key} cannot be reached: its process has "
                    f"ended or closed the parent group ({error.strerror})"
                ) from error

    def _decline(
        self,
        announcements: Announcements,
        request: JoinRequest,
        me: Announcement,
        error: RendezvousError,
    ) -> None:
        """Tell rank 0, if it is there, that this rank will not come."""
        self.close_socket()  # by what that frees it can be told
        with contextlib.suppress(OSError, RendezvousError):
            announcement = announcements.look_up(0)
            if announcement is not None:
                connection = Connection.connect(str(announcement["address"]))
                connection.try_send(
                    _hello(request, me) | {"error": f"rank {request.rank}: {error}"}
                )
                connection.close()

    # -- leading -------------------------------------------------------------------------------

    def _lead(
        self,
        request: JoinRequest,
        deadline: Deadline,
        announcements: Announcements | None,
        me: Announcement,
    ) -> Membership:
        visitors: dict[int, _Visitor] = {}
        try:
            self._keep_spare()
            self._receive(request, deadline, announcements, me, visitors)
            return self._admit(request, deadline, announcements, me, visitors)
        except BaseException as error:
            reason = str(error) if isinstance(error, UnisonoError) else f"rank 0 failed: {error!r}"
            self._use_spare()
            self._dismiss(list(visitors.values()), reason, again=isinstance(error, Departed))
            visitors.clear()
            with contextlib.suppress(RendezvousError):  # of itself: there is a reason already
                while late := self._visitors_for(request.key, 0.05):
                    self._dismiss(late, reason, again=isinstance(error, Departed))
            if (
                announcements is not None
            ):  # else who has not spoken yet may have come for another group
                for connection in self._silent:
                    connection.try_send({"error": reason, "again": isinstance(error, Departed)})
            raise
        finally:
            self._use_spare()
            for visitor in visitors.values():
                visitor.connection.close()

    @staticmethod
    def _dismiss(visitors: list[_Visitor], reason: str, again: bool) -> None:
        for visitor in visitors:
            visitor.connection.try_send({"error": reason, "again": again})
            visitor.connection.close()

    def _receive(
        self,
        request: JoinRequest,
        deadline: Deadline,
        announcements: Announcements | None,
        me: Announcement,
        visitors: dict[int, _Visitor],
    ) -> None:
        """Wait until every other rank has come in."""
        unreached: dict[int, float] = {}
        waiting = Waiting(request.rank, request.size, request.key, deadline)
        told: set[int] = set()
        while len(visitors) < request.size - 1:
            missing = [rank for rank in range(1, request.size) if rank not in visitors]
            if not deadline.left_s() or waiting.is_long():
                left = [
                    rank for rank, visitor in visitors.items() if visitor.connection.is_closed()
                ]
                absent = sorted(missing + left)
                if not deadline.left_s():
                    raise RendezvousError(
                        f"group {request.key}: {name_ranks(absent)} of {request.size} did not come "
                        f"within {in_seconds(request.deadline.timeout_s)}"
                    )
                waiting.say(absent, request.size - len(absent))
                for rank in visitors.keys() - told:  # so that they can say it, too
                    visitors[rank].connection.try_send({"missing": absent})
                    told.add(rank)
            begin_s = time.monotonic()
            arrived = self._visitors_for(request.key, min(_QUIET_S, deadline.left_s()))
            nobody = not arrived and time.monotonic() - begin_s >= _QUIET_S / 2
            if nobody:
                request.check()
            while arrived:
                visitor = arrived.pop(0)
                try:
                    visitors[visitor.rank] = self._check(visitor, request, visitors)
                except RendezvousError:
                    self._early[request.key] = arrived  # they are told, too
                    raise
            if announcements is not None and nobody:
                if (
                    announcements.look_up(0) is None
                ):  # somebody tidied up, and took it for a dead one's
                    announcements.announce(0, me)
                check_missing(announcements, missing, unreached)

    def _visitors_for(self, key: str, timeout_s: float) -> list[_Visitor]:
        """Those who have come for this group; whoever comes for another waits for it."""
        with self._lock:
            if key not in self._early:
                for visitor in self._new_visitors(timeout_s):
                    self._early.setdefault(visitor.key, []).append(visitor)
            return self._early.pop(key, [])

    def _new_visitors(self, timeout_s: float) -> list[_Visitor]:
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
                visitors.append(_Visitor(connection, hello, str(hello["key"]), int(hello["rank"])))
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

    @staticmethod
    def _check(visitor: _Visitor, request: JoinRequest, present: dict[int, _Visitor]) -> _Visitor:
        hello = visitor.hello
        wrong = None
        before = present.get(visitor.rank)
        if before is not None and before.connection.is_closed():  # it has started anew
            before.connection.close()
            del present[visitor.rank]
        if "error" in hello:
            wrong = f"cannot come: {hello['error']}"
        elif hello.get("layout") != engine.layout_version():
            wrong = "runs another build of unisono"
        elif hello.get("size") != request.size:
            wrong = f"thinks the group has {hello.get('size')} ranks, not {request.size}"
        elif not 0 < visitor.rank < request.size or visitor.rank in present:
            wrong = f"claims rank {visitor.rank} of {request.size}, which is not free"
        if wrong:
            reason = f"group {request.key}: process {hello.get('pid')} {wrong}"
            visitor.connection.try_send({"error": reason})
            visitor.connection.close()
            raise RendezvousError(reason)
        return visitor

    def _admit(
        self,
        request: JoinRequest,
        deadline: Deadline,
        announcements: Announcements | None,
        me: Announcement,
        visitors: dict[int, _Visitor],
    ) -> Membership:
        """Make the segment, hand it to everyone, and go on once all have opened it."""
        group: engine.Group | None = None
        try:
            everyone = [me | {"payload": request.payload}]
            everyone += [visitors[rank].hello for rank in range(1, request.size)]
            payloads = tuple(str(member.get("payload", "")) for member in everyone)
            invitation = {
                "nonce": secrets.randbits(63),
                "members": [(member["address"], member["pid"]) for member in everyone],
                "payloads": payloads,
            }
            members = _members(invitation)
            group = self._hand_over(request, invitation, _cores(everyone), visitors)
            if announcements is not None:  # before anybody can come back for another meeting
                announcements.clear(0, me)
                for rank in visitors:
                    announcements.clear(rank)
            for visitor in visitors.values():
                visitor.connection.receive(deadline)
            for visitor in visitors.values():
                visitor.connection.send({"go": True})
        except BaseException as error:
            if group is not None:
                group.close()
            if isinstance(error, (OSError, ValueError, KeyError, TypeError)):
                raise Departed(
                    f"a member of group {request.key} left, or sent nonsense, while the group was "
                    f"made ({error})"
                ) from error
            raise
        return Membership(request.key, 0, request.size, group, members, payloads)

    @staticmethod
    def _hand_over(
        request: JoinRequest, invitation: Announcement, cores: int, visitors: dict[int, _Visitor]
    ) -> engine.Group:
        descriptor = engine.create_segment(request.size, cores, invitation["nonce"])
        try:
            with _own_pidfd() as mine:
                theirs = (visitors[rank].connection.descriptors for rank in sorted(visitors))
                pidfds = mine + [pidfd for sent in theirs for pidfd in sent]
                if len(pidfds) != request.size or request.size > _MOST_PIDFDS:
                    pidfds = []  # members of one group have each other's already
                for visitor in visitors.values():
                    visitor.connection.send(invitation, descriptor, *pidfds)
                group = request.open(descriptor, 0, request.size, invitation["nonce"])
                try:
                    _watch(group, request, _members(invitation), pidfds)
                except BaseException:
                    group.close()
                    raise
                return group
        finally:
            os.close(descriptor)

    # -- following -----------------------------------------------------------------------------

    def _follow(
        self,
        connection: Connection,
        request: JoinRequest,
        deadline: Deadline,
        me: Announcement,
        sends_pidfd: bool,
    ) -> Membership:
        patient = Deadline(deadline.left_s() + _GRACE_S)
        group: engine.Group | None = None
        try:
            try:
                with _own_pidfd() as mine, contextlib.suppress(ConnectionError):  # told below, why
                    connection.send(_hello(request, me), *(mine if sends_pidfd else ()))
                invitation = self._invitation(connection, request, deadline, patient)
            except TooFewDescriptors as error:
                connection.try_send(
                    _hello(request, me) | {"error": f"rank {request.rank}: {error}"}
                )
                raise
            members = _members(invitation)
            try:
                descriptor, *pidfds = connection.descriptors
                group = request.open(
                    descriptor, request.rank, request.size, int(invitation["nonce"])
                )
                _watch(group, request, members, pidfds)
            except (UnisonoError, ValueError) as error:
                connection.try_send({"error": f"rank {request.rank}: {error}"})
                raise
            connection.try_send({"opened": True})
            connection.receive(patient)  # or hear why there is nobody to send to any more
            payloads = tuple(map(str, invitation["payloads"]))
            return Membership(request.key, request.rank, request.size, group, members, payloads)
        except BaseException as error:
            if group is not None:
                group.close()
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise Departed(
                    f"group {request.key}: rank 0 went away while the group was made ({error})"
                ) from error
            raise
        finally:
            connection.close()

    @staticmethod
    def _invitation(
        connection: Connection, request: JoinRequest, deadline: Deadline, patient: Deadline
    ) -> Announcement:
        """Wait until rank 0 says that all are there; who is missing, it may say before."""
        waiting = Waiting(request.rank, request.size, request.key, deadline)
        missing: list[int] = []
        try:
            while "missing" in (message := connection.receive(patient)):
                missing = [int(rank) for rank in message["missing"]]
                waiting.say(missing, request.size - len(missing))
        except NoAnswer as error:
            who = name_ranks(missing) if missing else "some rank"
            raise RendezvousError(
                f"group {request.key}: rank 0 is here, but {who} of {request.size} did not come "
                f"within {in_seconds(request.deadline.timeout_s)}"
            ) from error
        return message


def _hello(request: JoinRequest, me: Announcement) -> Announcement:
    return me | {
        "key": request.key,
        "rank": request.rank,
        "size": request.size,
        "payload": request.payload,
    }


@contextlib.contextmanager
def _own_pidfd() -> Iterator[list[int]]:
    """A descriptor of this process, by which peers learn of its end; none on old kernels."""
    try:
        with descriptors_needed():
            descriptor = os.pidfd_open(os.getpid())
    except OSError:
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _watch(
    group: engine.Group, request: JoinRequest, members: tuple[Member, ...], pidfds: list[int]
) -> None:
    for rank, member in enumerate(members):
        pidfd = pidfds[rank] if rank < len(pidfds) else -1
        if rank != request.rank and not group.watch(rank, member.identity, pidfd) and pidfd >= 0:
            raise TooFewDescriptors(f"rank {request.rank} could not begin to watch rank {rank}")


def _cores(everyone: list[Announcement]) -> int:
    """How many cores the members have together: those they may run on, cut by their quotas."""
    cpus = {cpu for member in everyone for cpu in member["cpus"]}
    return min(len(cpus), *(int(member["quota"]) for member in everyone))


def _members(invitation: Announcement) -> tuple[Member, ...]:
    return tuple(Member(str(address), int(pid)) for address, pid in invitation["members"])
