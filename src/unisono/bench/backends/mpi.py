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
        world, here = self.world, self.mpi.IN_PLACE
        if not case.collective.sized:
            return partial(world.Barrier)
        is_root = self.rank == root
        output, input = self.native(buffers.output), self.native(buffers.input)
        op = self._op(case) if case.collective.reduces else None
        match case.collective.name:
            case "all_reduce":
                return partial(world.Allreduce, here, output, op)
            case "all_reduce_async":
                start = world.Iallreduce
                return lambda: start(here, output, op).Wait()
            case "gradients":
                arrays = [self.native(tensor) for tensor in buffers.gradients()]
                return partial(self._reduce_together, arrays, op)
            case "reduce":
                sides = (here, output) if is_root else (input, None)
                return partial(world.Reduce, *sides, op, root)
            case "reduce_scatter":
                return partial(world.Reduce_scatter_block, input, output, op)
            case "broadcast":
                return partial(world.Bcast, output, root)
            case "gather":
                return partial(world.Gather, input, output if is_root else None, root)
            case "scatter":
                return partial(world.Scatter, input if is_root else None, output, root)
            case "all_gather":
                return partial(world.Allgather, input, output)
            case _:  # all_to_all
                return partial(world.Alltoall, input, output)

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
