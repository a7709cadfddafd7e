"""How the ranks of one machine find each other and come to share a segment.

Every process keeps a *lobby*: an abstract unix socket with a random name, open to this user
alone. The first member of a new group, its *leader*, receives the others in its lobby, makes the
segment and hands its descriptor over. Who the leader is, the members of an existing group know;
strangers learn it through an *exchange* (exchange.py). No port is opened and nothing has a name
in the file system, the exchange's file aside.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from unisono.comm.rendezvous.announcements import Exchange, FileExchange, StoreExchange, Word
from unisono.comm.rendezvous.discovery import about_me, check_missing, clear_if_over, find_leader
from unisono.comm.rendezvous.unix_socket import (
    Deadline,
    Departed,
    Line,
    NoAnswer,
    TooFewDescriptors,
    descriptors_needed,
)
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.comm.shared_memory import engine
from unisono.errors import GroupClosed, RendezvousError, UnisonoError
from unisono.wording import name_ranks

__all__ = ["Exchange", "FileExchange", "Lobby", "Place", "Side", "StoreExchange"]

_HELLO_S = 10.0
"""How long a connection may stay silent before it is hung up."""

_QUIET_S = 0.2
"""After so long without a visitor, a leader looks where the missing ones are."""

_MOST_PIDFDS = 250
"""Larger groups are not watched: so many descriptors do not fit into one message."""

_GRACE_S = 2.0
"""How much longer followers wait than their leader, so that they hear its reason."""


@dataclass(frozen=True)
class Side:
    """What one rank brings to a meeting: the group's key, its place, and how to open it.

    `check` raises once there is nobody to wait for any more: the parent group has ended.
    """

    key: str
    rank: int
    size: int
    deadline: Deadline
    open: Callable[[int, int, int, int], engine.Group]
    word: str = ""
    """What the others shall know of this rank."""
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Place:
    """What one rank takes from a meeting."""

    key: str
    rank: int
    size: int
    group: engine.Group
    members: tuple[Member, ...]
    words: tuple[str, ...] = ()
    """What each rank says of itself."""


@dataclass(frozen=True)
class Member:
    """A rank as its peers know it."""

    address: str
    pid: int

    @property
    def identity(self) -> int:
        """A number for the process; the address is random, so its end is as good as all of it."""
        return int(self.address[-16:], 16)


@dataclass
class _Visitor:
    line: Line
    hello: Word
    key: str
    rank: int


_lobbies: weakref.WeakSet[Lobby] = weakref.WeakSet()


def _close_doors() -> None:
    """In a forked child: the doors are the parent's, and must not stay open when it ends."""
    for lobby in list(_lobbies):
        lobby.shut()


if hasattr(os, "register_at_fork"):  # the package also installs where the engine cannot run
    os.register_at_fork(after_in_child=_close_doors)


