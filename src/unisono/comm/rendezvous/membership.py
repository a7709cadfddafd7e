"""What a rank brings to the meeting of a new group, and what it has afterwards.

Plain classes: to make a dataclass takes a millisecond, and every process pays it as it starts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from unisono.comm.rendezvous.announcements import Announcement
from unisono.comm.rendezvous.unix_socket import Deadline, TooFewDescriptors, descriptors_needed

if TYPE_CHECKING:
    from unisono.comm.engine_types import Group


class JoinRequest:
    """What one rank brings: the group's key, which rank of how many it is, and how to open the
    group's segment.

    `payload` is what the others shall know of this rank. `check` raises once there is nobody to
    wait for any more: the parent group has ended.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        deadline: Deadline,
        open: Callable[[int, int, int, int], Group],
        payload: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.key, self.rank, self.size = key, rank, size
        self.deadline = deadline
        self.open = open
        self.payload = payload
        self.check = check


class Membership:
    """What one rank has once the group is made. `payloads` is what each rank wanted the others to
    know."""

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        group: Group,
        members: tuple[Member, ...],
        payloads: tuple[str, ...] = (),
    ) -> None:
        self.key, self.rank, self.size = key, rank, size
        self.group = group
        self.members = members
        self.payloads = payloads


class Member:
    """A rank as its peers know it."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

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
