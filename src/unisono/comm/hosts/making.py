"""How a group over hosts is made: the world, or a group of some of its members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.comm.hosts.hosts_transport import HostsTransport, segments_of
from unisono.comm.hosts.identity import Hosts
from unisono.comm.hosts.links import Links
from unisono.comm.hosts.placement import Placement, place
from unisono.comm.rendezvous.announcements import StoreAnnouncements
from unisono.comm.rendezvous.deadline import Deadline
from unisono.comm.rendezvous.membership import JoinRequest, meet_by
from unisono.comm.rendezvous.unix_socket import Lobby
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.solo import Solo
from unisono.comm.transport import Transport


@dataclass(frozen=True)
class Rendezvous:
    """How ranks meet to make a group: in which store, until when; and what the group shall be."""

    store: Any
    name: str
    global_ranks: tuple[int, ...] | None
    timeout_s: float
    deadline: Deadline
    check: Callable[[], None] = lambda: None


def make_world(
    meeting: Rendezvous, hosts: Hosts, rank: int, size: int, payload: str
) -> HostsTransport:
    """Make a group of all ranks of these hosts, with connections of its own."""
    links = Links(meeting.store, hosts, rank)
    try:
        links.meet(payload, meeting.deadline, meeting.check, meeting.name)
        return _make(links, place(range(size), hosts, rank), meeting)
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
    """Make a group of these ranks of a world over hosts, which meet in a store of their own."""
    links = world.links
    placement = place(members, links.hosts, links.me)
    meeting = Rendezvous(store, name, tuple(members), timeout_s, Deadline(timeout_s), check)
    if len(placement.hosts) > 1:
        return _make(links, placement, meeting)
    if len(members) == 1:
        return Solo(name, meeting.global_ranks, timeout_s)
    return SharedMemory.connect(
        _announcements(placement, meeting),
        placement.index,
        len(members),
        name=name,
        global_ranks=meeting.global_ranks,
        timeout_s=timeout_s,
        deadline=meeting.deadline,
        check=check,
    )


def _make(links: Links, placement: Placement, meeting: Rendezvous) -> HostsTransport:
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
    with contextlib.closing(Lobby()) as lobby:
        met = meet_by(_announcements(placement, meeting), lobby, request)
        return HostsTransport.over(
            met,
            links,
            placement,
            lobby,
            meeting.name,
            meeting.global_ranks,
            meeting.timeout_s,
            meeting.deadline,
            meeting.check,
        )


def _announcements(placement: Placement, meeting: Rendezvous) -> StoreAnnouncements:
    """Where those of this host meet: in their part of the store."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    first = min(placement.members[rank] for rank in placement.here)
    store = PrefixStore(f"unisono/host/{first}", meeting.store)
    return StoreAnnouncements(store, limit=meeting.deadline)
