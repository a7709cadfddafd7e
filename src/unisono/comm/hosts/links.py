"""The control lines of this process to processes on other hosts, and what it receives on them.

UCX carries data; a line shows when the other process or its host is gone (control_line.py), and
carries questions. There is a line to one rank of each other host from the beginning, and to any
other rank once there is a question for it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from unisono.comm.engine import native
from unisono.comm.hosts.contacts import Contact, exchange_contacts, own_contact
from unisono.comm.hosts.control_line import ENDED, ControlLines
from unisono.comm.hosts.questions import Questions, answers, last_words
from unisono.comm.meeting.board import Board, Foreign, StoreGone
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.identity import Hosts
from unisono.comm.meeting.network import INSTEAD, MORE_NEIGHBOURS
from unisono.comm.over_torch.stores import store_at
from unisono.errors import GroupClosed, RendezvousError, name_ranks
from unisono.processes import state_of
from unisono.variables import job_secret

_BEHIND_S = 2.0
"""How long data that a process sent before it left may still be in transit."""
_PATIENT = (0.7, 0.3), (1.0, 0.3)
"""How long the next answers about stopped ranks may take, and new lines for the questions."""
_STAY_S = 3.0
_STORE_S = 5.0
_END_S = 1.0
_DRAW_S = 1.0
"""How long a new line to a rank may take."""

all_links: weakref.WeakSet[Links] = weakref.WeakSet()
"""Those of this process, one for each world over hosts that it belongs to."""

_network = threading.Lock()
"""Of opening and closing what all of them share, since several threads may close links at once."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_network._at_fork_reinit)  # type: ignore[attr-defined]


class GroupMembers(NamedTuple):
    """The `name` of a group, the `key` of its records, and its members' global ranks."""

    name: str
    key: str
    members: tuple[int, ...]


class Ballot:
    """Where this process votes on the ranks that survive a group: the number of the store, when
    that last answered, and whether it has voted, or will not turn to another store."""

    store: int = 0
    answered_s: float = 0.0
    is_final: bool = False


class Party(Protocol):
    """A group, which is told when processes end."""

    key: int

    def describe(self) -> GroupMembers: ...

    def on_lost(self, peer: int, is_silent: bool) -> None:
        """The process of a global rank has ended, or no longer answers."""

    def on_left(self, peer: int) -> None:
        """The process of a global rank has left all groups cleanly."""

    def end(self) -> None:
        """This process ends."""


