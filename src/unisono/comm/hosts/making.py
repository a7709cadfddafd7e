"""How a group over hosts is made: the world, or a group of some of its members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.hosts.identity import Hosts
from unisono.comm.hosts.links import Links
from unisono.comm.hosts.placement import Placement, place
from unisono.comm.rendezvous.announcements import StoreAnnouncements
from unisono.comm.rendezvous.deadline import Deadline
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


def make_world(meeting: Rendezvous, hosts: Hosts, rank: int, size: int) -> HostsTransport:
    """Make a group of all ranks of these hosts, with connections of its own."""
    links = Links(meeting.store, hosts, rank)
    try:
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
    if len(placement.hosts) == 1:
        return _make_local(placement, meeting)
    return _make(links, placement, meeting)


def _make(links: Links, placement: Placement, meeting: Rendezvous) -> HostsTransport:
    local = Communicator(_make_local(placement, meeting))
    name, global_ranks, timeout_s = meeting.name, meeting.global_ranks, meeting.timeout_s
    return _over(links, placement, local, name, global_ranks, timeout_s)


def _make_local(placement: Placement, meeting: Rendezvous) -> Transport:
    """The group of the members on this host, who meet in their part of the store."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    known, here = meeting.global_ranks, placement.here
    global_ranks = None if known is None else tuple(known[rank] for rank in here)
    if len(here) == 1:
        return Solo(meeting.name, global_ranks, meeting.timeout_s)
    first = min(placement.members[rank] for rank in here)
    store = PrefixStore(f"unisono/host/{first}", meeting.store)
    return SharedMemory.connect(
        StoreAnnouncements(store, limit=meeting.deadline),
        placement.index,
        len(here),
        name=meeting.name,
        global_ranks=global_ranks,
        timeout_s=meeting.timeout_s,
        deadline=meeting.deadline,
        check=meeting.check,
    )


def split_group(parent: HostsTransport, members: tuple[int, ...], name: str) -> Transport:
    """Make a group of these ranks of a group over hosts."""
    parent._raise_if_ended()
    links, before = parent.links, parent.placement
    known = parent.global_ranks
    global_ranks = None if known is None else tuple(known[rank] for rank in members)
    placement = place([before.members[rank] for rank in members], links.hosts, links.me)
    here = [before.here.index(members[rank]) for rank in placement.here]
    ranks_here = None if known is None else tuple(known[members[rank]] for rank in placement.here)
    if len(here) == 1:
        local: Transport = Solo(name, ranks_here, parent.timeout_s)
    else:
        local = parent._locally(partial(parent.local.transport.split, tuple(here), name))
    if len(placement.hosts) == 1:
        return local
    return _over(links, placement, Communicator(local), name, global_ranks, parent.timeout_s)


def _over(
    links: Links,
    placement: Placement,
    local: Communicator,
    name: str,
    global_ranks: tuple[int, ...] | None,
    timeout_s: float,
) -> HostsTransport:
    with contextlib.ExitStack() as stack:
        stack.callback(local.close)
        made = HostsTransport(links, placement, local, name, global_ranks, timeout_s)
        stack.pop_all()
        return made
