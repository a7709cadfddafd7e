"""torch process groups over a Communicator of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.over_torch.process_groups import make_group
from unisono.comm.transport import DEFAULT_TIMEOUT_S
from unisono.errors import UnisonoError
from unisono.torch_backend.autoload import NAME
from unisono.torch_backend.process_group import UnisonoProcessGroup, our_group


def moves_data_elsewhere(group: Any) -> bool:
    """Whether this is a torch process group of another backend."""
    return isinstance(group, dist.ProcessGroup) and our_group(group) is None


def check_started() -> None:
    """Raise UnisonoError unless torch.distributed is initialised."""
    if not dist.is_initialized():
        raise UnisonoError(
            "a torch process group needs torch.distributed: call "
            f'torch.distributed.init_process_group("{NAME}") first, or use the Communicator '
            "(manager.dp for manager.dp_group)"
        )


def connect_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S),
    name: str = "outside",
) -> UnisonoProcessGroup:
    """A torch process group of `size` processes that meet in a torch Store, or a PrefixStore, used
    for nothing else. torch.distributed need not be initialised and does not know the group. `abort`
    and `shutdown` end it. Raises RendezvousError if not all arrive within `timeout`, which also
    limits calls."""
    timeout_s = timeout.total_seconds()
    board = Board(store, Deadline(timeout_s))
    comm = connect(board, rank, size, name=name, global_ranks=None, timeout_s=timeout_s)
    return UnisonoProcessGroup(comm, store)


def group_over(comm: Communicator) -> Any:
    """A torch process group over `comm`, for `torch.distributed` and DDP. No communication takes
    place. Destroying the group closes the Communicator.

    Raises UnisonoError if torch.distributed is not initialised, or has other ranks.
    """
    check_started()
    ranks = comm.global_ranks
    size, rank = dist.get_world_size(), dist.get_rank()
    if ranks is None or max(ranks) >= size or ranks[comm.rank] != rank:
        raise UnisonoError(
            f"rank {comm.rank} of group {comm.name} is not rank {rank} of {size} of "
            "torch.distributed: both must have the same ranks"
        )
    return make_group(NAME, ranks, comm.name, made=comm, timeout_s=comm.timeout_s)
