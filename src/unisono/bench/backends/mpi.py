"""MPI through mpi4py, on the memory of the same tensors, if mpirun has started the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported

if TYPE_CHECKING:
    import torch

_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
_OPS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}


class Mpi(Backend):
    """The upper-case methods of an mpi4py communicator, which take buffers."""

    name = "mpi"

    def __init__(self, world: Any) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, world
        self.rank, self.size = world.rank, world.size
        self.start_send, self.start_recv = world.Isend, world.Irecv

    def native(self, tensor: torch.Tensor) -> Any:
        if str(tensor.dtype) in ("torch.float16", "torch.bfloat16"):
            raise Unsupported(f"MPI has no {str(tensor.dtype).removeprefix('torch.')}")
        return tensor.numpy()

    def call(self, case: Case, buffers: Buffers, root: int) -> Call:
        world, start, here = self.world, self.world.Iallreduce, self.mpi.IN_PLACE
        if case.collective.is_empty:
            return partial(world.Barrier)
        is_root = self.rank == root
        output, input = self.native(buffers.output), self.native(buffers.input)
        op = self._op(case) if case.collective.reduces else None
        sides = (here, output) if is_root else (input, None)
        arrays = [self.native(tensor) for tensor in buffers.gradients()]
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (world.Allreduce, here, output, op),
            "all_reduce_async": (lambda: start(here, output, op).Wait(),),
            "gradients": (self._reduce_together, arrays, op),
            "reduce": (world.Reduce, *sides, op, root),
            "reduce_scatter": (world.Reduce_scatter_block, input, output, op),
            "broadcast": (world.Bcast, output, root),
            "gather": (world.Gather, input, output if is_root else None, root),
            "scatter": (world.Scatter, input if is_root else None, output, root),
            "all_gather": (world.Allgather, input, output),
            "all_to_all": (world.Alltoall, input, output),
        }
        call, *arguments = calls[case.collective.name]
        return partial(call, *arguments)

    def _op(self, case: Case) -> Any:
        if case.op not in _OPS:
            raise Unsupported(f"MPI has no {case.op}")
        return getattr(self.mpi, _OPS[case.op])

    def _reduce_together(self, arrays: list[Any], op: Any) -> None:
        start, here = self.world.Iallreduce, self.mpi.IN_PLACE
        self.mpi.Request.Waitall([start(here, array, op) for array in arrays])

    def wait_for(self, handles: Sequence[Any]) -> None:
        if len(handles) == 1:
            handles[0].Wait()
        else:
            self.mpi.Request.Waitall(list(handles))
