"""Which transport a group gets that is joined, grows, or calls on a GPU."""

from __future__ import annotations

import operator
import os
from contextlib import AbstractContextManager, closing
from typing import Any

from unisono import variables
from unisono.comm.engine.numbers import Operation
from unisono.comm.hosts.anywhere import connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline, meeting_timeout_s
from unisono.comm.meeting.membership import JoinRequest, check_size, meet_by
from unisono.comm.meeting.roster import agree
from unisono.comm.meeting.unix_socket import Departed, RendezvousServer
from unisono.comm.shared_memory.engine_transport import EngineTransport
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport

# What only some programs need is imported where it is used, so that other processes start faster.


def fresh_part(board: Board, rank: int, size: int, name: str = "world") -> Board:
    """A part of a board for these processes only; all of them call this. torchrun hosts one
    store for all its attempts, in which a new attempt finds what earlier ones left. Nothing
    tells the ranks which attempt they belong to: each host counts its own restarts, and not
    those caused by other hosts that join or leave."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not hosted or variables.RANK.read() is not None:  # our launcher starts its ranks once
        return board
    own = board.part(f"unisono/{size}")
    return own.part(agree(own, name, rank, size)[0])


def join(
    name: str,
    rank: int | None,
    size: int | None,
    store: Any,
    generation: int,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Transport:
    from unisono.comm.meeting.meeting_points import meeting_by_name

    _check_name(name)
    deadline = Deadline(meeting_timeout_s(timeout_s, join_timeout_s))
    board = None if store is None else Board(store, deadline)
    if size is None:
        rank = None if rank is None else _whole("rank", rank)
        return _come_in(name, rank, board, _whole("generation", generation), timeout_s, deadline)
    rank, size = _whole("rank", rank), _whole("size", size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{rank} is not a rank of a group of {size}")
    check_size(name, size)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        return SharedMemory.alone(name, None, timeout_s)
    if board is not None and board.host:
        return _join_anywhere(name, rank, size, board, timeout_s)
    request = JoinRequest(name, rank, size, deadline, timeout_s)
    with meeting_by_name(name, rank, board) as place, closing(RendezvousServer()) as server:
        while True:
            try:
                membership = meet_by(place, server, request)
            except Departed:  # while it waited: it, or a replacement, may come back
                if not deadline.left_s():
                    raise
            else:
                return SharedMemory(membership, server, name, None, timeout_s)


def _join_anywhere(name: str, rank: int, size: int, board: Board, timeout_s: float) -> Transport:
    """Meet on a board that other hosts can also reach: each meeting has its own part of it."""
    while True:
        token, _ = agree(board, name, rank, size)
        own = board.part(f"unisono/join/{token}")
        try:
            return connect(own, rank, size, name=name, global_ranks=None, timeout_s=timeout_s)
        except Departed:  # it, or a replacement, may come back
            if not board.deadline.left_s():
                raise


def grow(
    group: Transport,
    name: str,
    known_as: str,
    count: int,
    store: Any,
    limit_s: float,
    generation: int,
) -> Transport:
    """The group that results from growing, with newcomers that know it by another name."""
    _check_name(known_as)
    board = None if store is None else Board(store)
    if board is not None and board.host and group.backend == "unisono":
        from unisono.comm.hosts import growing

        return growing.grow(group, board, name, known_as, count, limit_s, generation)
    meeting = known_as, _meeting_of_newcomers(known_as, 0, board)
    return group.grow(name, meeting, count, limit_s, generation)


def _meeting_of_newcomers(
    name: str, rank: int, board: Board | None
) -> AbstractContextManager[Board]:
    """Where new processes find a group that grows; its members are there as rank 0."""
    from unisono.comm.meeting.meeting_points import meeting_by_name

    return meeting_by_name(f"{name} grows", rank, board)


def _come_in(
    name: str,
    rank: int | None,
    board: Board | None,
    generation: int,
    timeout_s: float | None,
    deadline: Deadline,
) -> Transport:
    """Join a group that grows."""
    from unisono.comm.meeting.growing import join_growing, number_newcomers

    if rank is not None and rank < 0:
        raise ValueError(f"{rank} is not a rank")
    if board is not None and board.host:
        from unisono.comm.hosts import growing

        return growing.join_growing(board, name, rank, generation, timeout_s, deadline)
    # without claiming the name: several may wait at once
    meeting = _meeting_of_newcomers(name, os.getpid(), board)
    with meeting as place, closing(RendezvousServer()) as server:
        membership, growth, told = join_growing(
            place, server, name, rank, generation, timeout_s, deadline
        )
        global_ranks = number_newcomers(told["global_ranks"], growth.places)
        return SharedMemory(membership, server, growth.name, global_ranks, told["timeout_s"])


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {number!r}") from None


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} cannot be the name of a meeting")
    try:
        is_text = b"\0" not in name.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ValueError(
            f"{name!r} cannot be the name of a meeting: it contains characters that are not text"
        )


def transport_on_gpu(transport: Transport, device: Any, operation: str) -> Transport | None:
    """The transport for collectives on tensors of this GPU, for a group whose own transport does
    not support them; all ranks ask with their first such call. None: there is none. Raises
    ValueError, on every rank, if their GPUs allow none."""
    if not isinstance(transport, EngineTransport):
        return None
    from unisono.comm.cuda.first_call import meet_on_gpus

    return meet_on_gpus(transport, device, Operation[operation.upper()])
