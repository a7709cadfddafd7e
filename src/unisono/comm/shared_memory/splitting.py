"""How members of a group make a group of their own."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from unisono.comm.rendezvous.meeting import meet_at
from unisono.comm.rendezvous.membership import JoinRequest
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator, open_with
from unisono.comm.tuning import read_tuning
from unisono.errors import RendezvousError

if TYPE_CHECKING:
    from unisono.comm.base import Communicator

LATECOMERS_S = 2.0
"""How long the leader of a new group waits for its members after the group that they belong to has
ended for another reason than the death of one of them: whoever caught the error may still come."""

_NOTICE_S = 0.5
"""How long after a meeting has failed the death that made it fail may become known."""


def make_split(
    parent: SharedMemoryCommunicator, members: tuple[int, ...], label: str, name: str | None
) -> Communicator:
    """This rank's part of `parent.split(members, label)`, of which it is a member."""
    if parent._lobby is None:
        raise parent._exceptions.closed()
    serial = parent._splits[members, label] = parent._splits.get((members, label), 0) + 1
    listed = f"{label}[{','.join(map(str, members))}]"
    if name is None:
        name = f"{parent.name}.{listed}" if label else f"{parent.name}{listed}"
        name += f"/{serial}" if serial > 1 else ""
    known = parent.global_ranks
    global_ranks = None if known is None else tuple(known[rank] for rank in members)
    if len(members) == 1:
        from unisono.comm.solo import SoloCommunicator

        return SoloCommunicator(name, global_ranks, parent.timeout_s)
    rank = members.index(parent.rank)
    check = partial(_raise_if_hopeless, parent, members, rank == 0, time.monotonic())
    request = JoinRequest(
        f"{parent._membership.key}/{listed}/{serial}",
        rank,
        len(members),
        Deadline(parent.timeout_s),
        open_with(parent.timeout_s),
        check=check,
        tuning=read_tuning(len(members), parent.rank),
    )
    leader = parent._membership.members[members[0]]
    try:
        check()
        membership = meet_at(leader.address, parent._lobby, request)
    except RendezvousError as error:
        _raise_if_one_has_died(parent, members, error)
        raise
    timeout_s = parent.timeout_s
    return SharedMemoryCommunicator(membership, parent._lobby, name, global_ranks, timeout_s)


def _raise_if_hopeless(
    parent: SharedMemoryCommunicator, members: tuple[int, ...], leads: bool, since_s: float
) -> None:
    """Raise if a member will not come. A rank that has closed the parent will not, unless the new
    group is made already: only the leader knows that it is not."""
    doing = f"split({list(members)})"
    error = parent._exceptions.departure(members, members if leads else members[:1], doing)
    is_late = leads and time.monotonic() > since_s + LATECOMERS_S
    if error is None and (is_late or parent._lobby is None):
        error = parent.ending(doing)
    if error is not None:
        raise error


def _raise_if_one_has_died(
    parent: SharedMemoryCommunicator, members: tuple[int, ...], meeting: RendezvousError
) -> None:
    """A meeting has failed: raise PeerLost if that is why."""
    end = time.monotonic() + _NOTICE_S
    while time.monotonic() < end:
        error = parent.loss_among(members, f"split({list(members)})")
        if error is not None:
            raise error from meeting
        time.sleep(0.01)
