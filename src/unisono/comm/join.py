"""How processes that were started separately become a group: `Communicator.join`. By a name alone
on one host; by a name and a store that is reached by network wherever they are."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from unisono.comm.base import DEFAULT_TIMEOUT_S, Communicator
from unisono.comm.hosts.connect import connect
from unisono.comm.hosts.network import is_networked
from unisono.comm.rendezvous.deadline import Deadline, meeting_timeout_s
from unisono.comm.rendezvous.meeting_points import meeting_by_name
from unisono.comm.rendezvous.membership import JoinRequest, meet_by
from unisono.comm.rendezvous.roll_call import call_roll
from unisono.comm.rendezvous.unix_socket import Departed, Lobby
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.comm.solo import SoloCommunicator


def join(
    name: str,
    rank: int,
    size: int,
    store: Any,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Communicator:
    """As `Communicator.join`, which says it all."""
    _check_name(name)
    if not isinstance(rank, int) or not isinstance(size, int):
        raise TypeError(f"rank and size are whole numbers, not {rank!r} and {size!r}")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} does not lie in a group of {size}")
    meeting_s = meeting_timeout_s(timeout_s, join_timeout_s)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        return SoloCommunicator(name, None, timeout_s)
    deadline = Deadline(meeting_s)
    if is_networked(store):
        return _join_anywhere(name, rank, size, store, timeout_s, deadline)
    request = JoinRequest(name, rank, size, deadline, timeout_s)
    with meeting_by_name(name, rank, store) as announcements, closing(Lobby()) as lobby:
        while True:
            try:
                membership = meet_by(announcements, lobby, request)
            except Departed:  # while it waited: it may come back, or another in its place
                if not deadline.left_s():
                    raise
            else:
                return SharedMemoryCommunicator(membership, lobby, name, None, timeout_s)


def _join_anywhere(
    name: str, rank: int, size: int, store: Any, timeout_s: float, deadline: Deadline
) -> Communicator:
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
