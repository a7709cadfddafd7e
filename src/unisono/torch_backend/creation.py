"""What torch calls to make a group of ours, and when we refuse."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from unisono.comm.base import Communicator
from unisono.comm.hosts.connect import connect
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.errors import GroupError, PeerLost, UnisonoError
from unisono.torch_backend.process_group import NAME, UnisonoProcessGroup
from unisono.torch_support import (
    NEWEST_TRIED_TORCH,
    OLDEST_TORCH,
    format_version,
    is_too_old,
    is_untried,
)

if TYPE_CHECKING:
    from unisono.comm.hosts.communicator import HostsCommunicator

_World: TypeAlias = "SharedMemoryCommunicator | HostsCommunicator"

_NOTICE_S = 0.5
"""How long it may take until a death that a meeting has noticed is known to the world."""

_LATECOMERS_S = 2.0
"""How long a new group waits for its members in a world that has ended for another reason than
the death of one of them: whoever caught the error may still come."""


def create(options: Any, made: Any) -> UnisonoProcessGroup:
    """What torch calls to make a group; on its members only. Where torch passes a Communicator on
    as the backend's options (`make_default_group`, `torch_groups.group_over`), the group is made
    over that one."""
    _check_torch(options.group_rank, options.global_ranks_in_group)
    if isinstance(made, Communicator):
        return group_over(made, options.store)
    rank, size = options.group_rank, options.group_size
    timeout_s = options.timeout.total_seconds()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    name = str(options.group_id) if dist.is_initialized() else "world"
    if size == 1:
        from unisono.comm.solo import SoloCommunicator

        return group_over(SoloCommunicator(name, ranks, timeout_s), options.store)
    world = _world()
    end = time.monotonic() + _LATECOMERS_S

    def check() -> None:
        _raise_if_hopeless(world, ranks, end)

    try:
        if world is not None and not isinstance(world, SharedMemoryCommunicator):
            from unisono.comm.hosts.making import connect_beside

            comm = connect_beside(
                world, options.store, ranks, name=name, timeout_s=timeout_s, check=check
            )
        else:
            comm = connect(
                options.store,
                rank,
                size,
                name=name,
                global_ranks=ranks,
                timeout_s=timeout_s,
                join_timeout_s=timeout_s,
                check=check,
                on_one_host=world is not None,
            )
    except GroupError:
        raise
    except (RuntimeError, OSError) as error:
        _raise_if_ended(world, ranks, error)
        raise
    return group_over(comm, options.store)


def group_over(comm: Communicator, store: Any) -> UnisonoProcessGroup:
    """A torch process group over a Communicator, such that this torch's hooks can be attached."""
    if hasattr(_distributed_c10d, "FlightRecorderHook"):
        from unisono.torch_backend.flight_recorder import recorded_group_over

        return recorded_group_over(comm, store)
    return UnisonoProcessGroup(comm, store)


def _world() -> _World | None:
    """What moves the data of torch's default group; None where there is none, or not ours."""
    group = dist.group.WORLD if dist.is_initialized() else None
    comm = group.comm if isinstance(group, UnisonoProcessGroup) else None
    return cast(_World, comm) if hasattr(comm, "ending") else None


def _raise_if_hopeless(world: _World | None, ranks: Sequence[int], end: float) -> None:
    """The members of a new group, which has these global ranks, wait for each other: raise how the
    world ended, if it took one of them along or the latecomers' time is over."""
    ending = world.ending(_describe_making(ranks)) if world is not None else None
    if ending is None:
        return
    if (isinstance(ending, PeerLost) and ending.peer in ranks) or time.monotonic() > end:
        raise ending


def _raise_if_ended(
    world: _World | None,
    ranks: Sequence[int],
    error: Exception,
) -> None:
    """A new group could not be made: raise how the world ended, if that is why."""
    end = time.monotonic() + _NOTICE_S
    while world is not None:
        ending = world.ending(_describe_making(ranks))
        if ending is not None:
            raise ending from error
        if time.monotonic() > end:
            return
        time.sleep(0.01)


def _describe_making(ranks: Sequence[int]) -> str:
    return f"new_group([{', '.join(map(str, ranks))}])"


def make_default_group(comm: Communicator, store: Any) -> None:
    """Make torch's default process group over a Communicator of ours that is there already."""
    dist.init_process_group(
        NAME,
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=comm.timeout_s),
        pg_options=comm,
    )


_ALSO_OURS = ("nccl",)
"""Beside ours: "cpu:unisono,cuda:nccl" is what a group of ours does where every rank has a GPU of
its own; where they share one, NCCL refuses and ours does not."""


def _check_torch(rank: int, ranks: Sequence[int]) -> None:
    version = torch.__version__
    if is_too_old(version):
        oldest = format_version(OLDEST_TORCH)
        raise UnisonoError(f"unisono's backend needs torch {oldest} or later, not {version}")
    if (ranks[rank] if ranks else rank) == 0:  # one warning is enough for all ranks
        _warn_if_untried(version)
    config = _asked_for()
    others = sorted({name for name in config.values() if name not in (NAME, *_ALSO_OURS)})
    if others:
        asked = ",".join(f"{device}:{name}" for device, name in config.items())
        raise UnisonoError(
            f'"{asked}": a group of unisono serves tensors of all devices itself, and takes NCCL '
            f'where every rank has a GPU of its own. Ask for "{NAME}", or make the default group '
            f'with "{others[0]}" and one for CPU tensors with new_group(backend="{NAME}")'
        )


@functools.cache
def _warn_if_untried(version: str) -> None:
    if is_untried(version):
        warnings.warn(
            f"torch {version} is newer than any that unisono was tried with (up to "
            f"{format_version(NEWEST_TRIED_TORCH)}): if something fails that worked before, look "
            "for a newer unisono, or install an older torch",
            stacklevel=2,
        )


def _asked_for() -> dict[str, str]:
    """Which backend each device shall have. torch does not tell its backends, but a group of ours
    replaces all others: look at the function that makes the group."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return dict(config.get_device_backend_map()) if config is not None else {}
