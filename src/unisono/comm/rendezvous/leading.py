"""Leading a meeting: rank 0 of a new group receives the others, and makes the group's segment."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from unisono.comm import engine
from unisono.comm.rendezvous.announcements import Announcement, Announcements
from unisono.comm.rendezvous.discovery import check_missing
from unisono.comm.rendezvous.lobby import Lobby, Visitor
from unisono.comm.rendezvous.membership import (
    JoinRequest,
    Membership,
    members_of,
    own_pidfd,
    watch_members,
)
from unisono.comm.rendezvous.unix_socket import Departed
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import RendezvousError, UnisonoError, name_ranks

if TYPE_CHECKING:
    from unisono.comm.engine_types import Group

_QUIET_S = 0.2
"""After so long without a visitor, a leader looks where the missing ones are."""

_MOST_PIDFDS = 250
"""Larger groups are not watched: so many descriptors do not fit into one message."""


class Leader:
    """Rank 0 of a new group; `announcements` where the others do not know it yet."""

    def __init__(
        self,
        lobby: Lobby,
        request: JoinRequest,
        me: Announcement,
        announcements: Announcements | None = None,
    ) -> None:
        self._lobby = lobby
        self._request = request
        self._me = me
        self._announcements = announcements
        self._visitors: dict[int, Visitor] = {}

    def make_group(self) -> Membership:
        """Wait for the other ranks and make the group with them; or tell them why not."""
        try:
            self._lobby.keep_spare()
            self._receive()
            return self._admit()
        except BaseException as error:
            reason = str(error) if isinstance(error, UnisonoError) else f"rank 0 failed: {error!r}"
            answer = {"error": reason, "again": isinstance(error, Departed)}
            self._lobby.use_spare()
            for visitor in self._visitors.values():
                visitor.dismiss(answer)
            with contextlib.suppress(RendezvousError):  # of itself: there is a reason already
                while late := self._lobby.visitors_for(self._request.key, 0.05):
                    for visitor in late:
                        visitor.dismiss(answer)
            if self._announcements is not None:  # else they may have come for another group
                self._lobby.answer_silent(answer)
            raise
        finally:
            self._lobby.use_spare()
            for visitor in self._visitors.values():
                visitor.connection.close()

    def _receive(self) -> None:
        """Wait until every other rank has come in."""
        request, visitors = self._request, self._visitors
        unreached: dict[int, float] = {}
        waiting = Waiting(request.rank, request.size, request.key, request.deadline)
        informed: set[int] = set()
        while len(visitors) < request.size - 1:
            missing = [rank for rank in range(1, request.size) if rank not in visitors]
            left_s = request.deadline.left_s()
            if not left_s or waiting.is_long():
                gone = [
                    rank for rank, visitor in visitors.items() if visitor.connection.is_closed()
                ]
                absent = sorted(missing + gone)
                if not left_s:
                    raise RendezvousError(
                        f"group {request.key}: {name_ranks(absent)} of {request.size} did not come "
                        f"within {in_seconds(request.deadline.timeout_s)}"
                    )
                waiting.say(absent, request.size - len(absent))
                for rank in visitors.keys() - informed:  # so that they can say it, too
                    visitors[rank].connection.try_send({"missing": absent})
                    informed.add(rank)
            begin_s = time.monotonic()
            arrived = self._lobby.visitors_for(request.key, min(_QUIET_S, left_s))
            nobody = not arrived and time.monotonic() - begin_s >= _QUIET_S / 2
            while arrived:
                visitor = arrived.pop(0)
                try:
                    self._let_in(visitor)
                except RendezvousError:
                    self._lobby.keep_waiting(request.key, arrived)  # they are told, too
                    raise
            if nobody:
                request.check()
                self._look_for(missing, unreached)

    def _look_for(self, missing: list[int], unreached: dict[int, float]) -> None:
        """Raise if a missing rank has announced itself from where it cannot come."""
        if self._announcements is None:
            return
        if self._announcements.look_up(0) is None:  # somebody took it for a dead one's
            self._announcements.announce(0, self._me)
        check_missing(self._announcements, missing, unreached)

    def _let_in(self, visitor: Visitor) -> None:
        """Count a visitor as the rank that it says it is, or dismiss it and raise."""
        hello, present, size = visitor.hello, self._visitors, self._request.size
        wrong = None
        before = present.get(visitor.rank)
        if before is not None and before.connection.is_closed():  # it has started anew
            before.connection.close()
            del present[visitor.rank]
        if "error" in hello:
            wrong = f"cannot come: {hello['error']}"
        elif hello.get("layout") != engine.layout_version():
            wrong = "runs another build of unisono"
        elif hello.get("size") != size:
            wrong = f"thinks the group has {hello.get('size')} ranks, not {size}"
        elif not 0 < visitor.rank < size or visitor.rank in present:
            wrong = f"claims rank {visitor.rank} of {size}, which is not free"
        if wrong:
            reason = f"group {self._request.key}: process {hello.get('pid')} {wrong}"
            visitor.dismiss({"error": reason})
            raise RendezvousError(reason)
        present[visitor.rank] = visitor

    def _admit(self) -> Membership:
        """Make the segment, hand it to everyone, and go on once all have opened it."""
        request = self._request
        connections = [visitor.connection for visitor in self._visitors.values()]
        group: Group | None = None
        try:
            everyone = [self._me | {"payload": request.payload}]
            everyone += [self._visitors[rank].hello for rank in range(1, request.size)]
            payloads = tuple(str(member.get("payload", "")) for member in everyone)
            invitation = {
                "nonce": int.from_bytes(os.urandom(8), "big") >> 1,
                "members": [(member["address"], member["pid"]) for member in everyone],
                "payloads": payloads,
            }
            members = members_of(invitation)
            group = self._hand_over(invitation, _cores(everyone))
            if self._announcements is not None:  # before anybody can come back for another meeting
                self._announcements.clear(0, self._me)
                for rank in self._visitors:
                    self._announcements.clear(rank)
            for connection in connections:
                connection.receive(request.deadline, request.check)
            for connection in connections:
                connection.send({"go": True})
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

    def _hand_over(self, invitation: Announcement, cores: int) -> Group:
        request, visitors = self._request, self._visitors
        descriptor = engine.create_segment(request.size, cores, invitation["nonce"])
        try:
            with own_pidfd() as mine:
                theirs = (visitors[rank].connection.descriptors for rank in sorted(visitors))
                pidfds = mine + [pidfd for sent in theirs for pidfd in sent]
                if len(pidfds) != request.size or request.size > _MOST_PIDFDS:
                    pidfds = []  # members of one group have each other's already
                for visitor in visitors.values():
                    visitor.connection.send(invitation, descriptor, *pidfds)
                group = request.open(descriptor, 0, request.size, invitation["nonce"])
                try:
                    watch_members(group, 0, members_of(invitation), pidfds)
                except BaseException:
                    group.close()
                    raise
                return group
        finally:
            os.close(descriptor)


def _cores(everyone: list[Announcement]) -> int:
    """How many cores the members have together: those they may run on, cut by their quotas."""
    cpus = {cpu for member in everyone for cpu in member["cpus"]}
    return min(len(cpus), *(int(member["quota"]) for member in everyone))
