"""The torch.distributed backend named "unisono": torch's process group over a Communicator.

torch calls some of these methods from Python and some from C++; the names are torch's, old and new.
A blocking call (`opts.asyncOp` is False) runs at once and returns None, which torch takes for a
finished work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch._C._profiler import _RecordFunctionFast

from unisono import variables
from unisono.comm.communicator import Communicator
from unisono.comm.engine import Operation, hide_files
from unisono.comm.reductions import TRUNCATED_AVG, Reduction
from unisono.comm.shared_memory.torch_reductions import reductions_by_hash
from unisono.comm.work import FinishedWork, JoinedWork, Work
from unisono.torch_autograd import mark_written
from unisono.torch_backend.autoload import NAME
from unisono.torch_backend.given_calls import (
    accept_short_signatures,
    as_list,
    as_nested_list,
    run_but_all_reduce,
    straight,
    straight_if_even,
    straight_in_place,
    unchanged,
)
from unisono.torch_support import never_compiled

if TYPE_CHECKING:
    from unisono.torch_backend.futures import Completer, MessageCompleter, TorchWork
    from unisono.torch_backend.shared_buffers import SharedBuffers

Tensors = Sequence[torch.Tensor]
HAS_PYTHON_BACKENDS = hasattr(_distributed_c10d, "FlightRecorderHook")
"""Whether a c10d Backend may be a Python class: torch 2.15."""
hide_files(os.path.dirname(torch.__file__))  # errors show the user's line, not torch's


def served_devices() -> tuple[str, ...]:
    """The device types that our groups serve, by torch's names."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _is_integer(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _seen_by_profiler(call: Callable[..., Any], tensors: Tensors) -> Callable[..., Any]:
    """The same call, which torch's profiler shows as "unisono:all_reduce", with these shapes. Of an
    asynchronous call it shows the start."""
    name = f"{NAME}:{call.__name__.removeprefix('_')}"

    def seen(*args: Any, **keywords: Any) -> Any:
        with _RecordFunctionFast(name, list(tensors)):
            return call(*args, **keywords)

    return seen


ProcessGroup: Any = dist.ProcessGroup  # torch's stubs lack its hooks and old names


