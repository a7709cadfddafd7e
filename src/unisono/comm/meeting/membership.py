"""How a process becomes a member of a new group.

The first member, its *leader*, runs a rendezvous server for the others, makes the segment and
passes its file descriptor to them. Members of an existing group know who the leader is; ranks that
do not know each other yet learn it from announcements.

Plain classes: making a dataclass takes a millisecond at the start of every process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unisono.comm.engine import MOST_RANKS, open_group
from unisono.comm.meeting import announcements
from unisono.comm.meeting.announcements import Announcement
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline, Waiting, in_seconds
from unisono.comm.meeting.unix_socket import (
    Connection,
    Departed,
    RendezvousServer,
    TooFewDescriptors,
    descriptors_needed,
)
from unisono.errors import GroupClosed, RendezvousError, UnisonoError, name_ranks
from unisono.processes import state_of

if TYPE_CHECKING:
    from unisono.comm.engine.group_types import Group

UNREACHABLE_S = 10.0
"""How long a live rank that has announced itself may be unreachable."""

_GRACE_S = 2.0
"""How much longer followers wait than their leader, so that they get its reason."""


class Member:
    """A rank as its peers know it. In a group over several hosts `host` names its host, and only
    ranks of this host have an `address`."""

    def __init__(self, address: str, pid: int, host: str = "") -> None:
        self.address = address
        self.pid = pid
        self.host = host

    @property
    def identity(self) -> int:
        """A number for the process; the address is random, so its end suffices."""
        return int(self.address[-16:], 16)

    @property
    def is_here(self) -> bool:
        """Whether /proc of this host shows it."""
        return bool(self.address)

    def __str__(self) -> str:
        """ "pid 4711", or "pid 4711 on node7"."""
        return f"pid {self.pid} on {self.host}" if self.host else f"pid {self.pid}"


class Membership:
    """What one rank has once the group is made. `payloads` is what each rank published to the
    others. `inner` is the engine's group of the members on this host, in a group over several.
    `said` is which attempt to continue the group this rank has joined, and how many it needs."""

    said: Sequence[int] = (0, 1)

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        group: Group,
        members: tuple[Member, ...],
        payloads: tuple[str, ...] = (),
        inner: Group | None = None,
    ) -> None:
        check_size(key, size)
        self.key, self.rank, self.size = key, rank, size
        self.group = group
        self.members = members
        self.payloads = payloads
        self.inner = inner

    def close(self) -> None:
        """Leave a group that could not be made."""
        self.group.close()
        if self.inner is not None:
            self.inner.close()

    def find_stopped(self) -> list[int]:
        here = [rank for rank, member in enumerate(self.members) if member.is_here]
        return [rank for rank in here if state_of(self.members[rank].pid).is_stopped]

    def ask_elsewhere(self, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks on other hosts do: completes "rank 3 ..."."""
        return {}

    def partner_elsewhere(self, rank: int) -> int | None:
        """The rank on another host with which a rank exchanges data; None on one host."""
        return None

    def unheard(self, stopped: Sequence[int]) -> list[int]:
        """The ranks on other hosts from which this one receives nothing while these are stopped."""
        return []


def check_size(name: str, size: int) -> None:
    if size > MOST_RANKS:
        raise RendezvousError(
            f"group {name} has {size:,} ranks, more than unisono's limit of {MOST_RANKS:,}: start "
            "fewer ranks, with more threads each, or set UNISONO_HOSTS=gloo on all of them if "
            "they are on several hosts"
        )


