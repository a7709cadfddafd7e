"""Which transport a group gets that is joined, or calls on a GPU."""

from __future__ import annotations

import contextlib
import operator
import os
from typing import Any

from unisono import variables
from unisono.comm.engine.numbers import Operation
from unisono.comm.hosts.anywhere import connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline, meeting_timeout_s
from unisono.comm.meeting.membership import check_size
from unisono.comm.meeting.roster import agree
from unisono.comm.meeting.unix_socket import Departed
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

    check_name(name)
    deadline = Deadline(meeting_timeout_s(timeout_s, join_timeout_s))
    board = None if store is None else Board(store, deadline)
    if size is None:
        from unisono.comm.hosts.growing import join_growing

        rank = None if rank is None else _whole("rank", rank)
        generation = _whole("generation", generation)
        if rank is not None and rank < 0:
            raise ValueError(f"{rank} is not a rank")
        return join_growing(board, name, rank, generation, timeout_s, deadline)
    rank, size = _whole("rank", rank), _whole("size", size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{rank} is not a rank of a group of {size}")
    check_size(name, size)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        return SharedMemory.alone(name, None, timeout_s)
    known: Any = {"name": name, "global_ranks": None, "timeout_s": timeout_s}
    with contextlib.ExitStack() as stack:
        here = None
        if board is None or not board.host:
            here = stack.enter_context(meeting_by_name(name, rank, board)).until(deadline)
        while True:
            try:
                if here is not None:
                    return SharedMemory.connect(here, rank, size, **known)
                assert board is not None  # other hosts also reach it, and each meeting has a part
                token, _ = agree(board, name, rank, size)
                return connect(board.part(f"unisono/join/{token}"), rank, size, **known)
            except Departed:  # while it waited: it, or a replacement, may come back
                if not deadline.left_s():
                    raise


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {number!r}") from None


def check_name(name: object) -> None:
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
