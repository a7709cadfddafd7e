"""The all_reduce of CUDA tensors, the call that counts: as little as possible around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
)
from unisono.comm.base import (
    REDUCTIONS,
    Op,
    PremulSum,
    Work,
    dtype_name,
)
from unisono.comm.cuda.calls import GpuCalls, is_capturing
from unisono.comm.cuda.conducting import CONDUCTOR, Reduce
from unisono.comm.cuda.regions import RankMemory, decode_memory, encode_memory
from unisono.comm.cuda.shared_gpu import STAGED_BYTES, SharedGpu
from unisono.comm.engine import GPU_MARK, Operation, Status
from unisono.comm.rows import row_of, write_back
from unisono.comm.shared_memory.engine_calls import REDUCTION_NUMBERS

_ALL_REDUCE = Operation.ALL_REDUCE


class GpuAllReduce(GpuCalls):
    """One tensor goes a short way: the engine's own comparison is its meeting."""

    def all_reduce(
        self, tensor: Any, op: Op = "sum", *, async_op: bool = False, algorithm: Any = None
    ) -> Work | None:
        group = self._ready(_ALL_REDUCE, tensor)
        if group is not self:
            return group.all_reduce(tensor, op, async_op=async_op)  # type: ignore[arg-type]
        shared = self._shared
        if shared and isinstance(tensor, torch.Tensor) and 0 < tensor.nbytes <= STAGED_BYTES:
            return self._all_reduce_small(tensor, op, async_op)
        if shared and shared.orchestra and isinstance(tensor, torch.Tensor) and tensor.numel():
            return self._all_reduce_large(shared, tensor, op, async_op)
        return self._reduce("all_reduce", tensor, None, op, async_op)

    def _all_reduce_small(self, tensor: torch.Tensor, op: Op, async_op: bool) -> Work | None:
        """One small tensor: the engine's own check is enough, there is no other meeting."""
        if (
            async_op
            or type(op) is not str
            or op not in REDUCTION_NUMBERS
            or not tensor.is_contiguous()
            or tensor.device != self._device
            or tensor.is_neg()
            or tensor.is_conj()
            or is_capturing()
            or self._of_backward
        ):
            return self._all_reduce_small_anyhow(tensor, op, async_op)
        shared = self._shared
        assert shared is not None
        with self._lock:
            shared.staging.exchange(tensor, self._stream(), self._combiner(op))
        return None

    def _all_reduce_small_anyhow(self, tensor: torch.Tensor, op: Op, async_op: bool) -> Work | None:
        """The same for a tensor of any layout, as a work too: ranks may differ in these."""
        self._tensors("all_reduce", tensor, True)
        self._check_op("all_reduce", op, [tensor])
        shared = self._shared
        assert shared is not None

        def job() -> None:
            row = row_of(tensor)
            shared.staging.exchange(row, self._stream(), self._combiner(op))
            write_back(tensor, row)

        call = AnnouncedCall("all_reduce")
        return self._run(call, job, [tensor], async_op, leaves_record=True)

    def _combiner(self, op: Op) -> Callable[[torch.Tensor], None]:
        """An all_reduce in pinned memory."""
        combiner = self._combiners.get(op)
        if combiner is None:
            combiner = self._combiners[op] = self._make_combiner(op)
        return combiner

    def _make_combiner(self, op: Op) -> Callable[[torch.Tensor], None]:
        comm = self._comm
        number, factor = engine_reduction(op)
        rest = GPU_MARK, number, factor, False, None

        def combine(host: torch.Tensor) -> None:
            status = comm._native_run(_ALL_REDUCE, host, host, *rest)
            if status:
                comm._fail(status, _ALL_REDUCE, number, host)

        return combine

    def _all_reduce_large(
        self, shared: SharedGpu, tensor: torch.Tensor, op: Op, async_op: bool
    ) -> Work | None:
        """One large tensor: the engine compares the calls, and a region per rank is told."""
        if isinstance(op, PremulSum):  # whose factor the engine would not compare
            return self._reduce("all_reduce", tensor, None, op, async_op)
        self._tensors("all_reduce", tensor, True)
        self._check_op("all_reduce", op, [tensor])
        number, factor = engine_reduction(op)
        dtype = dtype_name(tensor)
        size = tensor.nbytes
        group = self._comm._group
        described = _ALL_REDUCE, number, GPU_MARK, dtype_code(tensor.dtype), size
        everyone = [(rank, 0, 0) for rank in range(self.size)]
        task = Reduce(kernel_reduction(op), factor, dtype, everyone, everyone, size)
        call = AnnouncedCall("all_reduce")

        def job() -> None:
            row = row_of(tensor)
            stream = self._stream()
            record = group.record_open(*described, group.calls + 1)
            assert shared.orchestra is not None
            shared.orchestra.arrive(stream)
            status = group.check(*described, record)
            if status:
                self._comm._fail(status, _ALL_REDUCE, number, tensor)
            status = Status.ABORTED
            group.record_cover(True)  # what follows are parts of this call
            try:
                memory = self._tell_regions(call, shared, row)
                if not self._conducted(call, shared, lambda: [task], memory, stream):
                    shared.staging.start(stream)
                    self._reduce_row_staged(shared, row, None, call, op)
                status = Status.OK
            finally:
                group.record_cover(False)
                group.record_end(record, status)
            write_back(tensor, row)

        return self._run(call, job, [tensor], async_op, leaves_record=True)

    def _tell_regions(
        self, call: AnnouncedCall, shared: SharedGpu, row: torch.Tensor
    ) -> list[RankMemory]:
        """Where everybody's row lies, after a meeting in which all have said the same."""
        mine = shared.describe([(row.data_ptr(), row.nbytes)], row.nbytes)
        message = numpy.frombuffer(encode_memory(mine, 1), numpy.uint8)
        everything = numpy.empty((self.size, len(message)), numpy.uint8)
        self._engine(call, Operation.ALL_GATHER, everything, message, GPU_MARK)
        wanted = 1 if self.rank == CONDUCTOR else 0
        return [decode_memory(row.tobytes(), wanted) for row in everything]

    def _reduce_row_staged(
        self, shared: SharedGpu, row: torch.Tensor, root: int | None, call: AnnouncedCall, op: Op
    ) -> None:
        host = shared.staging.take(row)
        operation, at = (_ALL_REDUCE, GPU_MARK) if root is None else (Operation.REDUCE, root)
        self._reduce_staged(call, operation, host, host, at, *engine_reduction(op))
        if root in (None, self.rank):
            shared.staging.give(row, host)

    def _reduce_staged(self, call: AnnouncedCall, operation: Operation, *more: Any) -> None:
        output, input, root, number, factor = more
        if not count_bytes(input):
            return
        arguments = (operation, output, input, root, number, factor, False, None)
        status = self._comm._native_run(*arguments)
        if status:
            self._comm._fail(status, Operation[call.operation.upper()], number, input)


def engine_reduction(op: Op) -> tuple[int, float]:
    """The engine's number of a reduction, and its factor."""
    if isinstance(op, PremulSum):
        return len(REDUCTIONS), float(op.factor)
    return REDUCTION_NUMBERS[op], 1.0


def kernel_reduction(op: Op) -> str:
    if isinstance(op, PremulSum):
        return "premul_sum"
    return "avg" if op == "mean" else op


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """The engine's number of a dtype: DLPack's code, bits and lanes."""
    kind = 6 if dtype is torch.bool else 4 if dtype is torch.bfloat16 else None
    if kind is None:
        kind = 5 if dtype.is_complex else 2 if dtype.is_floating_point else int(not dtype.is_signed)
    return kind | dtype.itemsize * 8 << 8 | 1 << 16


def count_bytes(tensors: Any) -> int:
    """How many bytes a tensor, or a list of them, has."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(tensor.nbytes for tensor in tensors)
