"""The world: the Communicator of all ranks of this program, and who we are in it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from unisono.comm.base import DEFAULT_TIMEOUT_S, Communicator
from unisono.comm.native import NativeCommunicator
from unisono.comm.rendezvous import Exchange, FileExchange, StoreExchange
from unisono.comm.siblings import meeting_of_siblings
from unisono.comm.solo import SoloCommunicator
from unisono.errors import UnisonoError

_world: Communicator | None = None


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | os.PathLike[str] | int | Any | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Communicator:
    """Join the ranks of this program and return the Communicator of all of them.

    Without arguments the place comes from the environment: UNISONO_RANK, UNISONO_SIZE and
    UNISONO_RENDEZVOUS, which `unisono.launch` sets, or torchrun's variables; in a program that
    nobody launched the world is this one process. `rendezvous` is a path that all ranks know
    and may write to, an inherited descriptor of a file, or a torch Store.

    Raises RendezvousError if the ranks do not find each other or are not on one machine.
    """
    global _world
    if _world is not None:
        raise UnisonoError("unisono is already initialised: call unisono.shutdown() first")
    if rank is None and size is None:
        rank, size, rendezvous = _from_environment(rendezvous)
    if rank is None or size is None:
        raise ValueError("rank and size go together: give both or neither")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} does not lie in a world of {size}")
    if size == 1:
        _world = SoloCommunicator(timeout_s=timeout_s)
    elif rendezvous is None:
        raise ValueError(f"{size} ranks need a rendezvous: a path, a descriptor or a torch Store")
    else:
        exchange = _exchange(rendezvous)
        _world = NativeCommunicator.connect(exchange, rank, size, timeout_s=timeout_s)
    return _world


def setup(rank: int, world_size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Communicator:
    """`init` for programs that start their ranks themselves, as torch.multiprocessing.spawn does.

    The ranks meet in the store at MASTER_ADDR and MASTER_PORT where these are set, and otherwise
    without a port: they know each other by the process that started them all.

    Raises RendezvousError if the ranks do not find each other or are not on one machine.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not lie in a world of {world_size}")
    if "UNISONO_RANK" in os.environ:
        launched = (int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"]))
        if launched != (rank, world_size):
            raise ValueError(
                f"this process was launched as rank {launched[0]} of {launched[1]}, and cannot be "
                f"rank {rank} of {world_size}"
            )
        return init(timeout_s=timeout_s)
    if world_size == 1:
        return init(rank=0, size=1, timeout_s=timeout_s)
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        store = _store_from_environment(rank, world_size)
        return init(rank=rank, size=world_size, rendezvous=store, timeout_s=timeout_s)
    with meeting_of_siblings(rank) as path:
        return init(rank=rank, size=world_size, rendezvous=path, timeout_s=timeout_s)


def shutdown() -> None:
    """Leave the world. Does nothing where `init` has not been called."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()


def get_world() -> Communicator:
    """The Communicator of all ranks."""
    if _world is None:
        raise UnisonoError("unisono is not initialised: call unisono.init() first")
    return _world


def resolve(group: Any = None) -> Communicator:
    """What moves the data of `group`: a Communicator (itself), a torch process group, or None.

    None is the world; where there is none, torch's default group; and in a program of one process
    that has started nothing, a Communicator of one rank. In a process that was launched as one of
    several and has not met the others, that would give wrong results: UnisonoError.
    """
    if group is None and _world is not None:
        return _world
    if isinstance(group, Communicator):
        return group
    if "torch" in sys.modules:
        from unisono.comm.backend import communicator_of

        comm = communicator_of(group)
        if comm is not None:
            return comm
    if group is not None:
        raise UnisonoError(f"{group!r} is no group that this process is a member of")
    size = _from_environment_size()
    if size > 1:
        raise UnisonoError(
            f"this process was launched as one of {size} ranks: call unisono.init() first"
        )
    return _alone()


@functools.cache
def _alone() -> Communicator:
    return SoloCommunicator()


def get_rank() -> int:
    """This process's rank in the world; 0 where there is none."""
    return 0 if _world is None else _world.rank


def get_world_size() -> int:
    """How many ranks the world has; 1 where there is none."""
    return 1 if _world is None else _world.size


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def barrier() -> None:
    """Return once every rank has called it; at once where there is no world."""
    if _world is not None:
        _world.barrier()


def monitored_barrier(
    group: Any = None, timeout_s: float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier with a time limit of its own: `torch.distributed.monitored_barrier`, which torch
    keeps to gloo.

    `group` is a Communicator or a torch process group of ours; None means the world, or torch's
    default group where there is no world. `timeout_s` is the group's own limit unless it is given.
    `wait_all_ranks` is there for torch's sake: the error always names every rank that is missing.
    A process that is not a member of the group, or has none, returns at once.

    Raises CollectiveTimeout, on every rank that came, with `missing` and where those ranks are.
    """
    comm = group if isinstance(group, Communicator) else None
    if group is None:
        comm = _world
    if comm is None and "torch" in sys.modules:
        from unisono.comm.backend import communicator_of

        comm = communicator_of(group)
    if comm is not None:
        comm.barrier(timeout_s=timeout_s)


def _from_environment(rendezvous: Any) -> tuple[int, int, Any]:
    environment = os.environ
    if "UNISONO_RANK" in environment:
        where: Any = environment.get("UNISONO_RENDEZVOUS")
        if where is not None and where.startswith("fd:"):
            where = int(where.removeprefix("fd:"))
        rank, size = int(environment["UNISONO_RANK"]), int(environment["UNISONO_SIZE"])
        return rank, size, where if rendezvous is None else rendezvous
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if rendezvous is None and size > 1:
            rendezvous = _store_from_environment(rank, size)
        return rank, size, rendezvous
    return 0, 1, None


def _from_environment_size() -> int:
    """How many ranks this process was launched as one of."""
    for name in ("UNISONO_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


def _store_from_environment(rank: int, size: int) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 hosts unless torchrun does."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", rank, size)))
    return store


def _exchange(rendezvous: Any) -> Exchange:
    if isinstance(rendezvous, (str, os.PathLike, int)):
        return FileExchange(rendezvous)
    return StoreExchange(rendezvous)
