"""Leading a meeting: rank 0 of a new group receives the others, and makes the group's segment."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from unisono.comm import engine
from unisono.comm.meeting import announcements
from unisono.comm.meeting.announcements import Announcement
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.makings import look
from unisono.comm.meeting.membership import JoinRequest, Membership, own_pidfd
from unisono.comm.meeting.unix_socket import Connection, Departed, RendezvousServer
from unisono.errors import GroupsDiffer, RendezvousError, UnisonoError

_QUIET_S = 0.1
"""After so long without a visitor, a leader checks where the missing ranks are."""

_MOST_PIDFDS = 250
"""Larger groups are not watched: their descriptors do not fit into one message."""


class Leader:
    """Rank 0 of a new group; with a `board` if the others do not know it yet."""

    def __init__(
        self,
        server: RendezvousServer,
        request: JoinRequest,
        me: Announcement,
        board: Board | None = None,
    ) -> None:
        self._server = server
        self._request = request
        self._me = me
        self._board = board
        self._followers: dict[int, Connection] = {}

    def make_group(self) -> Membership:
        """Wait for the other ranks and make the group with them; or tell them why it failed."""
        try:
            self._server.keep_spare()
            self._receive()
            return self._admit()
        except BaseException as error:
            reason = str(error) if isinstance(error, UnisonoError) else f"rank 0 failed: {error!r}"
            answer = {"error": reason, "again": isinstance(error, Departed)}
            answer["differs"] = isinstance(error, GroupsDiffer)
            self._server.use_spare()
            for follower in self._followers.values():
                follower.dismiss(answer)
            with contextlib.suppress(RendezvousError):  # there is already a reason
                while late := self._server.visitors_for(self._request.key, 0.05):
                    for visitor in late:
                        visitor.dismiss(answer)
            if self._board is not None:  # otherwise they may have come for another group
                self._server.answer_silent(answer)
            raise
        finally:
            self._server.use_spare()
            for follower in self._followers.values():
                follower.close()

    def _receive(self) -> None:
        request, followers = self._request, self._followers
        waiting = request.waiting()
        informed: set[int] = set()
        while len(followers) < request.size - 1:
            waiting.look(self._absent)
            if waiting.is_long():
                for rank in followers.keys() - informed:  # so that they can report it, too
                    followers[rank].try_send({"missing": self._absent()})
                    informed.add(rank)
            begin_s = time.monotonic()
            quiet_s = min(_QUIET_S, request.deadline.left_s())
            arrived = self._server.visitors_for(request.key, quiet_s)
            nobody = not arrived and time.monotonic() - begin_s >= _QUIET_S / 2
            while arrived:
                visitor = arrived.pop(0)
                try:
                    self._let_in(visitor)
                except RendezvousError:
                    self._server.keep_waiting(request.key, arrived)  # they are told, too
                    raise
            if nobody:
                request.check()
                look()
                self._look_at_board()

    def _absent(self) -> list[int]:
        """The ranks that have not joined, or have left again."""
        here = [rank for rank, follower in self._followers.items() if not follower.is_closed()]
        return sorted(set(range(1, self._request.size)) - set(here))

    def _look_at_board(self) -> None:
        """Raise if a rank has left a note that it cannot join."""
        if self._board is None:
            return
        if announcements.look_up(self._board) is None:  # another process took it for a dead one's
            announcements.announce(self._board, self._me)
        objection = announcements.objection_to(self._board, self._me)
        if objection:
            raise RendezvousError(objection)

    def _let_in(self, visitor: Connection) -> None:
        """Accept a visitor as the rank that it claims, or dismiss it and raise."""
        hello, followers, size = visitor.hello, self._followers, self._request.size
        if visitor.is_closed() and "error" not in hello:  # it gave up before we came
            visitor.close()
            return
        before = followers.get(visitor.rank)
        if before is not None and before.is_closed():  # it was restarted
            before.close()
            del followers[visitor.rank]
        wrong = None
        if "error" in hello:
            wrong = f"cannot join: {hello['error']}"
        elif hello.get("layout") != engine.native.LAYOUT_VERSION:
            wrong = "runs another build of unisono"
        elif hello.get("size") != size:
            wrong = f"thinks the group has {hello.get('size')} ranks, not {size}"
        elif not 0 < visitor.rank < size or visitor.rank in followers:
            wrong = f"claims rank {visitor.rank} of {size}, which is not free"
        if wrong:
            reason = f"group {self._request.key}: process {hello.get('pid')} {wrong}"
            visitor.dismiss({"error": reason})
            raise RendezvousError(reason)
        followers[visitor.rank] = visitor

    def _admit(self) -> Membership:
        """Make the segments, pass them to all, and return once all have opened them."""
        request, followers = self._request, self._followers.values()
        membership: Membership | None = None
        try:
            membership = self._hand_over()
            if self._board is not None:  # before any rank can come back for another meeting
                announcements.clear(self._board, self._me)
            for follower in followers:
                follower.receive(request.deadline, request.check)
            if request.settle and not request.settle(True):
                raise Departed(f"a member of group {request.key} gave up while it was made")
            for follower in followers:  # one that is gone now matters only if nothing is settled
                (follower.try_send if request.settle else follower.send)({"go": True})
            return membership
        except BaseException as error:
            if membership is not None:
                membership.close()
            if isinstance(error, (OSError, ValueError, KeyError, TypeError)):
                raise Departed(
                    f"a member of group {request.key} left, or sent a malformed message, while the "
                    f"group was made ({error})"
                ) from error
            raise

    def _hand_over(self) -> Membership:
        """Make the segments, pass them to all, and open them."""
        request = self._request
        followers = [self._followers[rank] for rank in range(1, request.size)]
        everyone: list[dict[str, Any]] = [self._me | {"payload": request.payload}]
        everyone += [follower.hello for follower in followers]
        nonce = int.from_bytes(os.urandom(8), "big") >> 1
        invitation = {
            "nonce": nonce,
            "members": [(member["address"], member["pid"]) for member in everyone],
            "payloads": [str(member.get("payload", "")) for member in everyone],
        }
        segments: list[int] = []
        try:
            for _, size, sharers in request.segments:
                cores = _cores(everyone, sharers)
                segments.append(engine.create_segment(size, cores, nonce))
            with own_pidfd() as mine:
                pidfds = mine + [pidfd for follower in followers for pidfd in follower.descriptors]
                if len(pidfds) != request.size or request.size > _MOST_PIDFDS:
                    pidfds = []  # members of one group already have each other's
                for follower in followers:
                    follower.send(invitation, *segments, *pidfds)
                return request.open(segments, pidfds, invitation)
        finally:
            for segment in segments:
                os.close(segment)


def _cores(everyone: list[Announcement], sharers: int) -> int:
    """How many cores the members have together: those they may run on, limited by their quotas;
    only their share if ranks of other hosts run on the same machine."""
    cpus = {cpu for member in everyone for cpu in member["cpus"]}
    cores = min(len(cpus), *(int(member["quota"]) for member in everyone))
    return max(1, cores * len(everyone) // max(sharers, len(everyone)))
