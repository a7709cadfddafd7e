"""Any process group of torch.distributed: gloo, nccl, and unisono as torch's backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported, after_copy


class ThroughTorch(Backend):
    """The functions of torch.distributed on one group."""

    def __init__(self, name: str, group: Any, device: str = "cpu") -> None:
        import torch.distributed as dist

        self.name, self.group, self.device = name, group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # torch 2.13 renamed these two and warns about the old names.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def _op(self, case: Case) -> Any:
        import torch.distributed as dist

        return getattr(dist.ReduceOp, case.op.upper())

    def all_reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        call = partial(dist.all_reduce, buffers.output, self._op(case), self.group)
        return after_copy(case, buffers, call)

    def all_reduce_async(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        output, op, group = buffers.output, self._op(case), self.group
        return lambda: dist.all_reduce(output, op, group, async_op=True).wait()

    def all_gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        return partial(self._gather, buffers.output, buffers.input, group=self.group)

    def reduce_scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        op = self._op(case)
        return partial(self._scatter, buffers.output, buffers.input, op, group=self.group)

    def broadcast(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        call = partial(dist.broadcast, buffers.output, root, self.group)
        return after_copy(case, buffers, call, self.rank == root)

    def reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        call = partial(dist.reduce, buffers.output, root, self._op(case), self.group)
        return after_copy(case, buffers, call)

    def gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        parts = buffers.parts("output", self.size) if self.rank == root else None
        return partial(dist.gather, buffers.input, parts, root, self.group)

    def scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        parts = buffers.parts("input", self.size) if self.rank == root else None
        return partial(dist.scatter, buffers.output, parts, root, self.group)

    def all_to_all(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        if case.placement == "in":
            raise Unsupported("torch's all_to_all needs two tensors")
        return partial(dist.all_to_all_single, buffers.output, buffers.input, group=self.group)

    def barrier(self, case: Case, buffers: Buffers, root: int) -> Call:
        import torch.distributed as dist

        return partial(dist.barrier, self.group)

    def gradients(self, case: Case, buffers: Buffers, root: int) -> Call:
        """Every tensor's all_reduce is begun, then all are waited for."""
        import torch.distributed as dist

        tensors, op, group = buffers.gradients(), self._op(case), self.group

        def reduce_all() -> None:
            works = [dist.all_reduce(tensor, op, group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()

        return reduce_all

    def start_send(self, tensor: Any, peer: int) -> Any:
        import torch.distributed as dist

        return dist.isend(tensor, peer, self.group)

    def start_recv(self, tensor: Any, peer: int) -> Any:
        import torch.distributed as dist

        return dist.irecv(tensor, peer, self.group)

    def wait_for(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.wait()

    def synchronise(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)
