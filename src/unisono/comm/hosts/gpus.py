"""CUDA tensors of ranks on several hosts: NCCL moves them if every rank has its own GPU.

At a group's first collective on CUDA tensors the ranks exchange which GPUs they have. If some share
one, all refuse the call. Messages go through CPU memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unisono.comm.engine.numbers import Operation
from unisono.comm.transport import Transport

if TYPE_CHECKING:
    from unisono.comm.cuda.routing import RankGpu
    from unisono.comm.hosts.hosts_transport import HostsTransport


def meet_on_gpus(comm: HostsTransport, device: torch.device, operation: Operation) -> Transport:
    """The transport for this group's collectives on CUDA tensors; all ranks call it with their
    first one. Raises ValueError, on all of them, if their GPUs allow none."""
    from unisono.comm.cuda.first_call import exchange_gpus
    from unisono.comm.cuda.routing import NCCL, choose_way, describe_no_way
    from unisono.comm.over_torch.stateless import connect_stateless

    mine = describe_gpu(comm.host_names[comm.rank], device)
    gpus = exchange_gpus(comm, mine, operation)
    if choose_way(gpus) != NCCL:
        raise ValueError(describe_no_way(gpus))
    limits_s = comm.timeout_s, comm.timeout_s
    name = f"{comm.name}/{comm.key:x}"
    store = comm.links.open_store(comm.timeout_s)
    return connect_stateless("nccl", store, name, comm.rank, comm.size, *limits_s)


def describe_gpu(host: str, device: torch.device) -> RankGpu:
    """What a rank tells the others about its GPU."""
    from unisono.comm.cuda.routing import RankGpu

    properties = torch.cuda.get_device_properties(device)
    return RankGpu(
        host=host,
        gpu=str(properties.uuid),
        name=properties.name,
        token="",
        refusal="",
    )
