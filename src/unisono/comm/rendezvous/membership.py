"""What a rank brings to the meeting of a new group, and what it has afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.comm.engine import Group
from unisono.comm.rendezvous.unix_socket import Deadline


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
