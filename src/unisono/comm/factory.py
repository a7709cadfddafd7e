"""Communicators of ranks that are not connected yet, and of other libraries' groups."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.hosts import anywhere
from unisono.comm.meeting.board import Board
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import DEFAULT_TIMEOUT_S


def alone(
    name: str = "world",
    global_ranks: tuple[int, ...] | None = (0,),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Communicator:
    """A group of one. Raises EngineUnavailable without the engine."""
    return Communicator(SharedMemory.alone(name, global_ranks, timeout_s))


def connect_on_host(board: Board, rank: int, size: int, **how: Any) -> Communicator:
    """The group of `size` processes of this host that meet on a board; `how` goes to
    `SharedMemory.connect`."""
    return Communicator(SharedMemory.connect(board, rank, size, **how))


def connect(
    board: Board,
    rank: int,
    size: int,
    *,
    name: str = "world",
    global_ranks: Sequence[int] | None = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Communicator:
    """The group of `size` processes that meet on a board, wherever they are. Without a common world
    they have None as their global ranks, which are 0, 1, ... by default."""
    how: Any = {"name": name, "global_ranks": global_ranks, "timeout_s": timeout_s}
    return Communicator(anywhere.connect(board, rank, size, **how))


_wrapped: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> Communicator:
    """The Communicator of another library's process group: the same one until either is closed."""
    from unisono.comm.over_torch.torch_transport import OverTorch

    comm = _wrapped.get(group)
    if comm is None or not isinstance(comm.transport, OverTorch) or comm.transport.is_closed:
        comm = _wrapped[group] = Communicator(OverTorch(group, keep=False))
    return comm
