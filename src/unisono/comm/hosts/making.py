"""How a group over hosts is made: the world, or a group of some of its members."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from unisono.comm.hosts.hosts_transport import HostsTransport, Meeting, segments_of
from unisono.comm.hosts.links import Links
from unisono.comm.hosts.placement import Placement, place
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.identity import Hosts
from unisono.comm.meeting.membership import JoinRequest, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import Transport
from unisono.failures import load_soon


def make_world(
    board: Board,
    hosts: Hosts,
    rank: int,
    name: str,
    global_ranks: tuple[int, ...] | None,
    timeout_s: float,
) -> HostsTransport:
    """Make a group of all ranks of these hosts, with its own connections."""
    board = board.hidden(hosts.secret)
    links = Links(board, hosts, rank)
    try:
        links.meet(board, name)
        placement = place(range(len(hosts.pids)), hosts, rank)
        meeting = Meeting(name, global_ranks, timeout_s, board.deadline, board.check)
        return _make(board, links, placement, meeting)
    except BaseException:
        links.close_all()
        raise


def connect_beside(
    world: HostsTransport, board: Board, members: Sequence[int], name: str, timeout_s: float
) -> Transport:
    """Make a group of these ranks of a world over hosts, which meet on their own board."""
    links = world.links
    board = board.hidden(links.hosts.secret)
    placement, ranks = place(members, links.hosts, links.me), tuple(members)
    if len(placement.hosts) > 1:
        meeting = Meeting(name, ranks, timeout_s, board.deadline, board.check)
        return _make(board, links, placement, meeting)
    how: Any = {"name": name, "global_ranks": ranks, "timeout_s": timeout_s}
    here = _part_of_host(board, placement)
    return SharedMemory.connect(here, placement.index, len(members), **how)


def _make(board: Board, links: Links, placement: Placement, meeting: Meeting) -> HostsTransport:
    """Meet the members of this host, and then those of the others."""
    request = JoinRequest(
        meeting.name,
        placement.index,
        len(placement.here),
        meeting.deadline,
        meeting.timeout_s,
        check=meeting.check,
        segments=segments_of(placement),
    )
    with contextlib.closing(RendezvousServer()) as server:
        met = meet_by(_part_of_host(board, placement), server, request)
        made = HostsTransport.over(met, links, placement, server, meeting)
    load_soon(*NEEDED_LATER)
    return made


def _part_of_host(board: Board, placement: Placement) -> Board:
    """Where the members on this host meet."""
    first = min(placement.members[rank] for rank in placement.here)
    return board.part(f"unisono/host/{first}")