class Links:
    """The lines of one process of a world. Groups keep them open by `share` and `close`."""

    def __init__(self, board: Board, hosts: Hosts, me: int) -> None:
        self.hosts = hosts
        self.me = me
        self._board: Board | None = board.until(board.deadline)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._contacts: list[Contact] = []
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._made: Counter[str] = Counter()
        self._parties: weakref.WeakValueDictionary[int, Party] = weakref.WeakValueDictionary()
        self._holders = 0
        self._stays_until = 0.0
        self._timers: list[threading.Timer] = []
        self._is_closed = False
        self._lines = ControlLines(
            hosts.address,
            me,
            hosts.secret,
            self._on_line,
            self._on_lost,
            self._on_summons,
            self._on_left,
        )
        self.votes: dict[int, Ballot] = {}
        self.questions = Questions(
            self._lines.send, {"stopped": self._tell_stopped, "vote": self._tell_vote}
        )
        with _network:  # from here on it stays open for these
            all_links.add(self)
        atexit.register(_close_at_exit, weakref.ref(self))

    def meet(self, board: Board, group: str, *, has_data: bool = True) -> None:
        """Learn how to reach all ranks of the world; each calls this. Raises RendezvousError, on
        all of them, if they have no UCX, or different ones, and it `has_data` to carry."""
        mine = own_contact(self.hosts.address, self._lines.where[1], has_data)
        self._contacts = exchange_contacts(board, self.hosts, self.me, mine, group)

    def workers(self, members: Sequence[int]) -> list[tuple[bytes, int, int]]:
        """The addresses of the UCX workers of these global ranks, b"" for those of this host; and
        the proofs that messages from this worker to that one carry, and back."""
        here = self.hosts.members[self.hosts.mine]
        secret = hashlib.sha256(job_secret()).digest()

        def prove(*workers: bytes) -> int:
            told = hashlib.blake2b(b"".join(workers), key=secret, digest_size=8).digest()
            return int.from_bytes(told, "big")

        mine, *found = (bytes.fromhex(self._contacts[rank].worker) for rank in (self.me, *members))
        return [
            (b"", 0, 0) if member in here else (worker, prove(mine, worker), prove(worker, mine))
            for member, worker in zip(members, found, strict=True)
        ]

    def where(self, member: int) -> tuple[str, int]:
        """Where a global rank listens for control lines."""
        return self._contacts[member].where

    def share(self) -> Links:
        """One more user."""
        with self._lock:
            self._holders += 1
        return self

    def close(self, key: int) -> None:
        """One user fewer, the group with this key; the last one ends all connections."""
        with self._lock:
            self._parties.pop(key, None)
            self._holders -= 1
            if self._holders > 0:
                return
        self.close_all()

    def close_all(self) -> None:
        """Say goodbye to all."""
        with self._lock:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
        time.sleep(max(0.0, self._stays_until - time.monotonic()))
        for timer in self._timers:
            timer.cancel()
            timer.join()
        with _network:
            if not any(links.is_open() for links in list(all_links)):
                native.close_network()  # after all data was handed to the network
        self._lines.close()
        self._board = None  # its store has a socket, too

    def leave_all(self) -> None:
        """The process ends: close the remaining groups, and then the lines."""
        if self._pid != os.getpid():
            return
        try:
            for describe in last_words if self.is_open() else ():
                words = describe()  # first: it may ask other hosts, with or without a store
                with contextlib.suppress(StoreGone):
                    self.reopen_board(_END_S).set(f"unisono/end/{self.me}", words)
        finally:  # Ctrl-C may interrupt it
            for party in self._open_parties():
                party.end()
            self.close_all()

    # -- groups ----------------------------------------------------------------------------------

    def next_key(self, name: str) -> int:
        """The key of the next group of this name, the same on all hosts and unique: programs
        reuse names, and only the secret distinguishes worlds."""
        with self._lock:
            self._made[name] += 1
            text = f"{self._made[name]} {name}"
        digest = hashlib.blake2b(text.encode(), key=self.hosts.secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def add(self, party: Party) -> None:
        """Tell a group when processes end, including those that have already ended."""
        with self._lock:
            self._parties[party.key] = party
            lost = dict(self._lost)
        for peer, why in lost.items():
            party.on_lost(peer, why != ENDED)

    def describe_groups(self) -> list[GroupMembers]:
        """This process's groups over hosts."""
        return [party.describe() for party in self._open_parties()]

    def _open_parties(self) -> list[Party]:
        with self._lock:
            return list(self._parties.values())

    def loss_of(self, peer: int) -> str | None:
        """How the process of a global rank ended: completes "rank 3 ..."; None if it is there,
        or nothing is known."""
        return self._lost.get(peer)

    def last_words_of(self, peer: int) -> str:
        """How the process of a global rank ended, as it said in the store; "" if it did not, if
        another process wrote it, or if the store has ended."""
        with contextlib.suppress(StoreGone, Foreign):
            return self.reopen_board(_END_S).get(f"unisono/end/{peer}")
        return ""

    def reopen_board(self, timeout_s: float) -> Board:
        """The board on which the ranks met, by a separate connection. Raises StoreGone."""
        if self._board is None:
            raise StoreGone("the links of this process are closed")
        return self._board.reopen(Deadline(timeout_s))

    def open_hosted(
        self, peer: int, is_gone: Callable[[], bool] = lambda: False, limit_s: float = 2 * _STORE_S
    ) -> Any:
        """A connection to the store that a global rank hosts on request, until its process ends.
        Raises StoreGone, soon if the rank `is_gone`."""
        address, limit = self._contacts[peer].address, Deadline(limit_s)
        port: int | None = None
        while port is None and not (peer in self._lost or is_gone()) and limit.left_s():
            if peer == self.me:
                port = _host_store(address)
            else:
                asked = self.questions.ask(self._reach([peer]), "store", address, _DRAW_S)
                port = asked.get(peer)
        try:
            if not port:
                raise RendezvousError("it does not answer")
            return store_at(
                address, str(port), self.me, len(self.hosts.pids), _STORE_S, hosts=False
            )
        except RendezvousError as error:
            raise StoreGone(f"{self.hosts.name_rank(peer)} hosts no store: {error}") from error

    def decide(self, key: int, serial: int, value: int, timeout_s: float) -> int:
        """The value that the first rank of a group proposed under this serial. Raises StoreGone."""
        board = self.reopen_board(timeout_s)
        return int(board.compare_set(f"unisono/decision/{key:x}/{serial}", "", str(value)))

    # -- questions -------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Whether questions can be asked."""
        return not self._is_closed

    def ask_hosts(
        self,
        topic: str,
        about: Any,
        timeout_s: float,
        meanwhile: Callable[[], object] | None = None,
        draw_s: float = _DRAW_S,
    ) -> dict[int, tuple[int, Any]]:
        """By host: which of its global ranks has answered, and what. If one does not answer in
        time, another rank of its host is asked, once; a host without an answer is left out.
        `meanwhile` is called periodically; a new line may take `draw_s`."""
        found: dict[int, tuple[int, Any]] = {}
        tried: set[int] = set()
        for _ in range(2):
            others = set(range(self.hosts.count)) - {self.hosts.mine, *found}
            asked = self._spokesmen(others, tried, draw_s)
            tried |= set(asked)
            if not asked:
                break
            told = self.questions.ask(asked, topic, about, timeout_s, meanwhile)
            for peer, answer in told.items():
                if answer is not None:
                    found[asked[peer]] = peer, answer
        return found

    def _spokesmen(self, hosts: set[int], tried: set[int], draw_s: float) -> dict[int, int]:
        """A rank of each of these hosts, and the host: one with a line to it, if any."""
        found: dict[int, int] = {}
        for host in hosts:
            members = self.hosts.members[host]
            left = [rank for rank in members if rank not in tried and self.may_answer(rank)]
            left.sort(key=lambda rank: not self._lines.reaches(rank))
            if left:
                found[left[0]] = host
        return {rank: found[rank] for rank in self._reach(found, draw_s)}

    def _reach(self, peers: Iterable[int], draw_s: float = _DRAW_S) -> list[int]:
        """Those of these global ranks to which there is a line, or soon will be."""
        peers = list(filter(self.may_answer, peers))
        for peer in peers:
            if draw_s and not self._lines.reaches(peer):
                self._lines.want(peer, self._contacts[peer].where, _DRAW_S, summons=True)
        end = time.monotonic() + draw_s
        while time.monotonic() < end and not all(
            self._lines.reaches(peer) or not self.may_answer(peer) for peer in peers
        ):
            time.sleep(0.005)
        return list(filter(self._lines.reaches, peers))

    def may_answer(self, peer: int) -> bool:
        """Whether nothing shows that a global rank has ended, or left."""
        return peer not in self._lost and peer not in self._left

    def is_lowest(self) -> bool:
        """Whether no lower rank of the world can be asked any more."""
        return not any(map(self.may_answer, range(self.me)))

    def ask_ranks(
        self,
        ranks: Iterable[int],
        topic: str,
        about: Any,
        timeout_s: float,
        draw_s: float = _DRAW_S,
    ) -> dict[int, Any]:
        """The answers of other global ranks."""
        others = [rank for rank in ranks if rank != self.me]
        return self.questions.ask(self._reach(others, draw_s), topic, about, timeout_s)

    def stay(self) -> None:
        """Stay for a moment, since others may ask about ranks of this host: called when a call
        has failed on all ranks at once."""
        self._stays_until = time.monotonic() + _STAY_S

    def find_stopped(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Which of these global ranks on other hosts are stopped, according to their hosts. If a
        host does not answer, another of its ranks is asked, too, since the first may be stopped
        itself, and both are given more time, since the machine may be busy."""
        host_of: dict[int, int] = {}
        for host in {self.hosts.host_of(rank) for rank in ranks}:
            known = sorted(self.hosts.members[host], key=lambda rank: not self._lines.reaches(rank))
            host_of |= dict.fromkeys([*filter(self.may_answer, known)][:2], host)
        found: dict[int, list[int]] = {}
        for limit_s, draw_s in ((timeout_s, 0.0), *_PATIENT):
            silent = {rank: host for rank, host in host_of.items() if host not in found}
            asked = self._reach(silent, draw_s)
            told = self.questions.ask(asked, "stopped", list(ranks), limit_s, None, silent)
            found |= {host_of[rank]: answer for rank, answer in told.items() if answer is not None}
        return [int(rank) for answer in found.values() for rank in answer]

    def _tell_stopped(self, ranks: list[int]) -> list[int]:
        here, pids = self.hosts.members[self.hosts.mine], self.hosts.pids
        return [rank for rank in ranks if rank in here and state_of(pids[rank]).is_stopped]

    def _tell_vote(self, key: int) -> tuple[int, float, bool] | None:
        if (at := self.votes.get(key)) is None:
            return None
        return at.store, time.monotonic() - at.answered_s, at.is_final

    def find_ranks(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """What each of these global ranks on other hosts does: completes "rank 3 ..."."""
        at = self.ask_ranks(ranks, "where", None, timeout_s)
        found = dict.fromkeys(ranks, "did not answer")
        found |= {rank: f"is at {line}" for rank, line in at.items()}
        return found | {rank: self._lost[rank] for rank in ranks if rank in self._lost}

    # -- lines -----------------------------------------------------------------------------------

    def connect(
        self, peers: Sequence[int], timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connect lines to these global ranks, which do the same. Raises RendezvousError; and what
        `check` raises, which is called again and again."""
        limit = Deadline(timeout_s)

        def check_peers() -> None:
            check()
            if gone := [self.hosts.name_rank(rank) for rank in peers if rank in self._left]:
                raise GroupClosed(f"{gone[0]} has closed all its groups")

        for peer in peers:
            self._lines.want(peer, self._contacts[peer].where, timeout_s)
        for peer in peers:
            try:
                self._lines.connect(peer, self._contacts[peer].where, limit.left_s(), check_peers)
            except RendezvousError as error:
                left = [rank for rank in peers if not self._lines.reaches(rank)]
                more = f"; {name_ranks(left)} are missing" if len(left) > 1 else ""
                raise self.no_connection(peer, f"{error}{more}") from error

    def no_connection(self, peer: int, why: str) -> RendezvousError:
        """The exception for a global rank that cannot be reached."""
        ends = []
        for rank in (self.me, peer):
            at = self._contacts[rank]
            ends.append(f"{self.hosts.name_rank(rank)}, at {at.address} on {at.interface}")
        advice = f"Open all ports between these hosts, or {INSTEAD}"
        if os.strerror(errno.EHOSTUNREACH) in why:
            advice += f"; with many hosts, {MORE_NEIGHBOURS} on each"
        return RendezvousError(f"no connection between {ends[0]}, and {ends[1]}: {why}. {advice}")

    def _on_line(self, peer: int, message: dict[str, Any]) -> None:
        self.questions.on_message(peer, message)

    def _on_summons(self, peer: int) -> None:
        if self._contacts:  # otherwise it asks again
            self._lines.want(peer, self._contacts[peer].where, _DRAW_S)

    def _on_lost(self, peer: int, why: str) -> None:
        with self._lock:
            if self._is_closed or peer in self._lost:
                return
            self._lost[peer] = why
        self.questions.give_up(peer)
        for party in self._open_parties():
            party.on_lost(peer, why != ENDED)

    def _on_left(self, peer: int) -> None:
        """Its groups also say so by UCX, after their data, unless UCX has failed."""
        self._left.add(peer)
        self.questions.give_up(peer)
        timer = threading.Timer(_BEHIND_S, self._tell_left, (peer,))
        timer.daemon = True
        with self._lock:
            if not self._is_closed:
                timer.start()
                self._timers.append(timer)

    def _tell_left(self, peer: int) -> None:
        for party in self._open_parties():
            party.on_left(peer)


@functools.cache
def _hosted_store(address: str) -> Any:
    return store_at(address, "0", 0, 1, _STORE_S, hosts=True)


_hosting = threading.Lock()


def _host_store(address: str) -> int:
    with _hosting:  # several may ask at the same time
        return int(_hosted_store(address).port)


answers["store"] = _host_store


def _close_at_exit(reference: weakref.ref[Links]) -> None:
    links = reference()
    if links is not None:
        links.leave_all()
