"""The calls of a group on CUDA tensors, over its calls on CPU tensors.

Every call begins with a meeting in the group's engine, marked as one of GPU tensors: so what
differs between ranks, a CPU tensor on one of them too, raises on all before any output changes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from sys import _getframe as _caller
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
    PeerCall,
    are_alike,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.arguments import LISTS, check_root
from unisono.comm.base import (
    REDUCTIONS,
    TRUNCATED_AVG,
    Communicator,
    Op,
    PremulSum,
    Work,
    dtype_name,
)
from unisono.comm.cuda.conducting import CONDUCTOR, Copy, Reduce, Task
from unisono.comm.cuda.driver import DriverError
from unisono.comm.cuda.messages import GpuMessages
from unisono.comm.cuda.regions import RankMemory, decode_memory, encode_memory
from unisono.comm.cuda.shared_gpu import SharedGpu
from unisono.comm.engine import GPU_MARK, Operation, site_of
from unisono.comm.over_torch.executors import StreamExecutor
from unisono.comm.row_group import Rows
from unisono.comm.rows import bytes_of, concatenate, copy_into, row_of, write_back
from unisono.comm.shared_memory.engine_calls import REDUCTION_NUMBERS
from unisono.errors import CollectiveMismatch, GroupError

if TYPE_CHECKING:
    from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator

_log = logging.getLogger("unisono")
_ALL_REDUCE = Operation.ALL_REDUCE
_OUTCOME_BYTES = 256
_Plan = Callable[[Sequence[RankMemory], Sequence[PeerCall]], list[Task]]
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class GpuGroup(GpuMessages):
    """One member of a group of one host, for its calls on CUDA tensors. `comm` has the group."""

    _also = TRUNCATED_AVG

    def __init__(self, comm: SharedMemoryCommunicator) -> None:
        self._comm = weakref.proxy(comm)  # which holds on to this object
        self.rank = comm.rank
        self.size = comm.size
        self.name = comm.name
        self.global_ranks = comm.global_ranks
        self._lock = threading.RLock()
        self._streams = StreamExecutor()
        self._shared: SharedGpu | None = None
        self._nccl: Communicator | None = None
        self._device: torch.device | None = None
        self._combiners: dict[Op, Callable[[torch.Tensor], None]] = {}

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._comm.timeout_s

    @property
    def _devices(self) -> Collection[str]:
        return ("cuda",)

    # -- ways in ---------------------------------------------------------------------------------

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

    def all_reduce(
        self, tensor: Any, op: Op = "sum", *, async_op: bool = False, algorithm: Any = None
    ) -> Work | None:
        group = self._ready(_ALL_REDUCE, tensor)
        if group is not self:
            return group.all_reduce(tensor, op, async_op=async_op)  # type: ignore[arg-type]
        shared = self._shared
        if shared and isinstance(tensor, torch.Tensor) and 0 < tensor.nbytes <= shared.staged_bytes:
            return self._all_reduce_small(tensor, op, async_op)
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
            or _is_capturing()
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

        return self._run(AnnouncedCall("all_reduce"), job, [tensor], async_op)

    def _combiner(self, op: Op) -> Callable[[torch.Tensor], None]:
        """An all_reduce in pinned memory."""
        combiner = self._combiners.get(op)
        if combiner is None:
            combiner = self._combiners[op] = self._make_combiner(op)
        return combiner

    def _make_combiner(self, op: Op) -> Callable[[torch.Tensor], None]:
        comm = self._comm
        number, factor = _engine_reduction(op)
        rest = GPU_MARK, number, factor, False, None

        def combine(host: torch.Tensor) -> None:
            status = comm._native_run(_ALL_REDUCE, host, host, *rest)
            if status:
                comm._fail(status, _ALL_REDUCE, number, host)

        return combine

    def broadcast(
        self, tensor: Any, root: int = 0, *, async_op: bool = False, algorithm: Any = None
    ) -> Work | None:
        group = self._ready(Operation.BROADCAST, tensor)
        if group is not self:
            return group.broadcast(tensor, root, async_op=async_op)
        if not isinstance(tensor, LISTS) or len(tensor) < 2:
            return super().broadcast(tensor, root, async_op=async_op)
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

    def _stream(self) -> int:
        """torch's current stream on this group's GPU."""
        assert self._device is not None
        return int(_raw_stream(self._device.index))

    # -- which way -------------------------------------------------------------------------------

    def _ready(self, operation: Operation, *given: Any) -> Communicator:
        """What carries out calls on this group's CUDA tensors: this object, or NCCL. With the first
        call the ranks tell each other of their GPUs."""
        if self._shared is not None:
            return self
        if self._nccl is not None:
            return self._nccl
        from unisono.comm.cuda.meeting import meet_on_gpus

        self._device = _first_device(given)
        way = meet_on_gpus(self._comm, self._device, operation)
        if isinstance(way, SharedGpu):
            self._shared = way
            return self
        self._nccl = way
        return way

    # -- what every call goes through ------------------------------------------------------------

    def _raise_if_ended(self) -> None:
        self._comm._raise_if_ended()

    def _refuse(self, what: str, why: str, kind: type[Exception] = ValueError) -> NoReturn:
        self._comm._refuse(Operation[what.upper()], why, kind)

    def _call(
        self,
        text: str,
        sends: Sequence[int] = (),
        takes: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> AnnouncedCall:
        self._raise_if_ended()
        site = site_of(_caller(1)) or ""
        return AnnouncedCall(f"{text} on a GPU", sends, takes, site=site)

    def _run(
        self, call: AnnouncedCall, job: Callable[[], None], tensors: list[Any], async_op: bool
    ) -> Work | None:
        self._check_devices(call.operation, tensors)
        assert self._device is not None
        with self._lock, torch.cuda.device(self._device), self._told_of_failure(call.operation):
            if async_op:
                return self._streams.begin(job, call.operation, self._device, tensors)
            with torch.inference_mode():
                job()
        return None

    def _check_devices(self, what: str, tensors: list[Any]) -> None:
        others = {str(tensor.device) for tensor in tensors if tensor.device != self._device}
        if others:
            self._refuse(
                what,
                f"tensors on {', '.join(sorted(others))} in a group whose CUDA calls are on "
                f"{self._device}: a rank keeps to one GPU",
            )
        if _is_capturing():
            self._refuse(
                what,
                "a CUDA graph is being captured: the ranks' calls meet on their CPUs, which a "
                "graph cannot hold; call it outside of the capture",
            )

    @contextlib.contextmanager
    def _told_of_failure(self, what: str) -> Iterator[None]:
        """A rank that cannot go on, since its GPU has no memory left or has failed, ends the group,
        so that nobody waits for it."""
        try:
            yield
        except (GroupError, ValueError, TypeError):
            raise
        except (DriverError, RuntimeError) as error:  # torch's OutOfMemoryError is one
            reason = str(error).strip().partition("\n")[0]
            self._comm.abort(f"rank {self.rank} could not carry out {what} on its GPU: {reason}")
            raise

    def _carry_out(
        self,
        call: AnnouncedCall,
        rows: Rows,
        moved_bytes: int,
        plan: _Plan,
        staged: Callable[[SharedGpu], None],
    ) -> None:
        """Meet the others; then let the conductor follow the plan where much is to be moved and all
        can be reached, and otherwise take the way through pinned memory."""
        shared = self._shared
        assert shared is not None
        stream = self._stream()
        orchestra = shared.orchestra
        if orchestra is not None:
            orchestra.arrive(stream)
        memory, peer_calls = self._meet(call, rows, moved_bytes)
        is_large = max(brought.bytes for brought in memory) > shared.staged_bytes
        if orchestra is not None and is_large:
            if all(brought.can_map for brought in memory):
                if self._conduct(call, shared, lambda: plan(memory, peer_calls), memory, stream):
                    orchestra.follow(stream)
                    return
            else:
                unmapped = [rank for rank, brought in enumerate(memory) if not brought.can_map]
                shared.warn_of_staging(self.rank, f"ranks {unmapped}: {shared.exported_refusal()}")
        shared.staging.start(stream)
        staged(shared)

    def _conduct(
        self,
        call: AnnouncedCall,
        shared: SharedGpu,
        plan: Callable[[], list[Task]],
        memory: Sequence[RankMemory],
        stream: int,
    ) -> bool:
        """Whether the conductor could open all memory, and has given its stream the work."""
        said = torch.zeros(_OUTCOME_BYTES, dtype=torch.uint8)
        assert shared.orchestra is not None
        if self.rank == CONDUCTOR:
            try:
                located = shared.orchestra.locate(memory, plan())
            except DriverError as error:
                text = str(error).encode()[: _OUTCOME_BYTES - 1]
                said[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            else:
                shared.orchestra.conduct(located, stream)
        self._engine(call, Operation.BROADCAST, said, said, CONDUCTOR)
        if not said[0]:
            return True
        shared.orchestra = None  # on every rank: from now on all calls are staged
        shared.warn_of_staging(self.rank, bytes(said.tolist()).rstrip(b"\0").decode())
        return False

    def _meet(
        self, call: AnnouncedCall, rows: Rows, moved_bytes: int
    ) -> tuple[list[RankMemory], list[PeerCall]]:
        """What everybody brings. Raises CollectiveMismatch where the calls differ."""
        assert self._shared is not None
        mine = self._shared.describe([(row.data_ptr(), row.nbytes) for row in rows], moved_bytes)
        said = encode_call(call, self.size)
        length = said.numel()
        most = max(self.size + 1, len(rows))
        encoded = bytearray(encode_memory(mine, most))
        message = torch.cat([said, torch.frombuffer(encoded, dtype=torch.uint8)])
        everything = torch.empty(self.size, message.numel(), dtype=torch.uint8)
        self._engine(call, Operation.ALL_GATHER, everything, message, GPU_MARK)
        calls = [everything[rank, :length] for rank in range(self.size)]
        peer_calls = [decode_call(row, self.size) for row in calls]
        error = None if are_alike(calls) else find_mismatch(peer_calls, self.rank, self.name)
        if error is not None:
            self._end(error)
        wanted = most if self.rank == CONDUCTOR else 0  # the others need no addresses
        memory = [
            decode_memory(everything[rank, length:].numpy().tobytes(), wanted)
            for rank in range(self.size)
        ]
        return memory, peer_calls

    def _end(self, error: CollectiveMismatch) -> NoReturn:
        """All ranks have seen this: the group ends by it on each of them."""
        exceptions = self._comm._exceptions
        if exceptions.cause is None:
            exceptions.cause = error
        self._comm.abort(str(error).partition("\n")[0])
        raise exceptions.failure(error.args[0])

    def _engine(
        self, call: AnnouncedCall, operation: Operation, output: Any, input: Any, root: int
    ) -> None:
        """A call of the engine in the course of one of ours."""
        status = self._comm._native_run(operation, output, input, root, 0, 1.0, False, None)
        if status:
            raise self._comm._exceptions.call_error(status, Operation[call.operation.upper()])

    # -- the collectives on rows -----------------------------------------------------------------

    def _reduced(
        self, row: torch.Tensor, op: Op, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        number, factor = _engine_reduction(op)
        name = _kernel_reduction(op)

        def plan(memory: Sequence[RankMemory], calls: Sequence[PeerCall]) -> list[Task]:
            everyone = [(rank, 0, 0) for rank in range(self.size)]
            targets = everyone if root is None else [everyone[root]]
            return [Reduce(name, factor, dtype_name(row), everyone, targets, row.nbytes)]

        def staged(shared: SharedGpu) -> None:
            host = shared.staging.take(row)
            if root is None:
                operation, at = Operation.ALL_REDUCE, GPU_MARK
            else:
                operation, at = Operation.REDUCE, root
            self._reduce_staged(call, operation, host, host, at, number, factor)
            if root in (None, self.rank):
                shared.staging.give(row, host)

        self._carry_out(call, [row], row.nbytes, plan, staged)
        return row

    def _reduce_staged(self, call: AnnouncedCall, operation: Operation, *more: Any) -> None:
        output, input, root, number, factor = more
        if not count_bytes(input):
            return
        arguments = (operation, output, input, root, number, factor, False, None)
        status = self._comm._native_run(*arguments)
        if status:
            self._comm._fail(status, Operation[call.operation.upper()], number, input)

    def _scattered(self, by_rank: Rows, op: Op, call: AnnouncedCall) -> torch.Tensor:
        number, factor = _engine_reduction(op)
        name = _kernel_reduction(op)
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

    # -- life ------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], label: str = "") -> Communicator | None:
        return self._comm.split(ranks, label)

    def abort(self, reason: str = "") -> None:
        self._comm.abort(reason)

    @property
    def errored(self) -> GroupError | None:
        return self._comm.errored

    def close(self) -> None:
        """Give back what calls on CUDA tensors needed; the group itself is closed by its `comm`."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.close()


def _engine_reduction(op: Op) -> tuple[int, float]:
    """The engine's number of a reduction, and its factor."""
    if isinstance(op, PremulSum):
        return len(REDUCTIONS), float(op.factor)
    return REDUCTION_NUMBERS[op], 1.0


def _kernel_reduction(op: Op) -> str:
    if isinstance(op, PremulSum):
        return "premul_sum"
    return "avg" if op == "mean" else op


def count_bytes(tensors: Any) -> int:
    """How many bytes a tensor, or a list of them, has."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(tensor.nbytes for tensor in tensors)


def _first_device(given: Any) -> torch.device:
    """The GPU of the first tensor that lies on one."""
    for value in given:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cuda":
                return value.device
        elif isinstance(value, (list, tuple)):
            with contextlib.suppress(LookupError):
                return _first_device(value)
    raise LookupError("no tensor of a GPU")