@never_compiled
class UnisonoProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A torch process group over a Communicator, `comm`."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, comm: Communicator, store: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._names_of_ops = reductions_by_hash()
        self.comm = comm
        self._run_given: Callable[..., int] = comm.transport.fast_path.run_given
        if variables.ALGO.read() is not None:
            self._run_given = functools.partial(run_but_all_reduce, self._run_given)
        self._store = store
        self._group_name = comm.name
        self._description = ""
        self._coalesced: list[tuple[Work, Tensors]] | None = None

    # -- identity --------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in served_devices()]

    shown_name = NAME
    """What torch's Python functions call the backend: the name of the one that it replaces, if
    UNISONO_REPLACE names one."""

    def getBackendName(self) -> str:
        return NAME  # for C++: DDP would cast a group with gloo's name to gloo's class

    def name(self) -> str:
        return self.shown_name

    _get_backend_name = name

    def getRank(self) -> int:
        return self.comm.rank

    def getSize(self) -> int:
        return self.comm.size

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> UnisonoProcessGroup:
        """The group's only backend."""
        return self

    get_backend = _get_backend  # since 2.15

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """FSDP2 asks this when it allocates its buffers here."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A one-dimensional tensor in memory that all ranks have mapped, if there is any. Unlike in
        torch's own backends it is a collective call: all ranks make it, in the same order. Raises
        ValueError for a device other than the CPU."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"allocate_tensor on group {self.comm.name}: no memory on {device}")
        return self._buffers.allocate(size, dtype)

    def __repr__(self) -> str:
        return f"<UnisonoProcessGroup over {self.comm!r}>"

    # -- collectives -----------------------------------------------------------------------------

    @straight_in_place(Operation.ALL_REDUCE)
    @accept_short_signatures(AllreduceOptions, as_list)
    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, opts)
        return self._run(self.comm.all_reduce, opts, tensors, tensor, self._op_of(opts, tensors))

    @accept_short_signatures(AllreduceCoalescedOptions, as_list)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        return self._run(
            self.comm.all_reduce, opts, tensors, list(tensors), self._op_of(opts, tensors)
        )

    @straight_in_place(Operation.BROADCAST)
    @accept_short_signatures(BroadcastOptions, as_list)
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        (tensor,) = tensors
        root = opts.rootRank
        written = tensors if root != self.comm.rank else ()
        return self._run(self.comm.broadcast, opts, tensors, tensor, root, written=written)

    @straight_in_place(Operation.REDUCE)
    @accept_short_signatures(ReduceOptions, as_list)
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        (tensor,) = tensors
        op, root = self._op_of(opts, tensors), opts.rootRank
        written = tensors if root == self.comm.rank else ()
        return self._run(self.comm.reduce, opts, tensors, tensor, root, op, written=written)

    @straight(Operation.ALL_GATHER)
    @accept_short_signatures(AllgatherOptions, as_nested_list, as_list)
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        (output,), (input,) = outputs, inputs
        return self._run(self.comm.all_gather, opts, output, list(output), input)

    @straight(Operation.ALL_GATHER)
    @accept_short_signatures(AllgatherOptions, unchanged, unchanged)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        return self._run(self.comm.all_gather, opts, [output], output, input)

    @accept_short_signatures(AllgatherOptions, as_list, as_list)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        return self._run(self.comm.all_gather, opts, outputs, list(outputs), list(inputs))

    @accept_short_signatures(AllgatherOptions, unchanged, unchanged)
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        """`outputs` has a list for each rank, with one tensor for each input."""
        wide = [list(parts) for parts in zip(*outputs, strict=True)]
        written = [part for parts in wide for part in parts]
        return self._run(self._all_gather_each, opts, inputs, wide, list(inputs), written=written)

    @accept_short_signatures(GatherOptions, as_nested_list, as_list)
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        (input,) = inputs
        output = list(outputs[0]) if outputs else None
        both = output, input
        return self._run(
            self.comm.gather, opts, output or inputs, *both, opts.rootRank, written=output or ()
        )

    @accept_short_signatures(GatherOptions, unchanged, unchanged)
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """On the root, one tensor for all ranks; elsewhere torch passes an empty one."""
        root = opts.rootRank
        wide = output if root == self.comm.rank else None
        written = () if wide is None else [wide]
        return self._run(self.comm.gather, opts, [output], wide, input, root, written=written)

    @accept_short_signatures(ScatterOptions, as_list, as_nested_list)
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        (output,) = outputs
        input = list(inputs[0]) if inputs else None
        return self._run(self.comm.scatter, opts, outputs, output, input, opts.rootRank)

    @straight(Operation.REDUCE_SCATTER)
    @accept_short_signatures(ReduceScatterOptions, as_list, as_nested_list)
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        (output,), (input,) = outputs, inputs
        op = self._op_of(opts, outputs)
        return self._run(self.comm.reduce_scatter, opts, outputs, output, list(input), op)

    @straight(Operation.REDUCE_SCATTER)
    @accept_short_signatures(ReduceScatterOptions, unchanged, unchanged)
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        op = self._op_of(opts, [output])
        return self._run(self.comm.reduce_scatter, opts, [output], output, input, op)

    @accept_short_signatures(ReduceScatterOptions, as_list, as_list)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        op = self._op_of(opts, outputs)
        both = list(outputs), list(inputs)
        return self._run(self.comm.reduce_scatter, opts, outputs, *both, op)

    @accept_short_signatures(AllToAllOptions, unchanged, unchanged)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        return self._run(self.comm.all_to_all, opts, outputs, list(outputs), list(inputs))

    @straight_if_even(Operation.ALL_TO_ALL)
    @accept_short_signatures(AllToAllOptions, *(unchanged,) * 4)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Any:
        try:
            wide_output = _cut(output, output_splits, self.comm.size)
            wide_input = _cut(input, input_splits, self.comm.size)
        except ValueError as error:
            self.comm.reject_call("all_to_all", str(error))
        return self._run(self.comm.all_to_all, opts, [output], wide_output, wide_input)

    def barrier(self, opts: Any = None, *more: Any, **named: Any) -> Any:
        is_full = type(opts) is BarrierOptions
        if is_full and not opts.asyncOp and opts.timeout.days < 0 and not _profiler_enabled():
            return self.comm.barrier()  # without a timeout of its own
        return self._barrier(opts, *more, **named)

    @accept_short_signatures(BarrierOptions)
    def _barrier(self, opts: Any) -> Any:
        limit_s = opts.timeout.total_seconds()
        if limit_s <= 0 or opts.asyncOp:
            return self._run(self.comm.barrier, opts, ())
        self.comm.barrier(timeout_s=limit_s)
        return None

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the missing ranks, as all our barriers do."""
        self.comm.barrier(timeout_s=timeout.total_seconds() if timeout is not None else None)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    # -- point to point --------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        return self._message(self.comm.isend, tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Any:
        work = self._message(self.comm.irecv, tensors, src, tag)
        mark_written(tensors)
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def _message(
        self, call: Callable[..., Work], tensors: Tensors, peer: int | None, tag: int
    ) -> TorchWork | None:
        (tensor,) = tensors
        if _profiler_enabled():
            call = _seen_by_profiler(call, tensors)
        work = call(tensor, peer, tag)
        if self._coalesced is None:
            return self._work(work, tensors, self._message_completer)
        self._coalesced.append((work, tensors))
        return None  # a blocking call would wait for its peer

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Messages and works start as usual; their works are combined into one at the end."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        begun, self._coalesced = self._coalesced or [], None
        result = [tensor for _, tensors in begun for tensor in tensors]
        return self._work(JoinedWork([work for work, _ in begun]), result, self._message_completer)

    # -- life ------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.comm.abort("torch.distributed aborted the group")

    def shutdown(self) -> None:
        for lazily_made in ("_completer", "_message_completer", "_buffers"):
            if lazily_made in vars(self):
                self.__dict__.pop(lazily_made).close()
        self.comm.close()

    def set_timeout(self, timeout: timedelta) -> None:
        self.comm.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """More time for the next calls on some backends; ours ignores it."""

    def _set_sequence_number_for_group(self) -> None:
        """The engine numbers the calls."""

    # -- implementation --------------------------------------------------------------------------

    def _call_error(self, status: int, operation: Operation, tensors: Any, opts: Any) -> Exception:
        """Why the engine's call has failed."""
        op = self._names_of_ops[hash(opts.reduceOp)] if hasattr(opts, "reduceOp") else "sum"
        return self.comm.transport.call_error(status, operation, op, tensors)

    def _run(
        self,
        call: Callable[..., Work | None],
        opts: Any,
        result: Tensors,
        *args: Any,
        written: Tensors | None = None,
    ) -> Any:
        """Make the call; returns a work for torch, or None if it is finished and torch wants none.
        The call writes `written`, by default `result`."""
        if _profiler_enabled():
            call = _seen_by_profiler(call, result)
        work = self._begin(call, opts, result, *args) if opts.asyncOp else call(*args)
        mark_written(result if written is None else written)
        return work

    def _begin(
        self, call: Callable[..., Work | None], opts: Any, result: Tensors, *args: Any
    ) -> Any:
        """Make the call asynchronously. Its own timeout applies to it alone: a work keeps the
        timeout that it started with."""
        limit_s = opts.timeout.total_seconds()
        if limit_s <= 0:
            work = call(*args, async_op=True)
        else:
            usual_s = self.comm.timeout_s
            self.comm.timeout_s = limit_s
            try:
                work = call(*args, async_op=True)
            finally:
                self.comm.timeout_s = usual_s
        work = work or FinishedWork()
        if self._coalesced is not None:
            self._coalesced.append((work, result))
        return self._work(work, result, self._completer)

    def future_of(self, work: Work | None, result: torch.Tensor) -> Any:
        """A Future that holds `result` once a work of the group's Communicator has finished; None:
        it already has. For DDP's hooks; it behaves like the Futures of our works."""
        from unisono.torch_backend.futures import future_of

        return future_of(work or FinishedWork(), result, self._completer, is_over=False)

    def _op_of(self, options: Any, tensors: Tensors) -> Any:
        """The reduction for one of torch's. torch averages integers by dividing their sum."""
        reduce_op = options.reduceOp
        name = self._names_of_ops.get(hash(reduce_op))
        if name is None:
            raise ValueError(f"unisono does not have the reduction {reduce_op.op}")
        if name == "avg" and any(map(_is_integer, tensors)):
            return TRUNCATED_AVG if self.comm.size > 1 else "sum"
        if name == "premul_sum":
            factor = float(reduce_op.__getstate__()[1])
            return Reduction("premul_sum", factor)  # torch 2.11 shows it nowhere else
        return name

    def _all_gather_each(
        self, wide: Sequence[list[torch.Tensor]], inputs: Tensors, async_op: bool = False
    ) -> Work | None:
        work = None
        for output, input in zip(wide, inputs, strict=True):
            work = self.comm.all_gather(output, input, async_op=async_op)
        return work  # they run in order, so the last one ends last

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Any:
        """All ranks' entries, those with the same index added up."""
        if self._op_of(opts, [tensor]) != "sum":
            raise ValueError("a sparse tensor can only be summed")
        mine = tensor.coalesce()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.comm.size)]
        self.comm.all_gather(counts, torch.tensor([mine._nnz()]))
        indices = [mine.indices().new_empty(mine.sparse_dim(), int(n)) for n in counts]
        values = [mine.values().new_empty(int(n), *mine.values().shape[1:]) for n in counts]
        self.comm.all_gather(indices, mine.indices().contiguous())
        self.comm.all_gather(values, mine.values().contiguous())
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())
        return self._work(FinishedWork(), [tensor], self._completer)

    # -- made on first use: a program whose calls all block has no works -------------------

    @functools.cached_property
    def _work(self) -> type[TorchWork]:
        from unisono.torch_backend.futures import TorchWork

        return TorchWork

    @functools.cached_property
    def _completer(self) -> Completer:
        from unisono.torch_backend.futures import Completer

        return Completer(self.comm)

    @functools.cached_property
    def _buffers(self) -> SharedBuffers:
        from unisono.torch_backend.shared_buffers import SharedBuffers

        return SharedBuffers(self.comm)

    @functools.cached_property
    def _message_completer(self) -> MessageCompleter:
        from unisono.torch_backend.futures import MessageCompleter

        return MessageCompleter(self.comm)


def our_group(group: Any) -> UnisonoProcessGroup | None:
    """The group of ours behind a torch process group, or behind its CPU tensors; None if there is
    none."""
    if HAS_PYTHON_BACKENDS and type(group) is ProcessGroup:
        try:
            group = group._get_backend(torch.device("cpu")).group
        except (AttributeError, RuntimeError):
            return None
    return group if isinstance(group, UnisonoProcessGroup) else None


def _cut(
    tensor: torch.Tensor, splits: Sequence[int], ranks: int
) -> torch.Tensor | list[torch.Tensor]:
    """The parts of a tensor along its first dimension; the tensor itself if they are even."""
    if splits:
        if len(splits) != ranks or min(splits) < 0 or sum(splits) != tensor.size(0):
            raise ValueError(
                f"split sizes {list(splits)} do not cut a tensor of shape {tuple(tensor.shape)} "
                f"for {ranks} ranks"
            )
        return list(torch.split(tensor, list(splits)))
    if tensor.dim() == 0 or tensor.size(0) % ranks:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be cut evenly for {ranks} ranks: "
            "pass split sizes"
        )
    return tensor