class JoinRequest:
    """What one rank asks for. `payload` is what it publishes to the others. `check` raises once
    waiting is pointless: the parent group has ended. `segments` has, for each segment that the
    leader makes, the rank of each participant in it, its number of ranks, and how many of those
    share this machine's cores. `settle` decides, for members of a group, once and for all
    whether the new one is made, and returns that."""

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        deadline: Deadline,
        timeout_s: float,
        payload: str = "",
        check: Callable[[], None] = lambda: None,
        segments: Sequence[tuple[Sequence[int], int, int]] = (),
        settle: Callable[[bool], bool | None] | None = None,
    ) -> None:
        self.key, self.rank, self.size = key, rank, size
        self.settle = settle
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.payload = payload
        self.check = check
        self.segments = segments or [(range(size), size, size)]

    def waiting(self, *pauses: Any) -> Waiting:
        return Waiting(self.rank, self.size, self.key, self.deadline, *pauses)

    def open(
        self, descriptors: Sequence[int], pidfds: Sequence[int], invitation: dict[str, Any]
    ) -> Membership:
        """Open the leader's segments, and let the engine watch the processes of all other
        participants."""
        members = tuple(Member(str(address), int(pid)) for address, pid in invitation["members"])
        payloads = tuple(map(str, invitation["payloads"]))
        nonce = int(invitation["nonce"])
        groups: list[Group] = []
        try:
            for descriptor, (ranks, size, _) in zip(descriptors, self.segments, strict=True):
                group = open_group(descriptor, ranks[self.rank], size, nonce, self.timeout_s)
                groups.append(group)
                self._watch(group, ranks, members, pidfds)
        except BaseException:
            for group in groups:
                group.close()
            raise
        return Membership(self.key, self.rank, self.size, groups[0], members, payloads, *groups[1:])

    def _watch(
        self, group: Group, ranks: Sequence[int], members: Sequence[Member], pidfds: Sequence[int]
    ) -> None:
        for at, member in enumerate(members):
            pidfd = pidfds[at] if at < len(pidfds) else -1
            if at == self.rank or group.watch(ranks[at], member.identity, pidfd) or pidfd < 0:
                continue
            raise TooFewDescriptors(f"rank {self.rank} could not watch rank {at}")


@contextlib.contextmanager
def own_pidfd() -> Iterator[list[int]]:
    """A descriptor of this process, by which peers detect its end; none on old kernels."""
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


def meet_by(board: Board, server: RendezvousServer, request: JoinRequest) -> Membership:
    """Meet ranks that do not know each other: rank 0 leads, and announces itself."""
    with descriptors_needed():
        me = announcements.about_me(server.address)
        if request.rank == 0:
            from unisono.comm.meeting.leading import Leader  # followers do not need it

            try:
                announcements.announce(board, me)
                return Leader(server, request, me, board).make_group()
            except BaseException:
                announcements.clear(board, me)
                raise
        try:
            connection = find_leader(board, request, me)
        except TooFewDescriptors as error:
            server.close_socket()  # frees a descriptor, with which rank 0 can be told
            with contextlib.suppress(OSError, RendezvousError):
                leader = announcements.look_up(board)
                if leader is not None:
                    hello = _hello(request, me, error)
                    Connection.connect(str(leader["address"])).dismiss(hello)
            raise
        try:
            return follow(connection, request, me, are_new=True)
        except Departed:
            announcements.clear_if_over(board, me)
            raise


def meet_at(
    leader_address: str, server: RendezvousServer, request: JoinRequest, are_new: bool = False
) -> Membership:
    """Meet ranks that know the address of their leader: members of an existing group, or, if they
    `are_new`, of none."""
    if server.pid != os.getpid():
        raise GroupClosed(
            f"the parent group belongs to process {server.pid}: a forked child cannot split it"
        )
    with descriptors_needed():
        me = announcements.about_me(server.address)
        if request.rank == 0:
            from unisono.comm.meeting.leading import Leader  # followers do not need it

            return Leader(server, request, me).make_group()
        connection = call_leader(leader_address, request.key, request.deadline, request.check)
        return follow(connection, request, me, are_new)


def call_leader(
    address: str, key: str, deadline: Deadline, check: Callable[[], None]
) -> Connection:
    """Connect to rank 0, whose address is known, for what `key` names. Raises RendezvousError,
    or what `check` raises."""
    while True:
        try:
            return Connection.connect(address)
        except BlockingIOError as error:  # its queue is full until it accepts again
            check()
            if not deadline.left_s():
                raise RendezvousError(
                    f"{key}: rank 0 has accepted no connection for "
                    f"{in_seconds(deadline.timeout_s)}: its queue is full"
                ) from error
            time.sleep(0.001)
        except OSError as error:
            check()
            raise Departed(
                f"{key}: rank 0 cannot be reached: its process has ended or closed the group "
                f"({error.strerror})"
            ) from error


