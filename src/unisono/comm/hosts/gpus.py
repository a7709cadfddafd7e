"""CUDA tensors of ranks on several hosts: NCCL's, where every rank has a GPU of its own.

With a group's first collective on CUDA tensors the ranks tell each other of their GPUs. Where some
share one, there is no way, and all say so. Messages pass through the CPU's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.base import Communicator, Work
from unisono.comm.hosts.messages import HostsMessages

if TYPE_CHECKING:
    from unisono.comm.hosts.communicator import HostsCommunicator

_DESCRIPTION_BYTES = 1024


def with_cuda_tensors(collective: Callable[..., Any]) -> Any:
    """A collective of a group over hosts that takes CUDA tensors as well."""
    name = collective.__name__
    what = name.removeprefix("_run_")

    @functools.wraps(collective)
    def routed(self: HostsCommunicator, *given: Any, **named: Any) -> Any:
        device = _gpu_among(given) or _gpu_among(named.values())
        if device is None:
            return collective(self, *given, **named)
        return getattr(self._gpu_group(what, device), name)(*given, **named)

    return routed


def _gpu_among(values: Any) -> torch.device | None:
    """The GPU of the first tensor that lies on one."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return value.device
        elif isinstance(value, (list, tuple)):
            device = _gpu_among(value)
            if device is not None:
                return device
    return None


def meet_on_gpus(comm: HostsCommunicator, what: str, device: torch.device) -> Communicator:
    """What carries out the collectives of this group on CUDA tensors; all ranks call with their
    first one. Raises ValueError, on all of them, where their GPUs allow no way."""
    from unisono.comm.cuda.routing import NCCL, choose_way, decode_gpu, describe_no_way
    from unisono.comm.over_torch.stateless import StatelessCommunicator

    call = comm._call(f"{what} on a GPU")
    host = comm.host_names[comm.rank]
    encoded = bytearray(describe_gpu(host, device).encode().ljust(_DESCRIPTION_BYTES))
    mine = torch.frombuffer(encoded, dtype=torch.uint8)
    everyone = list(torch.empty(comm.size, _DESCRIPTION_BYTES, dtype=torch.uint8))
    comm._run(call, lambda: comm._all_gather_rows(everyone, mine, call), [mine], False)
    gpus = [decode_gpu(row.numpy().tobytes().rstrip()) for row in everyone]
    if choose_way(gpus) != NCCL:
        raise ValueError(f"{what} on group {comm.name}: {describe_no_way(gpus)}")
    limits_s = comm.timeout_s, comm.timeout_s
    name = f"{comm.name}/{comm.key.hex()}"
    store = comm.links.open_store(comm.timeout_s)
    return StatelessCommunicator("nccl", store, name, comm.rank, comm.size, *limits_s)


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


class GpuHostsMessages(HostsMessages):
    """Messages of CUDA tensors as well. A message between a CUDA and a CPU tensor is as good as
    any."""

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        super().send(self._fetched(tensor), dst, tag)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        return super().isend(self._fetched(tensor), dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        if _gpu_among([tensor]) is None:
            return super().recv(tensor, src, tag)
        from unisono.comm.cuda.messages import deliver, make_room

        host = make_room(f"recv on group {self.name}", tensor)
        source = super().recv(host, src, tag)
        deliver(tensor, host)
        return source

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Work:
        if _gpu_among([tensor]) is None:
            return super().irecv(tensor, src, tag)
        from unisono.comm.cuda.messages import ArrivingWork, make_room

        host = make_room(f"recv on group {self.name}", tensor)
        return ArrivingWork(super().irecv(host, src, tag), tensor, host)

    def _fetched(self, tensor: Any) -> Any:
        if _gpu_among([tensor]) is None:
            return tensor
        from unisono.comm.cuda.messages import fetch

        return fetch(f"send on group {self.name}", tensor)
