"""How new processes join an existing group, when its members call for them.

The first member announces itself under a name and receives the newcomers, which wait there; it
tells the members which processes joined and as which ranks, and the newcomers what the new group
is. Then all meet and make a segment for all. The old group stays as it is, whether that succeeds or
not; the members settle the outcome there, so that all of them get the new group, or none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from unisono.comm.meeting import announcements
from unisono.comm.meeting.announcements import Announcement
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline, Waiting, in_seconds
from unisono.comm.meeting.membership import JoinRequest, Membership, find_leader, meet_at
from unisono.comm.meeting.unix_socket import (
    Connection,
    Departed,
    RendezvousServer,
    descriptors_needed,
)
from unisono.errors import RendezvousError

MEETING_S = 10.0
_GLANCE_S = 0.2


class Growing(Protocol):
    """A group that new processes will join."""

    rank: int
    size: int
    timeout_s: float

    def exchange_integers(self, integers: tuple[int, ...], limit_s: float) -> list[Any]: ...
    def raise_if_ended(self) -> None: ...


class Growth:
    """What a group grows into: its `name`, the `key` of the meeting, and the new rank of each
    participant, members first (`places`)."""

    def __init__(self, name: str, key: str, places: Sequence[int]) -> None:
        self.name, self.key, self.places = name, key, tuple(places)

    @property
    def size(self) -> int:
        return len(self.places)

    def request(
        self,
        number: int,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        settle: Callable[[bool], bool] | None = None,
    ) -> JoinRequest:
        """The request of the participant with this number."""
        size, limit = self.size, Deadline(MEETING_S)
        segments = [(self.places, size, size)]
        return JoinRequest(
            self.key, number, size, limit, timeout_s, "", check, segments, settle=settle
        )

    def membership(self, met: Membership) -> Membership:
        """A rank's membership in the new group, whose ranks differ from those of the meeting."""
        order = sorted(range(self.size), key=self.places.__getitem__)
        members = tuple(met.members[number] for number in order)
        return Membership(self.key, self.places[met.rank], self.size, met.group, members)


def places_after(members: int, wanted: Sequence[int]) -> list[int]:
    """The new ranks of members and newcomers: a newcomer gets the one it wants, or (-1) one at
    the end; the members get the others, in order."""
    size = members + len(wanted)
    free = [rank for rank in range(size) if rank not in wanted]
    behind = iter(free[members:])
    return free[:members] + [rank if rank >= 0 else next(behind) for rank in wanted]


def number_newcomers(
    global_ranks: Sequence[int] | None, places: Sequence[int]
) -> tuple[int, ...] | None:
    """The global ranks of a group that has grown, by its ranks: members keep theirs, newcomers
    get the lowest free ones, which belonged to dead ranks."""
    if global_ranks is None:
        return None
    free = (rank for rank in itertools.count() if rank not in global_ranks)
    known = dict(zip(places, global_ranks, strict=False))
    return tuple(known[rank] if rank in known else next(free) for rank in range(len(places)))


class NewcomerServer:
    """Where the first member of a group of `members` receives newcomers."""

    def __init__(
        self,
        board: Board,
        server: RendezvousServer,
        name: str,
        members: int,
        generation: int,
    ) -> None:
        self._board, self._server, self._name = board, server, name
        self._members, self._generation = members, generation
        self._inside: list[Connection] = []

    @property
    def wanted(self) -> list[int]:
        """The ranks that the newcomers want, -1 for any."""
        return [visitor.rank for visitor in self._inside]

    def receive(self, count: int, limit: Deadline, check: Callable[[], None]) -> None:
        """Wait for this many newcomers. Raises RendezvousError if they do not join, and what
        `check` raises, which is called periodically."""
        me = announcements.about_me(self._server.address) | {"grows": True}
        announcements.announce(self._board, me)
        size = self._members + count
        try:
            while len(self._inside) < count:
                for visitor in self._server.visitors_for(_key(self._name), _GLANCE_S):
                    self._let_in(visitor, size)
                self._inside = [one for one in self._inside if not one.is_closed()]
                check()
                if not limit.left_s():
                    raise RendezvousError(
                        f"group {self._name}: {count - len(self._inside)} of {count} new processes "
                        f"did not join within {in_seconds(limit.timeout_s)}"
                    )
        finally:
            announcements.clear(self._board, me)

    def _let_in(self, visitor: Connection, size: int) -> None:
        if int(visitor.hello.get("generation", 0)) > self._generation:
            visitor.dismiss({"error": "not yet", "again": True})
        elif len(self._inside) == size - self._members:
            visitor.dismiss({"error": "enough processes have joined", "again": True})
        elif visitor.rank >= size or visitor.rank in (rank for rank in self.wanted if rank >= 0):
            text = f"rank {visitor.rank} is not free in a group that grows to {size}"
            visitor.dismiss({"error": f"group {self._name}: {text}"})
        else:
            self._inside.append(visitor)

    def tell(self, growth: Growth, about: dict[str, Any]) -> None:
        """Tell the newcomers what they join."""
        for number, visitor in enumerate(self._inside, self._members):
            told = {"name": growth.name, "key": growth.key, "places": growth.places}
            here = {"address": self._server.address, "number": number}
            visitor.try_send(about | told | here)

    def check(self) -> None:
        if any(visitor.is_closed() for visitor in self._inside):
            raise Departed(f"group {self._name}: a new process left again")

    def close(self) -> None:
        """Newcomers that are still there may try again."""
        for visitor in self._inside:
            visitor.dismiss({"error": "the group does not grow now", "again": True})


