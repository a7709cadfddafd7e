"""How ranks that meet in a store make a group: of one host, or over several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.comm.base import DEFAULT_TIMEOUT_S, Communicator
from unisono.comm.hosts.identity import find_hosts
from unisono.comm.rendezvous.announcements import StoreAnnouncements
from unisono.comm.rendezvous.deadline import JOIN_TIMEOUT_S, Deadline
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator


def connect(
    store: Any,
    rank: int,
    size: int,
    *,
    name: str = "world",
    global_ranks: tuple[int, ...] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    deadline: Deadline | None = None,
    payload: str = "",
    check: Callable[[], None] = lambda: None,
    on_one_host: bool = False,
    in_world: bool = True,
) -> Communicator:
    """Meet the other `size - 1` ranks through a torch Store and make a group with them: by shared
    memory alone where all are on one host, or known to be. Without a world in common they have no
    global ranks. Other arguments are those of `SharedMemoryCommunicator.connect`."""
    deadline = deadline or Deadline(join_timeout_s)
    global_ranks = global_ranks or tuple(range(size)) if in_world else None
    hosts = None if on_one_host else find_hosts(store, rank, size, deadline, check, name)
    if hosts is None or hosts.count == 1:
        made = SharedMemoryCommunicator.connect(
            StoreAnnouncements(store, limit=deadline),
            rank,
            size,
            name=name,
            global_ranks=global_ranks,
            timeout_s=timeout_s,
            deadline=deadline,
            payload=payload,
            check=check,
        )
        if not in_world:
            made.global_ranks = None
        return made
    # what one host alone need not load
    from unisono.comm.hosts.making import Rendezvous, make_world

    meeting = Rendezvous(store, name, global_ranks, timeout_s, deadline, check)
    return make_world(meeting, hosts, rank, size)
