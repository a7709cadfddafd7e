"""The all_reduce of CUDA tensors, the most frequent call, with as little overhead as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from unisono.comm.cuda.calls import CudaCalls, is_capturing
from unisono.comm.cuda.conducting import Task
from unisono.comm.cuda.kernels import has_kernel
from unisono.comm.cuda.regions import RankMemory, encode_memory
from unisono.comm.engine import GPU_MARK
from unisono.comm.engine.numbers import REDUCTION_NUMBERS, Operation, Status
from unisono.comm.on_rows.announced_calls import AnnouncedCall
from unisono.comm.on_rows.rows import torch_row_of, write_back
from unisono.comm.reductions import Reduction, has_meaning
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.tensors import dtype_name
from unisono.comm.work import Work

STAGED_BYTES = 64 << 10
"""Longer tensors are reduced in all ranks' memory. On one H200, in pinned memory and in all ranks'
memory: 64 KiB 38 and 59 us with 2 ranks, 88 and 106 with 8; 256 KiB 80 and 59, 236 and 129. With a
matrix product of 512 x 512 before each call, 64 KiB 348 and 318, 1,432 and 1,341."""

_ALL_REDUCE = Operation.ALL_REDUCE


class AllReduces:
    """A single tensor takes a fast path: the engine's own comparison is its meeting."""

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self._combiners: dict[str, Callable[[torch.Tensor], None]] = {}
        self._everyone = [(rank, 0, 0) for rank in range(calls.size)]
        self._told: tuple[bytes, list[RankMemory]] = b"", []

    def run_plain(self, tensor: Any, op: Any) -> int:
        """One contiguous tensor, by a reduction with a plain name. Returns a status."""
        calls = self._calls
        if (
            type(op) is not str
            or op not in REDUCTION_NUMBERS
            or not isinstance(tensor, torch.Tensor)
            or not tensor.nbytes
            or not tensor.is_contiguous()
            or tensor.device != calls.device
            or tensor.is_neg()
            or tensor.is_conj()
            or is_capturing()
            or calls.of_backward
        ):
            return Status.ASK_AGAIN
        if tensor.nbytes > STAGED_BYTES:
            return self._run_large_plain(tensor, op)
        combine = self._combiners.get(op)
        if combine is None:
            combine = self._combiners[op] = self._combiner(Reduction(op))
        with calls.lock:
            calls.staging.exchange(tensor, calls.stream(), combine)
        return Status.OK

    def _run_large_plain(self, tensor: torch.Tensor, op: str) -> int:
        calls, dtype = self._calls, dtype_name(tensor)
        if (
            calls.orchestra is None
            or op == "premul_sum"
            or not (has_meaning(op, dtype) and has_kernel(op, dtype))
            or torch.cuda.current_device() != calls.device.index
        ):
            return Status.ASK_AGAIN
        with calls.lock, calls.told_of_failure("all_reduce"):
            self._conduct(tensor, Reduction(op), AnnouncedCall("all_reduce"))
        return Status.OK

    def run_small(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work | None:
        """Of any layout, also as a work: ranks may differ in both."""
        calls = self._calls

        def job() -> None:
            row = torch_row_of(tensor)
            calls.staging.exchange(row, calls.stream(), self._combiner(op))
            write_back(tensor, row)

        call = AnnouncedCall("all_reduce")
        return calls.carry_out(call, job, [tensor], async_op, leaves_record=True)

    def _combiner(self, op: Reduction) -> Callable[[torch.Tensor], None]:
        """An all_reduce in pinned memory."""
        engine = self._calls.engine
        run, number, factor = engine.group.run, op.number, op.factor

        def combine(host: torch.Tensor) -> None:
            status = run(_ALL_REDUCE, host, host, GPU_MARK, number, factor)
            if status:
                raise engine.call_error(status, _ALL_REDUCE, op, host)

        return combine

    def run_large(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work | None:
        call = AnnouncedCall("all_reduce")

        def job() -> None:
            row = torch_row_of(tensor)
            self._conduct(row, op, call)
            write_back(tensor, row)

        return self._calls.carry_out(call, job, [tensor], async_op, leaves_record=True)

    def _conduct(self, row: torch.Tensor, op: Reduction, call: AnnouncedCall) -> None:
        """The engine compares the calls, and each rank publishes a region."""
        calls = self._calls
        group, stream = calls.engine.group, calls.stream()
        dtype, size = dtype_name(row), row.nbytes
        described = _ALL_REDUCE, op.number, GPU_MARK, dtype_code(dtype), size
        record = group.record_open(*described, group.state()["calls"] + 1)
        assert calls.orchestra is not None
        calls.orchestra.arrive(stream)
        status = group.check(*described, record)
        if status:
            raise calls.engine.call_error(status, _ALL_REDUCE, op, row)
        status = Status.ABORTED
        group.record_cover(True)  # the calls below are parts of this one
        try:
            memory = self._tell_regions(call, row)
            task = Task(self._everyone, self._everyone, size, op, dtype)
            if not calls.conducted(call, lambda: [task], memory, stream):
                calls.staging.start(stream)
                reduce_staged_row(calls, row, None, call, op)
            status = Status.OK
        finally:
            group.record_cover(False)
            group.record_end(record, status)

    def _tell_regions(self, call: AnnouncedCall, row: torch.Tensor) -> list[RankMemory]:
        """Where each rank's row is, after a meeting in which all calls matched; the same list as in
        the call before if nothing has moved."""
        calls = self._calls
        mine = calls.describe([row], row.nbytes)
        message = numpy.frombuffer(encode_memory(mine, 1), numpy.uint8)
        everything = numpy.empty((calls.size, len(message)), numpy.uint8)
        calls.run_engine(call, Operation.ALL_GATHER, everything, message, GPU_MARK)
        told, (before, memory) = everything.tobytes(), self._told
        if told != before:
            memory = calls.read_memory(everything, 1)
            self._told = told, memory
        return memory


def reduce_staged_row(
    calls: CudaCalls, row: torch.Tensor, root: int | None, call: AnnouncedCall, op: Reduction
) -> None:
    """Reduce a row in pinned memory."""
    if not row.numel():
        return
    host = calls.staging.take(row)
    operation, at = (_ALL_REDUCE, GPU_MARK) if root is None else (Operation.REDUCE, root)
    calls.run_engine(call, operation, host, host, at, op)
    if root in (None, calls.rank):
        calls.staging.give(row, host)
