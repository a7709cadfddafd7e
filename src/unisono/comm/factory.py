"""Which transport a group has.

Processes that were started separately become a group by `Communicator.join`: by a name alone on one
host; by a name and a store that is reached by network wherever they are."""

from __future__ import annotations

import weakref
from contextlib import closing
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.hosts.connect import connect
from unisono.comm.hosts.network import is_networked
from unisono.comm.rendezvous.by_name import meeting_by_name
from unisono.comm.rendezvous.lobby import Lobby
from unisono.comm.rendezvous.meeting import meet_by
from unisono.comm.rendezvous.membership import JoinRequest
from unisono.comm.rendezvous.roll_call import call_roll
from unisono.comm.rendezvous.unix_socket import Deadline, Departed
from unisono.comm.rendezvous.waiting import meeting_timeout_s
from unisono.comm.shared_memory.transport import SharedMemory, open_with
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport
from unisono.errors import GroupClosed


def join(
    name: str,
    rank: int,
    size: int,
    store: Any,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Transport:
    """As `Communicator.join`, which says it all."""
    _check_name(name)
    if not isinstance(rank, int) or not isinstance(size, int):
        raise TypeError(f"rank and size are whole numbers, not {rank!r} and {size!r}")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} does not lie in a group of {size}")
    meeting_s = meeting_timeout_s(timeout_s, join_timeout_s)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        from unisono.comm.solo import Solo

        return Solo(name, None, timeout_s)
    deadline = Deadline(meeting_s)
    if is_networked(store):
        return _join_anywhere(name, rank, size, store, timeout_s, deadline)
    request = JoinRequest(name, rank, size, deadline, open_with(timeout_s))
    with meeting_by_name(name, rank, store) as announcements, closing(Lobby()) as lobby:
        while True:
            try:
                membership = meet_by(announcements, lobby, request)
            except Departed:  # while it waited: it may come back, or another in its place
                if not deadline.left_s():
                    raise
            else:
                return SharedMemory(membership, lobby, name, None, timeout_s)


def _join_anywhere(
    name: str, rank: int, size: int, store: Any, timeout_s: float, deadline: Deadline
) -> Transport:
    """Meet in a store that other hosts reach, too: each meeting has a part of it for itself."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    while True:
        token = call_roll(store, name, rank, size, deadline)
        meeting = PrefixStore(f"unisono/join/{token}", store)
        try:
            return connect(
                meeting,
                rank,
                size,
                name=name,
                timeout_s=timeout_s,
                deadline=deadline,
                in_world=False,
            )
        except Departed:  # it may come back, or another in its place
            if not deadline.left_s():
                raise


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is not a name to meet by")
    try:
        is_text = b"\0" not in name.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ValueError(f"{name!r} is not a name to meet by: it has characters that are not text")


_wrapped: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> Communicator:
    """The Communicator of another library's process group: always the same, until somebody closes it
    or the group goes."""
    from unisono.comm.over_torch.transport import OverTorch

    comm = _wrapped.get(group)
    if comm is None or isinstance(comm.errored, GroupClosed):
        comm = _wrapped[group] = Communicator(OverTorch(group, keep=False))
    return comm
