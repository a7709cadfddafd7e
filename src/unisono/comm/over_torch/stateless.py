"""Groups outside torch's world, of which there is one per process: of processes that share only
a store, such as a trainer and the workers of an inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.meeting.board import answer_within
from unisono.comm.over_torch.torch_transport import OverTorch
from unisono.errors import RendezvousError, UnisonoError

_c10d: Any = dist  # its stubs lack some of these names


def connect_stateless(
    backend: str,
    store: Any,
    name: str,
    rank: int,
    size: int,
    timeout_s: float,
    join_timeout_s: float,
    *,
    address: str = "",
    global_ranks: tuple[int, ...] | None = None,
) -> OverTorch:
    """A group of gloo, or of nccl with gloo for CPU tensors, over a store. All members call it,
    with the same name, which no other group on this store may have had, and have
    `join_timeout_s` to connect; gloo listens at `address`, if given."""

    def remake(parent: OverTorch, members: Sequence[int], name: str) -> OverTorch:
        own, limit_s = members.index(parent.rank), parent.timeout_s
        join_s = min(limit_s, join_timeout_s)
        return connect_stateless(
            *(backend, store, name, own, len(members), limit_s, join_s),
            address=address,
            global_ranks=global_ranks and tuple(global_ranks[rank] for rank in members),
        )

    own = _c10d.PrefixStore(name, store)
    try:
        group = _connect(backend, own, rank, size, timedelta(seconds=join_timeout_s), address)
        group._set_group_name(name)
        made = OverTorch(group, owns=True, remake=remake)
        made.global_ranks = global_ranks
        made.timeout_s = join_timeout_s
        made.barrier(None, False)  # leaving earlier would break connections that others make
    except UnisonoError as error:
        raise RendezvousError(f"group {name} could not be made: {error}") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RendezvousError(f"group {name} could not be made: {reason}") from error
    made.timeout_s = timeout_s
    return made


def check_backend(backend: str) -> None:
    if backend not in ("gloo", "nccl"):
        raise UnisonoError(f"{backend} does not support stateless groups: use gloo or nccl")
    if backend == "nccl" and not (_c10d.is_nccl_available() and torch.cuda.is_available()):
        raise UnisonoError("nccl needs a torch with CUDA, and a GPU for every rank")


def _connect(
    backend: str, store: Any, rank: int, size: int, timeout: timedelta, address: str
) -> Any:
    check_backend(backend)
    kinds = _c10d.ProcessGroup.BackendType
    group = _c10d.ProcessGroup(store, rank, size)
    own, limit_s = _c10d.PrefixStore("cpu", store), timeout.total_seconds() + 1.0
    how: Any = timeout
    if address:
        device = _c10d.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        how = _c10d.ProcessGroupGloo._Options()
        how._timeout, how._devices = timeout, [device]
    gloo = answer_within(limit_s, lambda: _c10d.ProcessGroupGloo(own, rank, size, how))
    gloo._set_sequence_number_for_group()
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if backend == "nccl":
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("cuda", store), rank, size, options)
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group
