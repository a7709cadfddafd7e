"""How a world starts: the rendezvous, what ranks tell each other, and the choice of a backend."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from unisono import variables
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone, connect, connect_on_host
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.deadline import Deadline, meeting_timeout_s
from unisono.comm.meeting.identity import identify_host
from unisono.comm.meeting.meeting_points import rendezvous_of_parent
from unisono.comm.meeting.roster import gather
from unisono.comm.over_torch.stores import store_at
from unisono.comm.routing import fresh_part
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import DEFAULT_TIMEOUT_S
from unisono.errors import RendezvousError, UnisonoError, name_number, name_ranks
from unisono.failures import shorten_uncaught
from unisono.torch_support import require_torch
from unisono.world.environment import RankInfo, find_master
from unisono.world.torch_store import store_of

_log = logging.getLogger("unisono")


@dataclass(frozen=True)
class StartedWorld:
    """A world that has started: what moves its data, why, and how it ends."""

    comm: Communicator
    reason: str
    end: Callable[[], None]


@dataclass(frozen=True)
class RankDescription:
    """What a rank tells the others; `host_id` is equal on ranks that can share memory."""

    host: str
    host_id: str
    has_torch: bool
    gpu: str


def choose_backend(everyone: Sequence[RankDescription]) -> tuple[str, str]:
    gpus = [rank.gpu for rank in everyone]
    if all(gpus) and len(set(gpus)) == len(gpus):
        return "nccl", "every rank has its own GPU"
    lack = "not every rank has its own GPU" if any(gpus) else "no rank has a GPU"
    hosts = {rank.host_id for rank in everyone}
    if len(hosts) > 1:
        if variables.HOSTS.read() == "gloo":
            return "unisono", f"{lack}: gloo on {len(hosts)} hosts, as UNISONO_HOSTS asks"
        return "unisono", f"{lack}: shared memory inside {len(hosts)} hosts, UCX between them"
    return "unisono", f"{lack}, and all are on one machine"


def start(
    info: RankInfo, rendezvous: Any, backend: str, limit_s: float | None, with_torch: bool | None
) -> StartedWorld:
    """Meet the other ranks and make the world's Communicator, with the same backend on every rank.
    `limit_s` limits the rendezvous and then each call; None means the defaults."""
    shorten_uncaught()
    timeout_s = DEFAULT_TIMEOUT_S if limit_s is None else limit_s
    with _meeting(info, rendezvous, meeting_timeout_s(limit_s)) as (where, deadline):
        store = where if hasattr(where, "get") and hasattr(where, "set") else None
        if backend == "nccl":
            require_torch("the backend nccl")
            importlib.import_module("torch")  # a rank without it would report no GPU
        mine = describe_this_rank(info)
        comm: Communicator | None = None
        everyone = [mine]
        board = None if store is None else Board(store, deadline)
        if info.size > 1 and board is None:
            here = FileBoard(where, deadline=deadline)
            how: Any = {"timeout_s": timeout_s, "payload": json.dumps(vars(mine))}
            comm = connect_on_host(here, info.rank, info.size, **how)
            assert isinstance(comm.transport, SharedMemory)
            payloads = comm.transport.payloads
            everyone = [RankDescription(**json.loads(payload)) for payload in payloads]
        elif info.size > 1 and board is not None:
            told = gather(board, "ranks", info.rank, info.size, {"is": vars(mine)})
            everyone = [RankDescription(**theirs["is"]) for theirs in told]
    reason = "it was asked for"
    if backend == "auto":
        backend, reason = choose_backend(everyone)
    if info.rank == 0:
        _log.info("backend %s for %s: %s", backend, name_number(info.size, "rank"), reason)
    if backend == "unisono":
        if comm is None and info.size == 1:
            comm = alone(timeout_s=timeout_s)
        if comm is None and board is not None:
            comm = connect(board, info.rank, info.size, timeout_s=timeout_s)
        assert comm is not None
        wants_torch = any(rank.has_torch for rank in everyone) if with_torch is None else with_torch
        return start_over(comm, reason, wants_torch, store)
    return _start_over_torch(backend, comm, store, info, timeout_s, reason, everyone)


def _check_gpus(everyone: Sequence[RankDescription]) -> None:
    """Raise on every rank if one of them has no GPU, which nccl needs."""
    lacking = [rank for rank, theirs in enumerate(everyone) if not theirs.gpu]
    if lacking:
        raise UnisonoError(
            "nccl needs a GPU for every rank, but torch finds none on "
            f'{name_ranks(lacking)} of {len(everyone)}: take "unisono", '
            '"gloo", or "auto", which chooses what fits'
        )


def describe_this_rank(info: RankInfo) -> RankDescription:
    host_id = ""
    with contextlib.suppress(OSError):  # not Linux: shared memory is not available
        host_id = identify_host()
    torch = sys.modules.get("torch")
    return RankDescription(
        socket.gethostname(), host_id, torch is not None, _gpu(torch, info.local_rank)
    )


def device_index(torch: Any, local_rank: int) -> int:
    """The GPU of a rank: its local rank, modulo the number of visible GPUs."""
    return int(local_rank % torch.cuda.device_count())


def _gpu(torch: Any, local_rank: int) -> str:
    if torch is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    properties = torch.cuda.get_device_properties(device_index(torch, local_rank))
    return str(properties.uuid)


# -- meeting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _meeting(info: RankInfo, rendezvous: Any, timeout_s: float) -> Iterator[tuple[Any, Deadline]]:
    """Where the ranks meet, and until when."""
    if rendezvous is not None or info.size == 1:
        yield rendezvous, Deadline(timeout_s)
    elif info.launcher == "torchrun" or find_master() is not None:
        require_torch("meeting in a store at MASTER_ADDR")
        import torch.distributed  # noqa: F401 - takes seconds: before the deadline starts

        deadline = Deadline(timeout_s)
        yield _store_at_master(info, deadline), deadline
    elif info.launcher in ("srun", "mpirun") and info.local_size != info.size:
        raise RendezvousError(
            f"{info.launcher} started {info.size} ranks, not all of them on this machine: set "
            "MASTER_ADDR and MASTER_PORT to a free port of rank 0's machine"
        )
    elif info.launcher == "unisono":
        raise ValueError(
            f"{info.size} ranks need a rendezvous: a path, a descriptor or a torch Store"
        )
    else:
        with rendezvous_of_parent(info.rank, info.job) as path:
            yield path, Deadline(timeout_s)


_starts = itertools.count()


def _store_at_master(info: RankInfo, deadline: Deadline) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 hosts unless torchrun does. Each world
    has its own prefix, from a counter that all ranks keep."""
    where = find_master()
    if where is None:
        raise RendezvousError(
            f"RANK and WORLD_SIZE say that this is rank {info.rank} of {info.size}, but not "
            "where the ranks meet: set MASTER_ADDR and MASTER_PORT, too"
        )
    key = (*where, info.rank, info.size)
    if key not in _kept_stores:
        _kept_stores[key] = store_at(*key, timeout_s=deadline.left_s())
    board = Board(_kept_stores[key], deadline).part(f"unisono/start/{next(_starts)}")
    return fresh_part(board, info.rank, info.size).torch_store()