class Lobby:
    """This process's door: a listening socket, and the visitors that came too early.

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
        self._silent: dict[Line, Deadline] = {}
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
        """Count one owner less; the last one closes the door."""
        self._owners -= 1
        if self._owners == 0 and self._pid == os.getpid():
            self.shut()

    def shut(self) -> None:
        """Close the socket, and hang up on whoever stands at the door."""
        for visitors in self._early.values():
            for visitor in visitors:
                visitor.line.close()
        for line in self._silent:
            line.close()
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

    def meet_by(self, exchange: Exchange, side: Side) -> Place:
        """Meet strangers: rank 0 leads, and is found through the exchange."""
        with descriptors_needed():
            deadline = side.deadline
            me = about_me(self.address)
            exchange.announce(side.rank, me)
            if side.rank == 0:
                try:
                    return self._lead(side, deadline, exchange, me)
                except BaseException:
                    exchange.clear(0, me)
                    raise
            try:
                line = find_leader(exchange, side, deadline, me)
            except TooFewDescriptors as error:
                self._excuse(exchange, side, me, error)
                raise
            try:
                return self._follow(line, side, deadline, me, strangers=True)
            except Departed:
                clear_if_over(exchange, me)
                raise

    def meet_at(self, leader_address: str, side: Side) -> Place:
        """Meet acquaintances: the leader's address is known."""
        if self._pid != os.getpid():
            raise GroupClosed(
                f"the parent group belongs to process {self._pid}: a forked child cannot split it"
            )
        with descriptors_needed():
            deadline = side.deadline
            if side.rank == 0:
                return self._lead(side, deadline, None, about_me(self.address))
            line = self._call(leader_address, side, deadline)
            return self._follow(line, side, deadline, about_me(self.address), strangers=False)

    @staticmethod
    def _call(leader_address: str, side: Side, deadline: Deadline) -> Line:
        while True:
            try:
                return Line.connect(leader_address)
            except BlockingIOError as error:  # its queue is full until it makes groups again
                side.check()
                if not deadline.left_s():
                    raise RendezvousError(
                        f"rank 0 of the new group {side.key} has let nobody in for "
                        f"{in_seconds(side.deadline.timeout_s)}: the queue at its door is full"
                    ) from error
                time.sleep(0.01)
            except OSError as error:
                raise RendezvousError(
                    f"rank 0 of the new group {side.key} cannot be reached: its process has ended "
                    f"or closed the parent group ({error.strerror})"
                ) from error

    def _excuse(self, exchange: Exchange, side: Side, me: Word, error: RendezvousError) -> None:
        """Tell rank 0, if it is there, that this rank will not come."""
        self.shut()  # by what that frees it can be told
        with contextlib.suppress(OSError, RendezvousError):
            word = exchange.look_up(0)
            if word is not None:
                line = Line.connect(str(word["address"]))
                line.try_send(_hello(side, me) | {"error": f"rank {side.rank}: {error}"})
                line.close()

    # -- leading -------------------------------------------------------------------------------

    def _lead(self, side: Side, deadline: Deadline, exchange: Exchange | None, me: Word) -> Place:
        visitors: dict[int, _Visitor] = {}
        try:
            self._keep_spare()
            self._receive(side, deadline, exchange, me, visitors)
            return self._seat(side, deadline, exchange, me, visitors)
        except BaseException as error:
            reason = str(error) if isinstance(error, UnisonoError) else f"rank 0 failed: {error!r}"
            self._use_spare()
            self._dismiss(list(visitors.values()), reason, again=isinstance(error, Departed))
            visitors.clear()
            with contextlib.suppress(RendezvousError):  # of itself: there is a reason already
                while late := self._visitors_for(side.key, 0.05):
                    self._dismiss(late, reason, again=isinstance(error, Departed))
            if exchange is not None:  # else who has not spoken yet may have come for another group
                for line in self._silent:
                    line.try_send({"error": reason, "again": isinstance(error, Departed)})
            raise
        finally:
            self._use_spare()
            for visitor in visitors.values():
                visitor.line.close()

    @staticmethod
    def _dismiss(visitors: list[_Visitor], reason: str, again: bool) -> None:
        for visitor in visitors:
            visitor.line.try_send({"error": reason, "again": again})
            visitor.line.close()

    def _receive(
        self,
        side: Side,
        deadline: Deadline,
        exchange: Exchange | None,
        me: Word,
        visitors: dict[int, _Visitor],
    ) -> None:
        """Wait until every other rank has come in."""
        unreached: dict[int, float] = {}
        waiting = Waiting(side.rank, side.size, side.key, deadline)
        told: set[int] = set()
        while len(visitors) < side.size - 1:
            missing = [rank for rank in range(1, side.size) if rank not in visitors]
            if not deadline.left_s() or waiting.is_long():
                left = [rank for rank, visitor in visitors.items() if visitor.line.is_closed()]
                absent = sorted(missing + left)
                if not deadline.left_s():
                    raise RendezvousError(
                        f"group {side.key}: {name_ranks(absent)} of {side.size} did not come "
                        f"within {in_seconds(side.deadline.timeout_s)}"
                    )
                waiting.say(absent, side.size - len(absent))
                for rank in visitors.keys() - told:  # so that they can say it, too
                    visitors[rank].line.try_send({"missing": absent})
                    told.add(rank)
            begin_s = time.monotonic()
            arrived = self._visitors_for(side.key, min(_QUIET_S, deadline.left_s()))
            nobody = not arrived and time.monotonic() - begin_s >= _QUIET_S / 2
            if nobody:
                side.check()
            while arrived:
                visitor = arrived.pop(0)
                try:
                    visitors[visitor.rank] = self._check(visitor, side, visitors)
                except RendezvousError:
                    self._early[side.key] = arrived  # they are told, too
                    raise
            if exchange is not None and nobody:
                if exchange.look_up(0) is None:  # somebody tidied up, and took it for a dead one's
                    exchange.announce(0, me)
                check_missing(exchange, missing, unreached)

    def _visitors_for(self, key: str, timeout_s: float) -> list[_Visitor]:
        """Those who have come for this group; whoever comes for another waits for it."""
        with self._lock:
            if key not in self._early:
                for visitor in self._new_visitors(timeout_s):
                    self._early.setdefault(visitor.key, []).append(visitor)
            return self._early.pop(key, [])

    def _new_visitors(self, timeout_s: float) -> list[_Visitor]:
        """Let people in for a while; those who have said who they are."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        for line in self._silent:
            poller.register(line, select.POLLIN)
        if not poller.poll(max(1, int(timeout_s * 1000))):
            return []
        with contextlib.suppress(OSError), descriptors_needed():  # nobody there, or gone again
            accepted, _ = self._socket.accept()
            self._silent[Line(accepted)] = Deadline(_HELLO_S)
        visitors = []
        for line, patience in list(self._silent.items()):
            hello = None
            try:
                if line.peer_uid() != os.geteuid() or not patience.left_s():
                    raise ValueError("a stranger, or one who says nothing")
                hello = line.poll()
                if hello is None:
                    continue
                visitors.append(_Visitor(line, hello, str(hello["key"]), int(hello["rank"])))
            except TooFewDescriptors as error:
                line.try_send({"error": f"rank 0: {error}"})
                line.close()
                raise
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                line.close()  # noise: not our business
            finally:
                if hello is not None or line.fileno() < 0:
                    del self._silent[line]
        return visitors

    @staticmethod
    def _check(visitor: _Visitor, side: Side, present: dict[int, _Visitor]) -> _Visitor:
        hello = visitor.hello
        wrong = None
        before = present.get(visitor.rank)
        if before is not None and before.line.is_closed():  # it has started anew
            before.line.close()
            del present[visitor.rank]
        if "error" in hello:
            wrong = f"cannot come: {hello['error']}"
        elif hello.get("layout") != engine.layout_version():
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

    def _seat(
        self,
        side: Side,
        deadline: Deadline,
        exchange: Exchange | None,
        me: Word,
        visitors: dict[int, _Visitor],
    ) -> Place:
        """Make the segment, hand it to everyone, and go on once all have opened it."""
        group: engine.Group | None = None
        try:
            everyone = [me | {"word": side.word}]
            everyone += [visitors[rank].hello for rank in range(1, side.size)]
            words = tuple(str(member.get("word", "")) for member in everyone)
            invitation = {
                "nonce": secrets.randbits(63),
                "members": [(member["address"], member["pid"]) for member in everyone],
                "words": words,
            }
            members = _members(invitation)
            group = self._hand_over(side, invitation, _cores(everyone), visitors)
            if exchange is not None:  # before anybody can come back for another meeting
                exchange.clear(0, me)
                for rank in visitors:
                    exchange.clear(rank)
            for visitor in visitors.values():
                visitor.line.receive(deadline)
            for visitor in visitors.values():
                visitor.line.send({"go": True})
        except BaseException as error:
            if group is not None:
                group.close()
            if isinstance(error, (OSError, ValueError, KeyError, TypeError)):
                raise Departed(
                    f"a member of group {side.key} left, or spoke nonsense, while the group was "
                    f"made ({error})"
                ) from error
            raise
        return Place(side.key, 0, side.size, group, members, words)

    @staticmethod
    def _hand_over(
        side: Side, invitation: Word, cores: int, visitors: dict[int, _Visitor]
    ) -> engine.Group:
        descriptor = engine.create_segment(side.size, cores, invitation["nonce"])
        try:
            with _own_pidfd() as mine:
                theirs = (visitors[rank].line.descriptors for rank in sorted(visitors))
                pidfds = mine + [pidfd for sent in theirs for pidfd in sent]
                if len(pidfds) != side.size or side.size > _MOST_PIDFDS:
                    pidfds = []  # acquaintances know each other's already
                for visitor in visitors.values():
                    visitor.line.send(invitation, descriptor, *pidfds)
                group = side.open(descriptor, 0, side.size, invitation["nonce"])
                try:
                    _watch(group, side, _members(invitation), pidfds)
                except BaseException:
                    group.close()
                    raise
                return group
        finally:
            os.close(descriptor)

    # -- following -----------------------------------------------------------------------------

    def _follow(
        self, line: Line, side: Side, deadline: Deadline, me: Word, strangers: bool
    ) -> Place:
        patient = Deadline(deadline.left_s() + _GRACE_S)
        group: engine.Group | None = None
        try:
            try:
                with _own_pidfd() as mine, contextlib.suppress(ConnectionError):  # told below, why
                    line.send(_hello(side, me), *(mine if strangers else ()))
                invitation = self._invitation(line, side, deadline, patient)
            except TooFewDescriptors as error:
                line.try_send(_hello(side, me) | {"error": f"rank {side.rank}: {error}"})
                raise
            members = _members(invitation)
            try:
                descriptor, *pidfds = line.descriptors
                group = side.open(descriptor, side.rank, side.size, int(invitation["nonce"]))
                _watch(group, side, members, pidfds)
            except (UnisonoError, ValueError) as error:
                line.try_send({"error": f"rank {side.rank}: {error}"})
                raise
            line.try_send({"opened": True})
            line.receive(patient)  # or hear why there is nobody to send to any more
            words = tuple(map(str, invitation["words"]))
            return Place(side.key, side.rank, side.size, group, members, words)
        except BaseException as error:
            if group is not None:
                group.close()
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise Departed(
                    f"group {side.key}: rank 0 went away while the group was made ({error})"
                ) from error
            raise
        finally:
            line.close()

    @staticmethod
    def _invitation(line: Line, side: Side, deadline: Deadline, patient: Deadline) -> Word:
        """Wait until rank 0 says that all are there; who is missing, it may say before."""
        waiting = Waiting(side.rank, side.size, side.key, deadline)
        missing: list[int] = []
        try:
            while "missing" in (message := line.receive(patient)):
                missing = [int(rank) for rank in message["missing"]]
                waiting.say(missing, side.size - len(missing))
        except NoAnswer as error:
            who = name_ranks(missing) if missing else "some rank"
            raise RendezvousError(
                f"group {side.key}: rank 0 is here, but {who} of {side.size} did not come within "
                f"{in_seconds(side.deadline.timeout_s)}"
            ) from error
        return message


def _hello(side: Side, me: Word) -> Word:
    return me | {"key": side.key, "rank": side.rank, "size": side.size, "word": side.word}


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


def _watch(group: engine.Group, side: Side, members: tuple[Member, ...], pidfds: list[int]) -> None:
    for rank, member in enumerate(members):
        pidfd = pidfds[rank] if rank < len(pidfds) else -1
        if rank != side.rank and not group.watch(rank, member.identity, pidfd) and pidfd >= 0:
            raise TooFewDescriptors(f"rank {side.rank} could not begin to watch rank {rank}")


def _cores(everyone: list[Word]) -> int:
    """How many cores the members have together: those they may run on, cut by their quotas."""
    cpus = {cpu for member in everyone for cpu in member["cpus"]}
    return min(len(cpus), *(int(member["quota"]) for member in everyone))


def _members(invitation: Word) -> tuple[Member, ...]:
    return tuple(Member(str(address), int(pid)) for address, pid in invitation["members"])