def admit(
    group: Growing,
    server: RendezvousServer,
    leader_address: str,
    name: str,
    meeting: tuple[str, AbstractContextManager[Board]],
    count: int,
    limit_s: float,
    about: dict[str, Any],
    settle: Callable[[bool], bool] | None,
) -> tuple[Membership, Growth]:
    """Admit this many new processes; all members call this. `name` is the new group's, and
    `meeting` the name by which newcomers know it, and where they look; they are told `about`."""
    known_as, opening = meeting
    with contextlib.ExitStack() as stack:
        exchange_s = max(group.timeout_s, limit_s + MEETING_S)  # the first member may take so long
        counts = {number for (number,) in group.exchange_integers((count,), exchange_s)}
        if len(counts) > 1:
            text = f"its ranks called grow with different counts, {sorted(counts)}"
            raise RendezvousError(f"group {known_as}: {text}")
        newcomers, failed, plan = None, None, [0] * (2 + count)
        if group.rank == 0:
            try:
                board = stack.enter_context(opening)
                newcomers = NewcomerServer(
                    board, server, known_as, group.size, int(about["generation"])
                )
                stack.callback(newcomers.close)
                newcomers.receive(count, Deadline(limit_s), group.raise_if_ended)
                plan = [1, int.from_bytes(os.urandom(7), "big"), *newcomers.wanted]
            except RendezvousError as error:
                failed = error
        is_open, token, *wanted = group.exchange_integers(tuple(plan), exchange_s)[0]
        if not is_open:
            raise failed or RendezvousError(
                f"group {known_as}: not enough new processes reached rank 0"
            )
        growth = Growth(name, f"{name} at {token:x}", places_after(group.size, wanted))

        def check() -> None:
            group.raise_if_ended()
            if newcomers is not None:
                newcomers.check()

        request = growth.request(group.rank, group.timeout_s, check, settle)
        if newcomers is not None:
            newcomers.tell(growth, about | {"timeout_s": group.timeout_s})
        return growth.membership(meet_at(leader_address, server, request, are_new=True)), growth


def join_growing(
    board: Board,
    server: RendezvousServer,
    name: str,
    rank: int | None,
    generation: int,
    timeout_s: float | None,
    limit: Deadline,
) -> tuple[Membership, Growth, dict[str, Any]]:
    """Wait until the members of a group admit this process; returns what they told it, too."""
    me = announcements.about_me(server.address)
    wanted = -1 if rank is None else rank
    waiting = Waiting(wanted, 0, name, limit)
    later = f", of generation {generation} or later," if generation else ""
    in_vain = (
        f"group {name}{later} did not admit this process within {in_seconds(limit.timeout_s)}: do "
        f"its members call grow({name!r})?"
    )
    while True:
        # this only needs the leader's announcement; the group's size is not known yet
        request = JoinRequest(_key(name), wanted, 0, limit, 0.0)
        with descriptors_needed(), contextlib.ExitStack() as stack:
            try:
                line = find_leader(board, request, me)
                visit = stack.enter_context(contextlib.closing(line))
            except RendezvousError as error:
                if limit.left_s():
                    raise
                raise RendezvousError(f"{in_vain} ({error})") from error
            leader = announcements.look_up(board)
            hello = {"key": _key(name), "rank": wanted, "generation": generation}
            try:
                visit.send(me | hello)
                told = visit.receive(limit, partial(_check_leader, board, leader))
                growth = Growth(str(told["name"]), str(told["key"]), told["places"])
                call_s = float(told["timeout_s"]) if timeout_s is None else timeout_s
                joining = growth.request(int(told["number"]), call_s)
                met = meet_at(str(told["address"]), server, joining, are_new=True)
                return growth.membership(met), growth, told | {"timeout_s": call_s}
            except (Departed, OSError, KeyError) as error:
                if isinstance(error, TimeoutError) or not limit.left_s():
                    raise RendezvousError(in_vain) from error
            waiting.pause()


def _check_leader(board: Board, leader: Announcement | None) -> None:
    """Raise Departed if another process receives newcomers now."""
    now = announcements.look_up(board)
    if now is not None and leader is not None and now["address"] != leader["address"]:
        raise Departed("another member receives new processes now")


def _key(name: str) -> str:
    return f"{name} grows"
