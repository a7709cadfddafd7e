"""MPI through mpi4py, on the memory of the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported, after_copy

if TYPE_CHECKING:
    import torch

_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
_OPS |= {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}


class Mpi(Backend):
    """Upper-case methods of an mpi4py communicator: those that take buffers."""

    name = "mpi"

    def __init__(self, world: Any) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, world
        self.rank, self.size = world.rank, world.size

    def native(self, tensor: torch.Tensor) -> Any:
        if str(tensor.dtype) in ("torch.float16", "torch.bfloat16"):
            raise Unsupported(f"MPI has no {str(tensor.dtype).removeprefix('torch.')}")
        return tensor.numpy()

    def _op(self, case: Case) -> Any:
        if case.op not in _OPS:
            raise Unsupported(f"MPI has no {case.op}")
        return getattr(self.mpi, _OPS[case.op])

    def _sides(self, case: Case, buffers: Buffers) -> tuple[Any, Any]:
        """(output, input), where the input may be MPI's constant for "it is in the output"."""
        output = self.native(buffers.output)
        return output, self.mpi.IN_PLACE if case.placement == "in" else self.native(buffers.input)

    def all_reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input = self._sides(case, buffers)
        return partial(self.world.Allreduce, input, output, self._op(case))

    def all_reduce_async(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, op = self.native(buffers.output), self._op(case)
        start, here = self.world.Iallreduce, self.mpi.IN_PLACE
        return lambda: start(here, output, op).Wait()

    def all_gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input = self._sides(case, buffers)
        return partial(self.world.Allgather, input, output)

    def reduce_scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        if case.placement == "in":
            raise Unsupported("MPI leaves an in-place result at the front of the buffer")
        output, input = self._sides(case, buffers)
        return partial(self.world.Reduce_scatter_block, input, output, self._op(case))

    def broadcast(self, case: Case, buffers: Buffers, root: int) -> Call:
        call = partial(self.world.Bcast, self.native(buffers.output), root)
        return after_copy(case, buffers, call, self.rank == root)

    def reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input = self._sides(case, buffers)
        if self.rank != root:
            input, output = self.native(buffers.input), None
        return partial(self.world.Reduce, input, output, self._op(case), root)

    def gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input = self._sides(case, buffers)
        if self.rank != root:
            input, output = self.native(buffers.input), None
        return partial(self.world.Gather, input, output, root)

    def scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        input: Any = self.native(buffers.input)
        output: Any = self.native(buffers.output)
        if self.rank != root:
            input = None
        elif case.placement == "in":
            output = self.mpi.IN_PLACE
        return partial(self.world.Scatter, input, output, root)

    def all_to_all(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input = self._sides(case, buffers)
        return partial(self.world.Alltoall, input, output)

    def barrier(self, case: Case, buffers: Buffers, root: int) -> Call:
        return partial(self.world.Barrier)

    def gradients(self, case: Case, buffers: Buffers, root: int) -> Call:
        """Every tensor's all_reduce is begun, then all are waited for."""
        arrays, op = [self.native(tensor) for tensor in buffers.gradients()], self._op(case)
        start, here, wait = self.world.Iallreduce, self.mpi.IN_PLACE, self.mpi.Request.Waitall

        def reduce_all() -> None:
            wait([start(here, array, op) for array in arrays])

        return reduce_all

    def start_send(self, tensor: Any, peer: int) -> Any:
        return self.world.Isend(tensor, peer)

    def start_recv(self, tensor: Any, peer: int) -> Any:
        return self.world.Irecv(tensor, peer)

    def wait_for(self, handles: Sequence[Any]) -> None:
        if len(handles) == 1:
            handles[0].Wait()
        else:
            self.mpi.Request.Waitall(list(handles))
