"""The collectives of a group on CUDA tensors: what the conductor does for each, and what is done in
pinned memory where little moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
    PeerCall,
)
from unisono.comm.arguments import LISTS, check_root
from unisono.comm.base import (
    Op,
    Work,
    dtype_name,
)
from unisono.comm.cuda.all_reduce import GpuAllReduce, engine_reduction, kernel_reduction
from unisono.comm.cuda.conducting import Copy, Reduce, Task
from unisono.comm.cuda.regions import RankMemory
from unisono.comm.cuda.shared_gpu import SharedGpu
from unisono.comm.engine import GPU_MARK, Operation
from unisono.comm.row_group import Rows
from unisono.comm.rows import bytes_of, concatenate, copy_into, row_of, write_back


class GpuGroup(GpuAllReduce):
    """One member of a group of one host, for its calls on CUDA tensors."""

    def run(
        self, operation: Operation, output: Any, input: Any, root: int, op: Op, async_op: bool
    ) -> Work | None:
        """Carry out a call as the engine knows it."""
        name = operation.name.lower()
        call: Any = getattr(self._ready(operation, output, input), name)
        if name in ("all_reduce", "broadcast", "reduce"):
            rest = {"all_reduce": (op,), "broadcast": (root,), "reduce": (root, op)}[name]
            return call(output, *rest, async_op=async_op)  # type: ignore[no-any-return]
        rest = {"reduce_scatter": (op,), "gather": (root,), "scatter": (root,)}.get(name, ())
        return call(output, input, *rest, async_op=async_op)  # type: ignore[no-any-return]

    def _run_broadcast(
        self, tensor: Any, root: int, async_op: bool, algorithm: Any = None
    ) -> Work | None:
        group = self._ready(Operation.BROADCAST, tensor)
        if group is not self:
            return group.broadcast(tensor, root, async_op=async_op)
        if not isinstance(tensor, LISTS) or len(tensor) < 2:
            return super()._run_broadcast(tensor, root, async_op, None)
        return self._broadcast_many(list(tensor), root, async_op)

    def _broadcast_many(self, given: list[Any], root: int, async_op: bool) -> Work | None:
        """Many tensors, from memory to memory: nothing is packed where the conductor copies."""
        self._checked("broadcast", check_root, root, self.size)
        tensors = self._tensors("broadcast", given, True)
        self._check_overlaps("broadcast", tensors)
        counts = ", ".join(f"{dtype_name(tensor)}[{tensor.numel()}]" for tensor in tensors)
        call = self._call(f"broadcast of {counts} from rank {root}")

        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            others = [rank for rank in range(self.size) if rank != root]
            regions = enumerate(memory[root].regions)
            return [
                Copy((root, index, 0), (rank, index, 0), region.size)
                for index, region in regions
                for rank in others
            ]

        def job() -> None:
            rows = [row_of(tensor) for tensor in tensors]
            moved = [bytes_of(row) for row in rows]

            def staged(shared: SharedGpu) -> None:
                whole = concatenate(moved)
                self._broadcast_staged(shared, whole, root, call)
                if self.rank != root:
                    copy_into(whole, moved)

            self._carry_out(call, moved, sum(row.nbytes for row in moved), plan, staged)
            if self.rank != root:
                for tensor, row in zip(tensors, rows, strict=True):
                    write_back(tensor, row)

        return self._run(call, job, tensors, async_op)

    def barrier(self, *, timeout_s: float | None = None, async_op: bool = False) -> Work | None:
        return self._comm.barrier(timeout_s=timeout_s, async_op=async_op)

    def _reduced(
        self, row: torch.Tensor, op: Op, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        factor = engine_reduction(op)[1]
        name = kernel_reduction(op)

        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            everyone = [(rank, 0, 0) for rank in range(self.size)]
            targets = everyone if root is None else [everyone[root]]
            return [Reduce(name, factor, dtype_name(row), everyone, targets, row.nbytes)]

        def staged(shared: SharedGpu) -> None:
            self._reduce_row_staged(shared, row, root, call, op)

        self._carry_out(call, [row], row.nbytes, plan, staged)
        return row

    def _scattered(self, by_rank: Rows, op: Op, call: AnnouncedCall) -> torch.Tensor:
        number, factor = engine_reduction(op)
        name = kernel_reduction(op)
        result = torch.empty_like(by_rank[self.rank])
        dtype = dtype_name(result)

        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            return [
                Reduce(
                    name,
                    factor,
                    dtype,
                    [(source, target, 0) for source in range(self.size)],
                    [(target, self.size, 0)],
                    memory[target].regions[target].size,
                )
                for target in range(self.size)
            ]

        def staged(shared: SharedGpu) -> None:
            hosts = [shared.staging.take(row) for row in by_rank]
            host = shared.staging.room_for(result)
            operation = Operation.REDUCE_SCATTER
            self._reduce_staged(call, operation, host, hosts, GPU_MARK, number, factor)
            shared.staging.give(result, host)

        total = sum(row.nbytes for row in by_rank)
        self._carry_out(call, [*by_rank, result], total, plan, staged)
        return result

    def _broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            others = [rank for rank in range(self.size) if rank != root]
            return [Copy((root, 0, 0), (rank, 0, 0), row.nbytes) for rank in others]

        def staged(shared: SharedGpu) -> None:
            self._broadcast_staged(shared, row, root, call)

        self._carry_out(call, [row], row.nbytes, plan, staged)

    def _broadcast_staged(
        self, shared: SharedGpu, row: torch.Tensor, root: int, call: AnnouncedCall
    ) -> None:
        if not row.numel():
            return
        staging = shared.staging
        host = staging.take(row) if self.rank == root else staging.room_for(row)
        self._engine(call, Operation.BROADCAST, host, host, root)
        if self.rank != root:
            staging.give(row, host)

    def _all_gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            return [
                Copy((source, 0, 0), (rank, 1 + source, 0), memory[source].regions[0].size)
                for source in range(self.size)
                for rank in range(self.size)
            ]

        def staged(shared: SharedGpu) -> None:
            if not any(target.numel() for target in targets):
                return
            host = shared.staging.take(row)
            hosts = [shared.staging.room_for(target) for target in targets]
            self._engine(call, Operation.ALL_GATHER, hosts, host, GPU_MARK)
            for target, arrived in zip(targets, hosts, strict=True):
                shared.staging.give(target, arrived)

        total = sum(target.nbytes for target in targets)
        self._carry_out(call, [row, *targets], total, plan, staged)

    def _exchange_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        width: int,
        call: AnnouncedCall,
    ) -> None:
        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            sends = [[count * width for count in peer.sends] for peer in calls]
            return [
                Copy(
                    (source, 1, sum(sends[source][:target])),
                    (target, 0, sum(sends[before][target] for before in range(source))),
                    sends[source][target],
                )
                for source in range(self.size)
                for target in range(self.size)
            ]

        def staged(shared: SharedGpu) -> None:
            sent = shared.staging.take(input)
            arrived = shared.staging.room_for(output)
            self._engine(
                call,
                Operation.ALL_TO_ALL,
                list(torch.split(arrived, list(from_each))),
                list(torch.split(sent, list(to_each))),
                GPU_MARK,
            )
            shared.staging.give(output, arrived)

        self._carry_out(call, [output, input], max(output.nbytes, input.nbytes), plan, staged)

    def _barrier_rows(self, call: AnnouncedCall) -> None:
        self._comm.barrier()
