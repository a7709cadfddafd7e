"""The collectives of a group on CUDA tensors: what the conductor does for each, and how small
ones run in pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe as _caller
from typing import Any, NoReturn

import torch

from unisono.comm.arguments import Call
from unisono.comm.cuda.all_reduce import STAGED_BYTES, AllReduces, reduce_staged_row
from unisono.comm.cuda.calls import CudaCalls, is_capturing
from unisono.comm.cuda.conducting import Task
from unisono.comm.cuda.kernels import has_kernel
from unisono.comm.cuda.regions import RankMemory
from unisono.comm.engine import GPU_MARK, native
from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.on_rows.announced_calls import AnnouncedCall
from unisono.comm.on_rows.row_transport import Job, Rows, RowTransport
from unisono.comm.on_rows.rows import bytes_of, concatenate, copy_into, write_back_all
from unisono.comm.reductions import Reduction
from unisono.comm.shared_memory.engine_transport import EngineTransport
from unisono.comm.tensors import dtype_name
from unisono.comm.transport import Transport
from unisono.comm.work import Work
from unisono.errors import GroupError


class Cuda(RowTransport):
    """A rank of a group of one host, for collectives on tensors of a GPU that all ranks share.
    The group's shared memory does what concerns the group as a whole."""

    devices = ("cuda",)

    def __init__(self, engine: EngineTransport, calls: CudaCalls) -> None:
        self.rank = engine.rank
        self.size = engine.size
        self.name = engine.name
        self.global_ranks = engine.global_ranks
        self._engine = engine
        self._calls = calls
        self._staging = calls.staging
        self._all_reduces = AllReduces(self._calls)

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """How long a call waits for its peers."""
        return self._engine.timeout_s

    def run_fast(self, operation: Operation, output: Any, op: Any) -> int:
        if operation != Operation.ALL_REDUCE:
            return Status.ASK_AGAIN
        return self._all_reduces.run_plain(output, op)

    def check_call(self, call: Call) -> None:
        others = {
            str(tensor.device) for tensor in call.tensors if tensor.device != self._calls.device
        }
        if others:
            raise ValueError(
                f"tensors on {', '.join(sorted(others))} in a group whose CUDA calls are on "
                f"{self._calls.device}: a rank must use one GPU"
            )
        if is_capturing():
            raise ValueError(
                "a CUDA graph is being captured: the ranks' calls meet on the CPU, which a graph "
                "cannot capture; make the call outside the capture"
            )

    def run(self, call: Call, async_op: bool) -> Work | None:
        if call.operation == Operation.ALL_REDUCE and not call.is_coalesced:
            (tensor,), op = call.outputs, call.reduction
            assert op is not None
            if 0 < tensor.nbytes <= STAGED_BYTES:
                return self._all_reduces.run_small(tensor, op, async_op)
            # the engine does not compare factors of large calls
            is_plain = op.name != "premul_sum" and has_kernel(op.name, dtype_name(tensor))
            if tensor.nbytes and is_plain and self._calls.orchestra:
                return self._all_reduces.run_large(tensor, op, async_op)
        return super().run(call, async_op)

    def announce(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        self._engine.raise_if_ended()
        site = native.site_of(_caller(1)) or ""
        return AnnouncedCall(f"{text} on a GPU", sends, takes, site=site)

    def carry_out(
        self, call: AnnouncedCall, job: Job, tensors: list[Any], async_op: bool
    ) -> Work | None:
        return self._calls.carry_out(call, job, tensors, async_op)

    def meet(self, call: AnnouncedCall) -> None:
        self._engine.barrier(None, False)

    # -- the group: done by its shared memory ----------------------------------------------------

    def barrier(self, timeout_s: float | None, async_op: bool) -> Work | None:
        return self._engine.barrier(timeout_s, async_op)

    def refuse(self, operation: str, why: str) -> None:
        self._engine.refuse(operation, why)

    def abort(self, reason: str = "") -> None:
        self._engine.abort(reason)

    def ending(self, doing: str) -> GroupError | None:
        return self._engine.ending(doing)

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        return self._engine.split(members, name)

    def send(self, tensor: Any, peer: int, tag: int) -> NoReturn:
        raise AssertionError  # the Communicator stages messages of CUDA tensors

    recv = isend = irecv = send  # type: ignore[assignment]

    def close(self) -> None:
        self._calls.close()

    # -- rows ------------------------------------------------------------------------------------

    def reduce_row(
        self, row: torch.Tensor, op: Reduction, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        def plan(memory: Sequence[RankMemory], calls: Sequence[AnnouncedCall]) -> list[Task]:
            everyone = [(rank, 0, 0) for rank in range(self.size)]
            targets = everyone if root is None else [everyone[root]]
            return [Task(everyone, targets, row.nbytes, op, dtype_name(row))]

        def staged() -> None:
            reduce_staged_row(self._calls, row, root, call, op)

        moved = row.nbytes if has_kernel(op.name, dtype_name(row)) else 0
        self._calls.follow(call, [row], moved, plan, staged)
        return row

    def scatter_rows(self, by_rank: Rows, op: Reduction, call: AnnouncedCall) -> torch.Tensor:
        result = torch.empty_like(by_rank[self.rank])
        dtype = dtype_name(result)

        def plan(memory: Sequence[RankMemory], calls: Sequence[AnnouncedCall]) -> list[Task]:
            return [
                Task(
                    [(source, target, 0) for source in range(self.size)],
                    [(target, self.size, 0)],
                    memory[target].regions[target].size,
                    op,
                    dtype,
                )
                for target in range(self.size)
            ]

        def staged() -> None:
            hosts = [self._staging.take(row) for row in by_rank]
            host = self._staging.room_for(result)
            operation = Operation.REDUCE_SCATTER
            if any(row.numel() for row in by_rank):
                self._calls.run_engine(call, operation, host, hosts, GPU_MARK, op)
            self._staging.give(result, host)

        total = sum(row.nbytes for row in by_rank) if has_kernel(op.name, dtype) else 0
        self._calls.follow(call, [*by_rank, result], total, plan, staged)
        return result

    def broadcast_rows(
        self, tensors: Sequence[Any], rows: Rows, root: int, call: AnnouncedCall
    ) -> None:
        """From memory to memory: nothing is packed where the conductor copies."""
        moved = list(map(bytes_of, rows))

        def plan(memory: Sequence[RankMemory], calls: Sequence[AnnouncedCall]) -> list[Task]:
            return [
                Task(
                    [(root, index, 0)],
                    [(rank, index, 0) for rank in range(self.size) if rank != root],
                    region.size,
                )
                for index, region in enumerate(memory[root].regions)
            ]

        def staged() -> None:
            if self._calls.relayed(call, moved, root):
                return
            whole = concatenate(moved)
            if not whole.numel():
                return
            is_root = self.rank == root
            host = self._staging.take(whole) if is_root else self._staging.room_for(whole)
            self._calls.run_engine(call, Operation.BROADCAST, host, host, root)
            if not is_root:
                self._staging.give(whole, host)
                copy_into(whole, moved)

        # A trainer's weights stay in place, while an engine has two copies: so a receiver conducts,
        # and opens the weights once.
        conductor = (root + 1) % self.size
        self._calls.follow(call, moved, sum(row.nbytes for row in moved), plan, staged, conductor)
        if self.rank != root:
            write_back_all(tensors, rows)

    def gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        def plan(memory: Sequence[RankMemory], calls: Sequence[AnnouncedCall]) -> list[Task]:
            return [
                Task(
                    [(source, 0, 0)],
                    [(rank, 1 + source, 0) for rank in range(self.size)],
                    memory[source].regions[0].size,
                )
                for source in range(self.size)
            ]

        def staged() -> None:
            if not any(target.numel() for target in targets):
                return
            host = self._staging.take(row)
            hosts = [self._staging.room_for(target) for target in targets]
            self._calls.run_engine(call, Operation.ALL_GATHER, hosts, host, GPU_MARK)
            for target, arrived in zip(targets, hosts, strict=True):
                self._staging.give(target, arrived)

        total = sum(target.nbytes for target in targets)
        self._calls.follow(call, [row, *targets], total, plan, staged)

    def exchange_rows(
        self, output: torch.Tensor, input: torch.Tensor, width: int, call: AnnouncedCall
    ) -> None:
        def plan(memory: Sequence[RankMemory], calls: Sequence[AnnouncedCall]) -> list[Task]:
            sends = [[count * width for count in peer.sends] for peer in calls]
            return [
                Task(
                    [(source, 1, sum(sends[source][:target]))],
                    [(target, 0, sum(sends[before][target] for before in range(source)))],
                    sends[source][target],
                )
                for source in range(self.size)
                for target in range(self.size)
            ]

        def staged() -> None:
            sent = self._staging.take(input)
            arrived = self._staging.room_for(output)
            self._calls.run_engine(
                call,
                Operation.ALL_TO_ALL,
                list(torch.split(arrived, [count * width for count in call.takes])),
                list(torch.split(sent, [count * width for count in call.sends])),
                GPU_MARK,
            )
            self._staging.give(output, arrived)

        self._calls.follow(call, [output, input], max(output.nbytes, input.nbytes), plan, staged)
