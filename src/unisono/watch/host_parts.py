"""A watched group over several hosts: this host's part of its records, and lines to the others.

The lines are those of unisono's own groups over hosts, without the data path: gloo, nccl or mpi
carries the group's data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from unisono.comm.engine import native
from unisono.comm.hosts.links import GroupMembers, Links, Party
from unisono.comm.hosts.placement import place
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.identity import find_hosts
from unisono.comm.shared_memory.group_parts import Part, name_part
from unisono.errors import RendezvousError
from unisono.watch.job_view import open_links

_CONNECT_S = 10.0
"""How long the first lines may take; if they fail, a later question tries again."""


class HostPart(Party):
    """Of a group of these global ranks. Readers of the job use the links; the records go with the
    process."""

    def __init__(self, links: Links, name: str, members: Sequence[int]) -> None:
        self.links = links.share()
        self.name, self.placement = name, place(members, links.hosts, links.me)
        self.key = links.next_key(f"watch {name} of {members}")
        links.add(self)
        native.hold_aborts(True)  # the watching thread lets them go

    @classmethod
    def open(
        cls, board: Board, rank: int, size: int, name: str, members: Sequence[int]
    ) -> HostPart | None:
        """This rank's part, with all other ranks of the group; the world has no `members`. None if
        no other host can be asked. Raises RendezvousError."""
        if members:
            links = next(iter(open_links()), None)
            return cls(links, name, members) if links is not None else None
        hosts = find_hosts(board, rank, size, name)
        if hosts.count == 1:
            return None
        links = Links(board, hosts, rank)
        links.meet(board, name, has_data=False)
        part = cls(links, name, range(size))
        with contextlib.suppress(RendezvousError):
            links.connect(part.placement.neighbours(), min(_CONNECT_S, board.deadline.left_s()))
        return part

    def introduction(self, backend: str) -> str:
        """What the ranks of this host say about themselves in the records."""
        hosts = self.links.hosts
        return name_part(self.name, Part(f"{self.key:x}", hosts.names[hosts.mine]), backend)

    def close(self) -> None:
        """The group is left."""
        self.links.close(self.key)

    def describe(self) -> GroupMembers:
        return GroupMembers(self.name, f"{self.key:x}", self.placement.members)
