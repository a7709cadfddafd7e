"""vLLM's CpuCommunicator over unisono: shared memory on one host, UCX between hosts."""

from __future__ import annotations

import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from unisono.comm.communicator import Communicator
from unisono.processes import boot_id, namespace
from unisono.serving.collectives import ServingCollectives

_MEETING_S = 300.0
_THE_SAME = (
    *("all_reduce", "all_gather", "gather", "reduce_scatter", "reduce_scatterv"),
    *("send_tensor_dict", "recv_tensor_dict"),
)
"""What vLLM calls as `ServingCollectives` has it."""


class UnisonoCpuCommunicator(CpuCommunicator):  # type: ignore[misc]
    """One worker's communicator of one of vLLM's groups (tp, pp, ep, dp, ...)."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        comm = _join(self.cpu_group, self.rank_in_group, self.world_size, self.unique_name)
        comm.name = self.unique_name  # compiled models, which vLLM caches, call it by this name
        self._comm, self._collectives = comm, ServingCollectives(comm)
        self.supports_tensor_dict = True
        for name in _THE_SAME:
            setattr(self, name, getattr(self._collectives, name))

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False  # so that vLLM makes no shared memory of its own

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        if dim != 0:
            raise NotImplementedError(f"all_gatherv along dim {dim}: only dim 0 is used by vLLM")
        if isinstance(input_, list):
            return [self._collectives.all_gatherv(tensor, sizes) for tensor in input_]
        return self._collectives.all_gatherv(input_, sizes)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        self._comm.send(tensor, self._comm.next if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        self._comm.recv(tensor, self._comm.prev if src is None else src)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self._comm.broadcast(tensor, src)
        return tensor

    def destroy(self) -> None:
        self._comm.close()


def _join(group: dist.ProcessGroup, rank: int, size: int, unique_name: str) -> Communicator:
    """Meet the other workers of a group; on several hosts in the store of their torch world."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, _where(), group)
    invitation = [f"vllm {unique_name} {uuid.uuid4().hex}"]
    dist.broadcast_object_list(invitation, group=group, group_src=0)
    store = distributed_c10d._get_default_store() if len(set(everyone)) > 1 else None
    return Communicator.join(invitation[0], rank, size, store, join_timeout_s=_MEETING_S)


def _where() -> tuple[str, int]:
    """What processes of one host have in common that can meet without a store."""
    return boot_id(), namespace("net")
