"""What every call on CUDA tensors goes through: its meeting, its way, its end.

Every call begins with a meeting in the group's engine, marked as one of GPU tensors: so what
differs between ranks, a CPU tensor on one of them too, raises on all before any output changes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from sys import _getframe as _caller
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
    PeerCall,
    are_alike,
    bytes_given,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.base import (
    TRUNCATED_AVG,
    Communicator,
    Op,
    Work,
    dtype_name,
)
from unisono.comm.cuda.backward import WorksOfBackward, in_backward
from unisono.comm.cuda.conducting import CONDUCTOR, Task
from unisono.comm.cuda.driver import DriverError
from unisono.comm.cuda.messages import GpuMessages
from unisono.comm.cuda.regions import RankMemory, decode_memory, encode_memory
from unisono.comm.cuda.shared_gpu import STAGED_BYTES, SharedGpu
from unisono.comm.engine import GPU_MARK, Operation, Status, site_of
from unisono.comm.over_torch.executors import StreamExecutor
from unisono.comm.row_group import Rows
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.errors import CollectiveMismatch, GroupError, name_ranks

if TYPE_CHECKING:
    from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator

_OUTCOME_BYTES = 256
_Plan = Callable[[Sequence[RankMemory], Sequence[PeerCall]], list[Task]]
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class GpuCalls(GpuMessages):
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
        self._of_backward = WorksOfBackward()
        self._combiners: dict[Op, Callable[[torch.Tensor], None]] = {}

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._comm.timeout_s

    @property
    def _devices(self) -> Collection[str]:
        return ("cuda",)

    def _stream(self) -> int:
        """torch's current stream on this group's GPU."""
        assert self._device is not None
        return int(_raw_stream(self._device.index))

    def _ready(self, operation: Operation, *given: Any) -> Communicator:
        """What carries out calls on this group's CUDA tensors: this object, or NCCL. With the first
        call the ranks tell each other of their GPUs."""
        if self._shared is not None:
            return self
        if self._nccl is not None:
            return self._nccl
        from unisono.comm.cuda.meeting import meet_on_gpus

        try:
            self._device = _first_device(given)
        except LookupError as error:
            self._comm._refuse(operation, str(error), TypeError)
        way = meet_on_gpus(self._comm, self._device, operation)
        if isinstance(way, SharedGpu):
            self._shared = way
            return self
        self._nccl = way
        return way

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
        self,
        call: AnnouncedCall,
        job: Callable[[], None],
        tensors: list[Any],
        async_op: bool,
        *,
        leaves_record: bool = False,
    ) -> Work | None:
        self._check_devices(call.operation, tensors)
        if not leaves_record:
            job = functools.partial(self._record, call, job, tensors)
        if async_op and in_backward():
            so_far = torch.cuda.current_stream(self._device).record_event()
            begin = functools.partial(self._begin, call.operation, job, tensors, so_far)
            return self._of_backward.add(begin)
        self._of_backward.begin_all()
        if async_op:
            return self._begin(call.operation, job, tensors)
        with self._one_call(call.operation), torch.inference_mode():
            job()
        return None

    def _begin(
        self, operation: str, job: Callable[[], None], tensors: list[Any], after: Any = None
    ) -> Work:
        assert self._device is not None
        with self._one_call(operation):
            return self._streams.begin(job, operation, self._device, tensors, after)

    @contextlib.contextmanager
    def _one_call(self, operation: str) -> Iterator[None]:
        """One call at a time, on this group's GPU; the others hear of its failure."""
        with self._lock, torch.cuda.device(self._device), self._told_of_failure(operation):
            yield

    def _record(self, call: AnnouncedCall, job: Callable[[], None], tensors: Sequence[Any]) -> None:
        """Carry out a call that leaves one record, the engine's calls in its course none."""
        group = self._comm._group
        dtype = dtype_code(dtype_name(tensors[0])) if tensors else 0
        size_bytes = bytes_given(call, tensors, self.size)
        operation = Operation[call.operation.upper()]
        record = group.record_open(operation, 0, -1, dtype, size_bytes, group.calls + 1)
        group.record_cover(True)
        status = Status.ABORTED
        try:
            job()
            status = Status.OK
        finally:
            group.record_cover(False)
            group.record_end(record, status)

    def _check_devices(self, what: str, tensors: list[Any]) -> None:
        others = {str(tensor.device) for tensor in tensors if tensor.device != self._device}
        if others:
            self._refuse(
                what,
                f"tensors on {', '.join(sorted(others))} in a group whose CUDA calls are on "
                f"{self._device}: a rank keeps to one GPU",
            )
        if is_capturing():
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
            if self._shared and self._shared.orchestra and _has_failed(self._device):
                self._shared.orchestra.release()
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
        is_large = max(brought.bytes for brought in memory) > STAGED_BYTES
        if is_large and self._conducted(
            call, shared, lambda: plan(memory, peer_calls), memory, stream
        ):
            return
        shared.staging.start(stream)
        staged(shared)

    def _conducted(
        self,
        call: AnnouncedCall,
        shared: SharedGpu,
        plan: Callable[[], list[Task]],
        memory: Sequence[RankMemory],
        stream: int,
    ) -> bool:
        """Whether the conductor carries out a call in everybody's memory; the same on all ranks."""
        orchestra = shared.orchestra
        if orchestra is None:
            return False
        if not all(brought.can_map for brought in memory):
            unmapped = [rank for rank, brought in enumerate(memory) if not brought.can_map]
            why = f"{name_ranks(unmapped)}: {shared.exported_refusal()}"
            shared.warn_of_staging(self.rank, why)
            return False
        if not self._conduct(call, shared, plan, memory, stream):
            return False
        orchestra.follow(stream)
        return True

    def _conduct(
        self,
        call: AnnouncedCall,
        shared: SharedGpu,
        plan: Callable[[], list[Task]],
        memory: Sequence[RankMemory],
        stream: int,
    ) -> bool:
        """Whether the conductor could open all memory, and has given its stream the work."""
        said = numpy.zeros(_OUTCOME_BYTES, numpy.uint8)
        assert shared.orchestra is not None
        if self.rank == CONDUCTOR:
            try:
                located = shared.orchestra.locate(memory, plan())
            except DriverError as error:
                text = str(error).encode()[: _OUTCOME_BYTES - 1]
                said[: len(text)] = list(text)
            else:
                shared.orchestra.conduct(located, stream)
        self._engine(call, Operation.BROADCAST, said, said, CONDUCTOR)
        if not said[0]:
            return True
        shared.orchestra = None  # on every rank: from now on all calls are staged
        shared.warn_of_staging(self.rank, said.tobytes().rstrip(b"\0").decode())
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
            with contextlib.suppress(RuntimeError):  # the GPU may have failed
                torch.cuda.synchronize(self._device)  # others' memory may still be in use
            shared.close()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.close()


def _has_failed(device: Any) -> bool:
    """Whether a GPU does nothing any more for this process."""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def _first_device(given: Any) -> torch.device:
    """The GPU of the first tensor that lies on one."""
    for value in given:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cuda":
                return value.device
        elif isinstance(value, (list, tuple)):
            with contextlib.suppress(LookupError):
                return _first_device(value)
    raise LookupError("memory of a GPU is taken from torch tensors alone: pass torch.as_tensor(x)")
