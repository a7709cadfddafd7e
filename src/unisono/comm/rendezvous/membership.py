"""What a rank brings to the meeting of a new group, and what it has afterwards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unisono.comm.engine import Group
from unisono.comm.rendezvous.announcements import Announcement
from unisono.comm.rendezvous.unix_socket import Deadline, TooFewDescriptors, descriptors_needed


@dataclass(frozen=True)
class JoinRequest:
    """What one rank brings: the group's key, which rank of how many it is, and how to open the
    group's segment.

    `check` raises once there is nobody to wait for any more: the parent group has ended.
    """

    key: str
    rank: int
    size: int
    deadline: Deadline
    open: Callable[[int, int, int, int], Group]
    payload: str = ""
    """What the others shall know of this rank."""
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Membership:
    """What one rank has once the group is made."""

    key: str
    rank: int
    size: int
    group: Group
    members: tuple[Member, ...]
    payloads: tuple[str, ...] = ()
    """What each rank wanted the others to know."""


@dataclass(frozen=True)
class Member:
    """A rank as its peers know it."""

    address: str
    pid: int

    @property
    def identity(self) -> int:
        """A number for the process; the address is random, so its end is as good as all of it."""
        return int(self.address[-16:], 16)


def members_of(invitation: Announcement) -> tuple[Member, ...]:
    """The members of a new group, as its leader has listed them."""
    return tuple(Member(str(address), int(pid)) for address, pid in invitation["members"])


@contextlib.contextmanager
def own_pidfd() -> Iterator[list[int]]:
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


def watch_members(group: Group, own: int, members: Sequence[Member], pidfds: list[int]) -> None:
    """Let the engine watch the processes of all ranks but our own."""
    for rank, member in enumerate(members):
        pidfd = pidfds[rank] if rank < len(pidfds) else -1
        if rank != own and not group.watch(rank, member.identity, pidfd) and pidfd >= 0:
            raise TooFewDescriptors(f"rank {own} could not begin to watch rank {rank}")
