"""How members of a group make a group of their own."""

from __future__ import annotations

import time

from unisono.comm.base import Communicator
from unisono.comm.rendezvous.deadline import LATECOMERS_S, Deadline
from unisono.comm.rendezvous.membership import JoinRequest, meet_at
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.errors import RendezvousError


def make_split(
    parent: SharedMemoryCommunicator, members: tuple[int, ...], label: str, name: str | None
) -> Communicator:
    """This rank's part of `parent.split(members, label)`, of which it is a member."""
    if parent._lobby is None:
        raise parent._exceptions.closed()
    name = name or parent._name_split(members, label)
    known, timeout_s = parent.global_ranks, parent.timeout_s
    global_ranks = None if known is None else tuple(known[rank] for rank in members)
    if len(members) == 1:
        from unisono.comm.solo import SoloCommunicator

        return SoloCommunicator(name, global_ranks, timeout_s)
    rank, late_s = members.index(parent.rank), time.monotonic() + LATECOMERS_S

    def check() -> None:
        """Raise if a member will not come. Followers may wait for long for a leader that lives."""
        error = parent.loss_among(members, f"split({list(members)})")
        if error is None and (parent._lobby is None or (rank == 0 and time.monotonic() > late_s)):
            error = parent.errored
        if error is not None:
            raise error

    request = JoinRequest(
        f"{parent._membership.key}/{name.removeprefix(parent.name)}",
        rank,
        len(members),
        Deadline(timeout_s),
        timeout_s,
        check=check,
    )
    leader = parent._membership.members[members[0]]
    try:
        check()
        membership = meet_at(leader.address, parent._lobby, request)
    except RendezvousError:
        for _ in range(50):  # if somebody has died, it is known in a moment
            check()
            time.sleep(0.01)
        raise
    return SharedMemoryCommunicator(membership, parent._lobby, name, global_ranks, timeout_s)
