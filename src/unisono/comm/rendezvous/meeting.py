"""How the ranks of one machine find each other and come to share a segment.

The first member of a new group, its *leader*, receives the others in its lobby, makes the segment
and hands its descriptor over. Who the leader is, the members of an existing group know; ranks that
do not know each other yet learn it from announcements.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from unisono.comm.rendezvous.announcements import Announcement, Announcements
from unisono.comm.rendezvous.discovery import about_me, clear_if_over, find_leader
from unisono.comm.rendezvous.lobby import Lobby
from unisono.comm.rendezvous.membership import (
    JoinRequest,
    Membership,
    members_of,
    own_pidfd,
    watch_members,
)
from unisono.comm.rendezvous.unix_socket import (
    Connection,
    Deadline,
    Departed,
    NoAnswer,
    TooFewDescriptors,
    descriptors_needed,
)
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import GroupClosed, RendezvousError, UnisonoError, name_ranks

if TYPE_CHECKING:
    from unisono.comm.engine_types import Group

_GRACE_S = 2.0
"""How much longer followers wait than their leader, so that they hear its reason."""


def meet_by(announcements: Announcements, lobby: Lobby, request: JoinRequest) -> Membership:
    """Meet ranks that do not know each other: rank 0 leads, and has announced itself."""
    with descriptors_needed():
        me = about_me(lobby.address)
        if request.rank == 0:
            from unisono.comm.rendezvous.leading import Leader  # followers need not load it

            try:
                announcements.announce(0, me)
                return Leader(lobby, request, me, announcements).make_group()
            except BaseException:
                announcements.clear(0, me)
                raise
        announcements.announce(request.rank, me)
        try:
            connection = find_leader(announcements, request, me)
        except TooFewDescriptors as error:
            lobby.close_socket()  # by what that frees rank 0 can be told
            _decline(announcements, _hello(request, me, error))
            raise
        try:
            return _follow(connection, request, me, sends_pidfd=True)
        except Departed:
            clear_if_over(announcements, me)
            raise


def meet_at(leader_address: str, lobby: Lobby, request: JoinRequest) -> Membership:
    """Meet members of an existing group: the leader's address is known."""
    if lobby.pid != os.getpid():
        raise GroupClosed(
            f"the parent group belongs to process {lobby.pid}: a forked child cannot split it"
        )
    with descriptors_needed():
        me = about_me(lobby.address)
        if request.rank == 0:
            from unisono.comm.rendezvous.leading import Leader  # followers need not load it

            return Leader(lobby, request, me).make_group()
        return _follow(_call(leader_address, request), request, me, sends_pidfd=False)


def _call(leader_address: str, request: JoinRequest) -> Connection:
    while True:
        try:
            return Connection.connect(leader_address)
        except BlockingIOError as error:  # its queue is full until it makes groups again
            request.check()
            if not request.deadline.left_s():
                raise RendezvousError(
                    f"rank 0 of the new group {request.key} has let nobody in for "
                    f"{in_seconds(request.deadline.timeout_s)}: its queue of connections is full"
                ) from error
            time.sleep(0.01)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 of the new group {request.key} cannot be reached: its process has "
                f"ended or closed the parent group ({error.strerror})"
            ) from error


def _decline(announcements: Announcements, hello: Announcement) -> None:
    """Tell rank 0, if it is there, that this rank will not come."""
    with contextlib.suppress(OSError, RendezvousError):
        announcement = announcements.look_up(0)
        if announcement is not None:
            connection = Connection.connect(str(announcement["address"]))
            connection.try_send(hello)
            connection.close()


def _follow(
    connection: Connection, request: JoinRequest, me: Announcement, sends_pidfd: bool
) -> Membership:
    patient = Deadline(request.deadline.left_s() + _GRACE_S)
    # A leader who was announced checks for all. One of an existing group may never come to lead.
    check = (lambda: None) if sends_pidfd else request.check
    receive = partial(connection.receive, patient, check)
    group: Group | None = None
    try:
        try:
            with own_pidfd() as mine, contextlib.suppress(ConnectionError):  # told below, why
                connection.send(_hello(request, me), *(mine if sends_pidfd else ()))
            invitation = _await_invitation(receive, request)
        except TooFewDescriptors as error:
            connection.try_send(_hello(request, me, error))
            raise
        members = members_of(invitation)
        try:
            descriptor, *pidfds = connection.descriptors
            group = request.open(descriptor, request.rank, request.size, int(invitation["nonce"]))
            watch_members(group, request.rank, members, pidfds)
        except (UnisonoError, ValueError) as error:
            connection.try_send({"error": f"rank {request.rank}: {error}"})
            raise
        connection.try_send({"opened": True})
        receive()  # or hear why there is nobody to send to any more
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


def _await_invitation(receive: Callable[[], Announcement], request: JoinRequest) -> Announcement:
    """Wait until rank 0 says that all are there; who is missing, it may say before."""
    waiting = Waiting(request.rank, request.size, request.key, request.deadline)
    missing: list[int] = []
    try:
        while "missing" in (message := receive()):
            missing = [int(rank) for rank in message["missing"]]
            waiting.say(missing, request.size - len(missing))
    except NoAnswer as error:
        who = name_ranks(missing) if missing else "some rank"
        raise RendezvousError(
            f"group {request.key}: rank 0 is here, but {who} of {request.size} did not come "
            f"within {in_seconds(request.deadline.timeout_s)}"
        ) from error
    return message


def _hello(
    request: JoinRequest, me: Announcement, error: RendezvousError | None = None
) -> Announcement:
    """What a follower says first; with an error, that it will not come."""
    hello = {"key": request.key, "rank": request.rank, "size": request.size}
    hello |= {"payload": request.payload}
    return me | hello | ({"error": f"rank {request.rank}: {error}"} if error else {})
