"""The stages of every call on CUDA tensors: meeting, choice of path, end.

Every call begins with a meeting in the group's engine, marked as one of GPU tensors: so any
difference between ranks, even a CPU tensor on one, raises on all before any output changes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import torch

from unisono.comm.cuda.backward import WorksOfBackward, in_backward
from unisono.comm.cuda.conducting import CONDUCTOR, Orchestra, Task
from unisono.comm.cuda.driver import Driver, DriverError
from unisono.comm.cuda.regions import ExportedMemory, RankMemory, decode_memory, encode_memory
from unisono.comm.cuda.staging import RELAY_BYTES, PinnedStaging, Relay
from unisono.comm.engine import GPU_MARK
from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.on_rows.announced_calls import (
    AnnouncedCall,
    are_alike,
    bytes_given,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.on_rows.row_transport import Rows
from unisono.comm.over_torch.stream_executor import StreamExecutor
from unisono.comm.reductions import Reduction
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.tensors import dtype_name
from unisono.comm.work import Work
from unisono.errors import CollectiveMismatch, GroupError, SegmentError, name_ranks

if TYPE_CHECKING:
    from unisono.comm.shared_memory.engine_transport import EngineTransport

STAGED_BYTES = 512 << 10
"""Calls that move at most this much go through pinned memory: a turn of every rank on the GPU
would take longer. (An all_reduce has a limit of its own.)"""

_PINNED_BYTES = 8 * STAGED_BYTES
_OUTCOME_BYTES = 256
_log = logging.getLogger("unisono")
_Plan = Callable[[Sequence[RankMemory], Sequence[AnnouncedCall]], list[Task]]
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class CudaCalls:
    """How the calls of one rank run on the GPU that it shares with its group: in pinned memory
    or, where the driver allows it, by one rank in all ranks' memory (`orchestra`; None: all
    calls are staged). `engine` is the group's shared memory."""

    def __init__(
        self,
        engine: EngineTransport,
        device: torch.device,
        driver: Driver | None,
        orchestra: Orchestra | None,
    ) -> None:
        self.engine = engine
        self.rank = engine.rank
        self.size = engine.size
        self.name = engine.name
        self.device = device
        self.staging = PinnedStaging(driver, _PINNED_BYTES, self._raise_if_ended)
        self._driver = driver
        self._relays: list[Relay | None] = []  # one, once it is needed
        self.orchestra = orchestra
        self._exported = ExportedMemory(driver)
        self._has_warned = False
        self.lock = threading.RLock()
        self.of_backward = WorksOfBackward()
        self._streams = StreamExecutor()

    def _raise_if_ended(self) -> None:
        ending = self.engine.ending("a call on CUDA tensors")
        if ending is not None:
            raise ending

    def stream(self) -> int:
        """torch's current stream on this group's GPU."""
        return int(_raw_stream(self.device.index))

    def carry_out(
        self,
        call: AnnouncedCall,
        job: Callable[[], None],
        tensors: list[Any],
        async_op: bool,
        *,
        leaves_record: bool = False,
    ) -> Work | None:
        if not leaves_record:
            job = functools.partial(self._record, call, job, tensors)
        if async_op and in_backward():
            so_far = torch.cuda.current_stream(self.device).record_event()
            begin = functools.partial(self._begin, call.operation, job, tensors, so_far)
            return self.of_backward.add(begin)
        self.of_backward.begin_all()
        if async_op:
            return self._begin(call.operation, job, tensors)
        with self._one_call(call.operation), torch.inference_mode():
            job()
        return None

    def _begin(
        self, operation: str, job: Callable[[], None], tensors: list[Any], after: Any = None
    ) -> Work:
        with self._one_call(operation):
            return self._streams.begin(job, operation, self.device, tensors, after)

    @contextlib.contextmanager
    def _one_call(self, operation: str) -> Iterator[None]:
        """One call at a time, on this group's GPU; if it fails, the others are told."""
        with self.lock, torch.cuda.device(self.device), self.told_of_failure(operation):
            yield

    def _record(self, call: AnnouncedCall, job: Callable[[], None], tensors: Sequence[Any]) -> None:
        """Run a call with one record; the engine's calls within it leave none."""
        group = self.engine.group
        dtype = dtype_code(dtype_name(tensors[0])) if tensors else 0
        size_bytes = bytes_given(call, tensors, self.size)
        operation = Operation[call.operation.upper()]
        record = group.record_open(operation, 0, -1, dtype, size_bytes, group.state()["calls"] + 1)
        group.record_cover(True)
        status = Status.ABORTED
        try:
            job()
            status = Status.OK
        finally:
            group.record_cover(False)
            group.record_end(record, status)

    @contextlib.contextmanager
    def told_of_failure(self, what: str) -> Iterator[None]:
        """A rank that cannot continue, because its GPU is out of memory or has failed, ends the
        group, so that no rank waits for it."""
        try:
            yield
        except (GroupError, ValueError, TypeError):
            raise
        except (DriverError, RuntimeError) as error:  # torch's OutOfMemoryError is one
            reason = str(error).strip().partition("\n")[0]
            self.engine.abort(f"rank {self.rank} could not run {what} on its GPU: {reason}")
            if self.orchestra and _has_failed(self.device):
                self.orchestra.release()
            raise

    def follow(
        self,
        call: AnnouncedCall,
        rows: Rows,
        moved_bytes: int,
        plan: _Plan,
        staged: Callable[[], None],
        conductor: int = CONDUCTOR,
    ) -> None:
        """Meet the others; then let the conductor follow the plan if the call is large and it
        can open all memory; otherwise go through pinned memory."""
        stream = self.stream()
        if self.orchestra is not None:
            self.orchestra.arrive(stream, conductor)
        memory, peer_calls = self._meet(call, rows, moved_bytes, conductor)
        is_large = max(brought.bytes for brought in memory) > STAGED_BYTES
        tasks = functools.partial(plan, memory, peer_calls)
        if is_large and self.conducted(call, tasks, memory, stream, conductor):
            return
        self.staging.start(stream)
        staged()

    def conducted(
        self,
        call: AnnouncedCall,
        plan: Callable[[], list[Task]],
        memory: Sequence[RankMemory],
        stream: int,
        conductor: int = CONDUCTOR,
    ) -> bool:
        """Whether the conductor runs a call in all ranks' memory: it could open all of it, and
        has queued the work on its stream. The same on all ranks."""
        orchestra = self.orchestra
        if orchestra is None:
            return False
        unmapped = [rank for rank, brought in enumerate(memory) if not brought.can_map]
        if unmapped:
            why = self._exported.refusal or "their memory cannot be opened by other processes"
            self.warn_of_staging(f"{name_ranks(unmapped)}: {why}")
            return False
        said = numpy.zeros(_OUTCOME_BYTES, numpy.uint8)
        if self.rank == conductor:
            try:
                located = orchestra.locate(memory, plan())
            except DriverError as error:
                text = str(error).encode()[: _OUTCOME_BYTES - 1]
                said[: len(text)] = list(text)
            else:
                orchestra.conduct(located, stream)
        self.run_engine(call, Operation.BROADCAST, said, said, conductor)
        if said[0]:
            self.orchestra = None  # on every rank: from now on all calls are staged
            self.warn_of_staging(said.tobytes().rstrip(b"\0").decode())
            return False
        orchestra.follow(stream, conductor)
        return True

    def relayed(self, call: AnnouncedCall, rows: Rows, root: int) -> bool:
        """Whether a large broadcast ran through pinned memory that all ranks share: the driver
        lets each of them use it."""
        if sum(row.nbytes for row in rows) <= STAGED_BYTES:
            return False
        if not self._relays:
            self._relays.append(self._open_relay(call))
        (relay,) = self._relays
        if relay is not None:
            meet = functools.partial(self.engine.barrier, None, False)
            relay.carry(rows, self.rank == root, self.stream(), meet, self._raise_if_ended)
        return relay is not None

    def _open_relay(self, call: AnnouncedCall) -> Relay | None:
        relay = None
        with contextlib.suppress(SegmentError, DriverError):
            memory = self.engine.allocate(0 if self.rank else RELAY_BYTES)
            if memory is not None and self._driver is not None:
                relay = Relay(self._driver, memory)
        has_one = numpy.array([relay is not None], numpy.uint8)
        least = Reduction("min")
        self.run_engine(call, Operation.ALL_REDUCE, has_one, has_one, GPU_MARK, least)
        if relay is not None and not has_one[0]:
            relay.close()
        return relay if has_one[0] else None

    def _meet(
        self, call: AnnouncedCall, rows: Rows, moved_bytes: int, conductor: int
    ) -> tuple[list[RankMemory], list[AnnouncedCall]]:
        """The memory of each rank. Raises CollectiveMismatch if the calls differ."""
        mine = self.describe(rows, moved_bytes)
        said = encode_call(call, self.size)
        length = said.numel()
        most = max(self.size + 1, len(rows))
        encoded = bytearray(encode_memory(mine, most))
        message = torch.cat([said, torch.frombuffer(encoded, dtype=torch.uint8)])
        everything = torch.empty(self.size, message.numel(), dtype=torch.uint8)
        self.run_engine(call, Operation.ALL_GATHER, everything, message, GPU_MARK)
        calls = [everything[rank, :length] for rank in range(self.size)]
        peer_calls = [decode_call(row, self.size) for row in calls]
        error = None if are_alike(calls) else find_mismatch(peer_calls, self.rank, self.name)
        if error is not None:
            self._end(error)
        return self.read_memory(everything[:, length:].numpy(), most, conductor), peer_calls

    def read_memory(
        self, told: Any, most_regions: int, conductor: int = CONDUCTOR
    ) -> list[RankMemory]:
        """The memory of each rank, from a row of bytes; only the conductor needs addresses."""
        wanted = most_regions if self.rank == conductor else 0
        memory = [decode_memory(row.tobytes(), wanted) for row in told]
        if self.orchestra is not None:
            self.orchestra.forget(memory)
        return memory

    def _end(self, error: CollectiveMismatch) -> NoReturn:
        """All ranks have detected this: it ends the group on each of them."""
        exceptions = self.engine.exceptions
        if exceptions.cause is None:
            exceptions.cause = error
        self.engine.abort(str(error).partition("\n")[0])
        raise exceptions.failure(error.args[0])

    def describe(self, rows: Sequence[torch.Tensor], moved_bytes: int) -> RankMemory:
        """What the others need to know about this rank's rows."""
        places = [(row.data_ptr(), row.nbytes) for row in rows]
        return self._exported.describe(places, moved_bytes, self.orchestra is not None)

    def warn_of_staging(self, why: str) -> None:
        """Rank 0 warns once that large calls are slow."""
        if self.rank == 0 and not self._has_warned:
            _log.warning(
                "unisono: large calls on CUDA tensors go through CPU memory, because the driver "
                "does not let processes open each other's memory (%s). MIG and sandboxes are known "
                "reasons: docs/cuda.md",
                why,
            )
        self._has_warned = True

    def run_engine(
        self,
        call: AnnouncedCall,
        operation: Operation,
        output: Any,
        input: Any,
        root: int,
        op: Reduction | None = None,
    ) -> None:
        """A call of the engine as part of one of ours."""
        reduction = (None,) if op is None else (op.number, op.factor)
        status = self.engine.group.run(operation, output, input, root, *reduction)
        if status:
            raise self.engine.call_error(status, Operation[call.operation.upper()], op, input)

    def close(self) -> None:
        """Release what calls on CUDA tensors needed."""
        with contextlib.suppress(RuntimeError):  # the GPU may have failed
            torch.cuda.synchronize(self.device)  # peers' memory may still be in use
        opened = [each for each in (self.orchestra, *self._relays) if each is not None]
        self.orchestra, self._relays = None, []
        for each in opened:
            with contextlib.suppress(RuntimeError):
                each.close()


def _has_failed(device: Any) -> bool:
    """Whether a GPU no longer works for this process."""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False