def find_leader(board: Board, request: JoinRequest, me: Announcement) -> Connection:
    """Wait for rank 0's announcement and connect to its server, until `request.check` raises. If
    rank 0 cannot be reached, it is told so."""
    refused_since: tuple[str, float] | None = None
    seen: Announcement | None = None
    waiting, limit = request.waiting(0.0001, board.sleep), in_seconds(request.deadline.timeout_s)
    while True:
        is_late = not request.deadline.left_s()
        leader = announcements.look_up(board)
        seen = leader or seen
        complaint = f"rank 0 did not join within {limit}"
        if is_late:  # what looked stale may belong to another host of this name
            leader = seen
        if leader is not None and (is_late or not announcements.is_from_before(leader, me)):
            if leader.get("boot") != me["boot"]:
                reason = (
                    f"rank {request.rank} is on host {me['host']}, rank 0 is on host "
                    f"{leader.get('host')}: they cannot share memory; use a backend for several "
                    "machines (gloo, nccl, mpi)"
                )
                announcements.object_to(board, leader, reason)
                raise RendezvousError(reason)
            address = str(leader["address"])
            try:
                return Connection.connect(address)
            except BlockingIOError:
                complaint = (
                    f"rank 0 (pid {leader.get('pid')}) has joined, but its queue of connections "
                    f"has been full for {limit}"
                )
            except OSError as error:
                if announcements.is_over(error, leader, me):
                    announcements.clear(board, leader)
                elif (
                    refused_since is None
                    or refused_since[0] != address
                    or announcements.is_dead(leader)
                ):
                    refused_since = (address, time.monotonic())
                elif time.monotonic() - refused_since[1] > UNREACHABLE_S:
                    reason = (
                        f"rank {request.rank} (pid {me['pid']}) cannot reach rank 0 (pid "
                        f"{leader.get('pid')}) on host {me['host']}, though both are on it: are "
                        f"they in different network namespaces? ({error.strerror})"
                    )
                    announcements.object_to(board, leader, reason)
                    raise RendezvousError(reason) from error
        if is_late:
            raise RendezvousError(f"group {request.key}: {complaint}")
        request.check()
        if waiting.is_long():
            waiting.say([0])
        waiting.pause()


def follow(
    connection: Connection, request: JoinRequest, me: Announcement, are_new: bool
) -> Membership:
    """Become a member of the group whose leader we have reached. Members of an existing group
    already have each other's pidfds, unless some `are_new`."""
    patient = Deadline(request.deadline.left_s() + _GRACE_S)
    # A leader of new ranks checks for all. One of an existing group may never start to lead.
    check = (lambda: None) if are_new else request.check
    membership: Membership | None = None
    try:
        try:
            with own_pidfd() as mine, contextlib.suppress(ConnectionError):  # reported below
                connection.send(_hello(request, me), *(mine if are_new else ()))
            invitation = _await_invitation(connection, patient, check, request)
        except TooFewDescriptors as error:
            connection.try_send(_hello(request, me, error))
            raise
        try:
            received, count = list(connection.descriptors), len(request.segments)
            membership = request.open(received[:count], received[count:], invitation)
        except (UnisonoError, ValueError) as error:
            connection.try_send({"error": f"rank {request.rank}: {error}"})
            raise
        connection.try_send({"opened": True})
        connection.receive(patient, check)  # or learn why there is no receiver any more
        return membership
    except BaseException as error:
        if membership is not None:
            if isinstance(error, Exception) and request.settle and request.settle(False):
                return membership  # rank 0 had made the group, and then ended
            membership.close()
        if isinstance(error, (OSError, ValueError, KeyError)):
            raise Departed(
                f"group {request.key}: rank 0 left while the group was made ({error})"
            ) from error
        raise
    finally:
        connection.close()


def _await_invitation(
    connection: Connection, patient: Deadline, check: Callable[[], None], request: JoinRequest
) -> dict[str, Any]:
    """Wait until rank 0 says that all have joined; it may first say which ranks are missing."""
    waiting = request.waiting()
    missing: list[int] = []
    try:
        while "missing" in (message := connection.receive(patient, check)):
            missing = [int(rank) for rank in message["missing"]]
            waiting.say(missing, request.size - len(missing))
    except TimeoutError as error:
        who = name_ranks(missing) if missing else "some rank"
        raise RendezvousError(
            f"group {request.key}: rank 0 joined, but {who} of {request.size} did not join within "
            f"{in_seconds(request.deadline.timeout_s)}"
        ) from error
    return message


def _hello(
    request: JoinRequest, me: Announcement, error: RendezvousError | None = None
) -> Announcement:
    """What a follower sends first; with an error, that it will not join."""
    hello = {"key": request.key, "rank": request.rank, "size": request.size}
    hello |= {"payload": request.payload}
    return me | hello | ({"error": f"rank {request.rank}: {error}"} if error else {})
