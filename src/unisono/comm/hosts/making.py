"""How a group over hosts is made: the world, or a group of some of its members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.hosts.hosts_transport import HostsTransport, Meeting, segments_of
from unisono.comm.hosts.links import Links
from unisono.comm.hosts.placement import Placement, place
from unisono.comm.meeting.announcements import StoreAnnouncements
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.identity import Hosts, find_hosts
from unisono.comm.meeting.membership import JoinRequest, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import Transport
from unisono.failures import load_soon


def connect_anywhere(store: Any, meeting: Meeting, rank: int, size: int) -> Transport:
    """Make a group of ranks that meet in a store, wherever they are."""
    hosts = find_hosts(store, rank, size, meeting.deadline, meeting.check, meeting.name)
    if hosts.count > 1:
        return make_world(store, meeting, hosts, rank, "")
    announcements = StoreAnnouncements(store, limit=meeting.deadline)
    return _make_here(announcements, meeting, rank, size)


def _make_here(
    announcements: StoreAnnouncements, meeting: Meeting, rank: int, size: int
) -> SharedMemory:
    """Make a group of ranks that are all on this host."""
    made = SharedMemory.connect(
        announcements,
        rank,
        size,
        name=meeting.name,
        global_ranks=meeting.global_ranks,
        timeout_s=meeting.timeout_s,
        deadline=meeting.deadline,
        check=meeting.check,
    )
    made.global_ranks = meeting.global_ranks
    return made


def make_world(
    store: Any, meeting: Meeting, hosts: Hosts, rank: int, payload: str
) -> HostsTransport:
    """Make a group of all ranks of these hosts, with its own connections."""
    links = Links(store, hosts, rank)
    try:
        links.meet(payload, meeting.deadline, meeting.check, meeting.name)
        return _make(store, links, place(range(len(hosts.pids)), hosts, rank), meeting)
    except BaseException:
        links.close_all()
        raise


def connect_beside(
    world: HostsTransport,
    store: Any,
    members: Sequence[int],
    *,
    name: str,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Transport:
    """Make a group of these ranks of a world over hosts, which meet in their own store."""
    links, deadline = world.links, Deadline(timeout_s)
    placement = place(members, links.hosts, links.me)
    meeting = Meeting(name, tuple(members), timeout_s, deadline, check)
    if len(placement.hosts) > 1:
        return _make(store, links, placement, meeting)
    announcements = _announcements(store, placement, deadline)
    return _make_here(announcements, meeting, placement.index, len(members))


def _make(store: Any, links: Links, placement: Placement, meeting: Meeting) -> HostsTransport:
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
        met = meet_by(_announcements(store, placement, meeting.deadline), server, request)
        load_soon(*NEEDED_LATER)
        return HostsTransport.over(met, links, placement, server, meeting)


def _announcements(store: Any, placement: Placement, deadline: Deadline) -> StoreAnnouncements:
    """Where the members on this host meet: in their part of the store."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    first = min(placement.members[rank] for rank in placement.here)
    return StoreAnnouncements(PrefixStore(f"unisono/host/{first}", store), limit=deadline)