_kept_stores: dict[tuple[str, str, int, int], Any] = {}
"""Kept for the life of the process: a rank that starts the next world while rank 0 still ends the
last one must not find a store that is about to close."""


# -- torch.distributed ---------------------------------------------------------------------------


def start_over(
    comm: Communicator, reason: str, with_torch: bool, store: Any = None
) -> StartedWorld:
    """The world over a Communicator of ours; with `with_torch` also torch's default process
    group."""
    if not with_torch:
        return StartedWorld(comm, reason, comm.close)
    require_torch("torch's default process group (with_torch=True)")
    import torch.distributed as dist

    from unisono.torch_backend.autoload import register
    from unisono.torch_backend.creation import make_default_group

    register()
    with contextlib.ExitStack() as stack:
        stack.callback(comm.close)
        if store is None:
            store = stack.enter_context(store_of(comm))
        stack.callback(_destroy_torch_groups, dist)
        make_default_group(comm, dist.PrefixStore("unisono/torch", store))  # type: ignore[attr-defined]
        return StartedWorld(comm, reason, stack.pop_all().close)


def _start_over_torch(
    backend: str,
    native: Communicator | None,
    store: Any,
    info: RankInfo,
    timeout_s: float,
    reason: str,
    everyone: Sequence[RankDescription],
) -> StartedWorld:
    require_torch(f"the backend {backend}")
    import torch
    import torch.distributed as dist

    from unisono.comm.over_torch.torch_transport import OverTorch
    from unisono.torch_backend.autoload import backend_problem

    with contextlib.ExitStack() as stack:
        if native is not None:
            stack.callback(native.close)
        problem = backend_problem(backend)
        if problem:
            raise UnisonoError(problem)
        if backend == "nccl":
            _check_gpus(everyone)
            torch.cuda.set_device(device_index(torch, info.local_rank))
        if native is None:
            store = store or dist.HashStore()  # type: ignore[attr-defined]
        else:
            store = store or stack.enter_context(store_of(native))
            native.close()
        both = "cpu:gloo,cuda:nccl"  # CPU tensors work, too
        dist.init_process_group(
            both if backend == "nccl" and dist.is_gloo_available() else backend,
            store=dist.PrefixStore("unisono/torch", store),  # type: ignore[attr-defined]
            rank=info.rank,
            world_size=info.size,
            timeout=timedelta(seconds=timeout_s),
        )
        stack.callback(_destroy_torch_groups, dist)
        comm = Communicator(OverTorch(dist.group.WORLD))
        stack.callback(comm.close)
        return StartedWorld(comm, reason, stack.pop_all().close)


def _destroy_torch_groups(dist: Any) -> None:
    """Destroy torch's groups unless the program already did."""
    if dist.is_initialized():
        dist.destroy_process_group()
