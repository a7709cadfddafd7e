"""Any process group of torch.distributed: gloo, nccl, and unisono as torch's backend."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported


class ThroughTorch(Backend):
    def __init__(self, name: str, group: Any, device: str = "cpu") -> None:
        self.name, self.group, self.device = name, group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.start_send = partial(dist.isend, group=group)
        self.start_recv = partial(dist.irecv, group=group)
        # torch 2.13 renamed these two and warns about the old names.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def calls(self, case: Case, buffers: Buffers) -> Sequence[Call]:
        if not case.collective.is_collective and self.device != "cpu" and self.name == "gloo":
            raise Unsupported("gloo sends CPU tensors only: a GPU tensor ends the process")
        return super().calls(case, buffers)

    def call(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input, group = buffers.output, buffers.input, self.group
        op = getattr(dist.ReduceOp, case.op.upper())
        is_root = self.rank == root
        match case.collective.name:
            case "all_reduce":
                return partial(dist.all_reduce, output, op, group)
            case "all_reduce_async":
                return lambda: dist.all_reduce(output, op, group, async_op=True).wait()
            case "gradients":
                return partial(_reduce_together, buffers.gradients(), op, group)
            case "reduce":
                return partial(dist.reduce, output, root, op, group)
            case "reduce_scatter":
                return partial(self._scatter, output, input, op, group=group)
            case "broadcast":
                return partial(dist.broadcast, output, root, group)
            case "gather":
                parts = buffers.parts("output", self.size) if is_root else None
                return partial(dist.gather, input, parts, root, group)
            case "scatter":
                parts = buffers.parts("input", self.size) if is_root else None
                return partial(dist.scatter, output, parts, root, group)
            case "all_gather":
                return partial(self._gather, output, input, group=group)
            case "all_to_all":
                return partial(dist.all_to_all_single, output, input, group=group)
            case _:
                return partial(dist.barrier, group)


def _reduce_together(tensors: list[torch.Tensor], op: Any, group: Any) -> None:
    works = [dist.all_reduce(tensor, op, group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
