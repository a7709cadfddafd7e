"""A group of ranks that meet on a board, wherever they are: which transport it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono import variables
from unisono.comm.meeting.board import Board, StoreGone
from unisono.comm.meeting.membership import check_size
from unisono.comm.meeting.unix_socket import Departed
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport

if TYPE_CHECKING:
    from unisono.comm.meeting.outcome import Outcome

# What one rank, or ranks of one host, do not need is imported where it is used: they start faster.


def connect(
    board: Board,
    rank: int,
    size: int,
    *,
    name: str = "world",
    global_ranks: Sequence[int] | None = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Transport:
    """Meet the other `size - 1` ranks on a board, until its deadline, and make a group with them.
    Ranks without a common world have None as their global ranks."""
    if variables.HOSTS.read() != "gloo":
        check_size(name, size)  # before they meet
    ranks = None if global_ranks is None else tuple(global_ranks) or tuple(range(size))
    if size == 1:
        return SharedMemory.alone(name, ranks, timeout_s)
    from unisono.comm.meeting.identity import find_hosts

    hosts = None if board.is_of_one_host else find_hosts(board, rank, size, name)
    if hosts is None or hosts.count == 1:
        how: Any = {"name": name, "global_ranks": ranks, "timeout_s": timeout_s}
        return SharedMemory.connect(board, rank, size, **how)
    if variables.HOSTS.read() == "gloo":
        from unisono.comm.over_torch.stateless import connect_stateless

        return connect_stateless(
            *("gloo", board.torch_store(), name, rank, size, timeout_s, board.deadline.left_s()),
            address=hosts.address,
            global_ranks=ranks,
        )
    from unisono.comm.hosts.making import make_world

    return make_world(board, hosts, rank, name, ranks, timeout_s)


def connect_once(
    board: Board, rank: int, size: int, outcome: Outcome, leads: bool, **how: Any
) -> Transport:
    """As `connect`, with the same result on every rank, that of an outcome which the one that
    `leads` settles. Raises Departed if the group is not made."""
    made: Transport | None = None
    try:
        board = board.until(outcome.deadline, outcome.check, outcome.settle)
        made = connect(board, rank, size, **how)
        if not (outcome.settle(True) if leads else outcome.wait()):
            raise Departed(f"a member left while group {how['name']} was made")
    except BaseException as error:
        is_made: bool | None = False
        with contextlib.suppress(StoreGone):  # else an answer came too late, and the next may not
            is_made = outcome.settle(False)
        if made is None or not is_made or not isinstance(error, Exception):
            if made is not None:
                made.close()
            raise
    return made
