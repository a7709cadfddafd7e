"""CUDA tensors of ranks on several hosts: NCCL's, where every rank has a GPU of its own.

With a group's first collective on CUDA tensors the ranks tell each other of their GPUs. Where some
share one, there is no way, and all say so. Messages pass through the CPU's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.transport import Transport

if TYPE_CHECKING:
    from unisono.comm.hosts.hosts_transport import HostsTransport

_DESCRIPTION_BYTES = 1024


def meet_on_gpus(comm: HostsTransport, what: str, device: torch.device) -> Transport:
    """What carries out the collectives of this group on CUDA tensors; all ranks call with their
    first one. Raises ValueError, on all of them, where their GPUs allow no way."""
    from unisono.comm.cuda.routing import NCCL, choose_way, decode_gpu, describe_no_way
    from unisono.comm.over_torch.stateless import connect_stateless

    call = comm.announce(f"{what} on a GPU")
    host = comm.host_names[comm.rank]
    encoded = bytearray(describe_gpu(host, device).encode().ljust(_DESCRIPTION_BYTES))
    mine = torch.frombuffer(encoded, dtype=torch.uint8)
    everyone = list(torch.empty(comm.size, _DESCRIPTION_BYTES, dtype=torch.uint8))
    comm.carry_out(call, lambda: comm.gather_rows(everyone, mine, call), [mine], False)
    gpus = [decode_gpu(row.numpy().tobytes().rstrip()) for row in everyone]
    if choose_way(gpus) != NCCL:
        raise ValueError(describe_no_way(gpus))
    limits_s = comm.timeout_s, comm.timeout_s
    name = f"{comm.name}/{comm.key.hex()}"
    store = comm.links.open_store(comm.timeout_s)
    return connect_stateless("nccl", store, name, comm.rank, comm.size, *limits_s)


def describe_gpu(host: str, device: torch.device) -> Any:
    """What a rank tells of its GPU."""
    from unisono.comm.cuda.routing import RankGpu

    properties = torch.cuda.get_device_properties(device)
    return RankGpu(
        host=host,
        gpu=str(properties.uuid),
        name=properties.name,
        token="",
        refusal="",
    )
