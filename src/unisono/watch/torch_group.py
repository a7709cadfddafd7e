"""A torch process group that forwards every call to another one and keeps its records.

torch calls some methods from Python and some, DDP's among them, from C++; both come here first. No
call waits that would not have waited otherwise: a blocking call waits here instead of in torch; for
any other call, and for work that is only queued on a GPU, the next call and the watching thread
look whether it has finished.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.engine import Operation, Status, hide_files
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.shared_memory.ledger import Ledger
from unisono.comm.shared_memory.torch_reductions import reductions_by_hash
from unisono.torch_support import never_compiled

hide_files(os.path.dirname(torch.__file__))

_REDUCTIONS = {hash: number for number, hash in enumerate(reductions_by_hash())}
_OK, _FAILED = int(Status.OK), int(Status.ABORTED)
_OVER = int(Status.NOT_YET)  # in records: finished, or failed; torch warns if asked which
_LONE_REFERENCES = 2  # of a work that only we keep: our list's and getrefcount's own
_ABANDONED_S = 1.0
_ELSEWHERE = 0x7FFF  # not a rank of a ledger
_SPLITS_KEPT = 256  # calls: a mismatch is found within a second or two
PairSizes = tuple[list[int], list[int]]
"""What a rank sends to each rank, and expects from each, in elements."""


@functools.cache
def _code(dtype: torch.dtype) -> int:
    """torch's type as the engine writes it."""
    return dtype_code(str(dtype).removeprefix("torch."))


# The argument with what this rank sends (or receives, if it sends nothing), by torch's names.
COLLECTIVES: dict[str, tuple[Operation, int]] = {
    "allreduce": (Operation.ALL_REDUCE, 0),
    "allreduce_coalesced": (Operation.ALL_REDUCE, 0),
    "broadcast": (Operation.BROADCAST, 0),
    "reduce": (Operation.REDUCE, 0),
    "allgather": (Operation.ALL_GATHER, 1),
    "allgather_coalesced": (Operation.ALL_GATHER, 1),
    "all_gather_single": (Operation.ALL_GATHER, 1),
    "_allgather_base": (Operation.ALL_GATHER, 1),
    "all_gather_single_coalesced": (Operation.ALL_GATHER, 1),
    "allgather_into_tensor_coalesced": (Operation.ALL_GATHER, 1),
    "gather": (Operation.GATHER, 1),
    "scatter": (Operation.SCATTER, 0),
    "reduce_scatter": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_single": (Operation.REDUCE_SCATTER, 1),
    "_reduce_scatter_base": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (Operation.REDUCE_SCATTER, 1),
    "alltoall": (Operation.ALL_TO_ALL, 1),
    "all_to_all_single": (Operation.ALL_TO_ALL, 1),
    "alltoall_base": (Operation.ALL_TO_ALL, 1),
    "barrier": (Operation.BARRIER, -1),
}

_ProcessGroup: Any = dist.ProcessGroup


class WatchedProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """`inner` moves the data; `ledger` has its `members` on this machine; `explain` makes a report
    of a failed call, for its exception; `leave` is called before the records go."""

    def __init__(
        self,
        inner: Any,
        ledger: Ledger,
        members: Sequence[int],
        check: bool,
        explain: Callable[[Any], Any],
        leave: Callable[[], None],
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.ledger = ledger
        self._ledger_ranks = {rank: ledger_rank for ledger_rank, rank in enumerate(members)} | {
            -1: -1
        }
        self._begin, self._end = ledger.begin, ledger.end
        self._queues = "nccl" in {
            inner._get_backend(device).name() for device in inner._device_types
        }
        self._explain = explain
        self._leave = leave
        self._splits: deque[tuple[int, PairSizes]] = deque(maxlen=_SPLITS_KEPT)
        self._flying: deque[tuple[int, Any, float]] = deque()  # since when: of messages
        self._mark: _Mark | None = None
        methods: dict[str, Any] = {name: getattr(inner, name, None) for name in COLLECTIVES}
        self._numbers = itertools.count(1)
        # What every call needs, in one attribute: to look one up takes a tenth of a microsecond.
        how = ledger.begin_given, ledger.end, check, self._queues
        self._parts: Any = methods, self._flying, self._numbers, *how, None
        self.choose_path()
        self._name = inner.group_name
        self._description = inner.group_desc

    notes_ends = False
    """Whether the end of a call is recorded as it ends, by its Future, not when somebody looks."""

    def choose_path(self) -> None:
        """Follow works from now on as `notes_ends` says."""
        notes = self.notes_ends and not self._queues
        self._parts = *self._parts[:-1], self._note_end if notes else self._flying.append

    # -- identity --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return str(self.inner._get_backend_name())

    def getGroupName(self) -> str:
        return str(self._name)

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)

    def getGroupDesc(self) -> str:
        return str(self._description)

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        self.inner._set_group_desc(description)

    def get_group_store(self) -> Any:
        return self.inner.get_group_store()

    def __repr__(self) -> str:
        return f"<WatchedProcessGroup over {self.inner!r}>"

    # -- life ------------------------------------------------------------------------------------

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.retire()
        self.ledger.tell_closing()  # the records that other hosts get say it, too
        self._leave()
        self.inner.shutdown()
        self.ledger.close()

    def monitored_barrier(self, *args: Any, **named: Any) -> None:
        """gloo's own, which names a missing rank; it blocks."""
        record = self._begin(Operation.BARRIER, 0, -1, 0, 0, next(self._numbers))
        try:
            self.inner.monitored_barrier(*args, **named)
        except Exception as error:
            self._fail(record, error)
            raise
        self._end(record, _OK)

    def tell_splits(self, number: int) -> dict[int, PairSizes | None]:
        """Tell the others how an all_to_all was split here; returns what each rank of this host has
        told."""
        known = dict(self._splits).get(number)
        if known is not None:
            self.ledger.tell(number, json.dumps(known))
        told: dict[int, PairSizes | None] = {}
        for rank, text in self.ledger.told(number).items():
            with contextlib.suppress(ValueError):  # too long for a note
                told[rank] = json.loads(text) if text else None
        return told | ({self.rank(): known} if known else {})

    # -- messages --------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._message(self.inner.send(tensors, dst, tag), Operation.SEND, tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._message(self.inner.recv(tensors, src, tag), Operation.RECV, tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        work = self.inner.recv_anysource(tensors, tag)
        return self._message(work, Operation.RECV, tensors, -1, tag)

    def _message(self, work: Any, operation: int, tensors: Any, peer: int, tag: int) -> Any:
        dtype, size_bytes = _measure(tensors)
        ledger_rank = self._ledger_ranks.get(peer, _ELSEWHERE)
        record = self._begin(operation, 0, ledger_rank, dtype, size_bytes, tag)
        if work is not None:
            self._flying.append((record, work, time.monotonic()))
        return work

    def _begin_split(self, tensors: Any, given: Sequence[Any], number: int) -> int | None:
        """The record of an all_to_all, with the balance of its parts in the fields for root and
        reduction."""
        splits = _splits(given, self.size())
        if splits is None or len(self._ledger_ranks) <= self.size():  # ranks that we cannot see
            return None
        self._splits.append((number, splits))
        self.ledger.tell(number, json.dumps(splits))  # gloo may end the process at once
        mine, total = self.rank(), 0
        for rank, (gives, wants) in enumerate(zip(*splits, strict=True)):
            total += gives * _weight(mine, rank) - wants * _weight(rank, mine)
        root = (total & 0xFFFF ^ 0x8000) - 0x8000
        reduction = total >> 16 & 0xFF
        return int(self._begin(Operation.ALL_TO_ALL, reduction, root, *_measure(tensors), number))

    # -- how it is done --------------------------------------------------------------------------

    def _fail(self, record: int, error: Exception) -> None:
        report = self._explain(self)
        self._end(record, _FAILED)
        if report is not None:
            error.report = report  # type: ignore[attr-defined]
            error.add_note(f"unisono.watch: {report}")

    def _note_end(self, entry: tuple[int, Any, float]) -> None:
        record = entry[0]
        try:
            future = entry[1].get_future()
        except RuntimeError:  # it has none
            self._flying.append(entry)
        else:
            future.add_done_callback(lambda _: self._end(record, _OVER))

    def _follow_queue(self, record: int, work: Any) -> None:
        """The call has finished when the GPU is done; nccl returns no work for a blocking call. A
        call that is captured in a CUDA graph does not run now, and its end must not be queried."""
        if _captures and torch.cuda.is_current_stream_capturing():
            self._end(record, _OVER)
            return
        if work is None:
            stream, work = _current_stream(), self._mark
            if work is None or work.is_set or work.stream != stream:
                work = self._mark = _Mark(*stream)
        self._flying.append((record, work, 0.0))

    def retire(self) -> bool:
        """Record the ends of finished calls, in the watching thread; returns whether any is in
        progress. Taking from the list is atomic, so the program's threads need no lock."""
        flying, queues = self._flying, self._queues
        if not flying:
            return False
        allowed = _may_query_gpu() if queues else contextlib.nullcontext(True)
        with allowed as may, contextlib.suppress(IndexError):  # the program has taken the last one
            for _ in range(len(flying) if may else 0):
                entry = flying.popleft()
                if entry[1].is_completed() or (not queues and _is_abandoned(entry)):
                    self._end(entry[0], _OVER)
                elif queues:  # a GPU runs them in order
                    flying.appendleft(entry)
                    break
                else:
                    flying.append(entry)
        return bool(flying)


class _Mark:
    """A mark after everything queued on a GPU so far. Setting it takes longer than many calls: the
    watching thread does it when it first asks, for all calls since the last mark."""

    def __init__(self, device: int, stream: int) -> None:
        self.stream = device, stream
        self.is_set = False
        self._event: Any = None

    def is_completed(self) -> bool:
        """Whether the GPU has reached it."""
        if self.is_set:
            return bool(self._event.query())
        self.is_set = True
        cuda: Any = torch.cuda
        device, stream = self.stream
        self._event = cuda.Event()
        queue = cuda.ExternalStream(stream, device) if stream else cuda.default_stream(device)
        self._event.record(queue)
        return False


def _current_stream() -> tuple[int, int]:
    """Device and address of the current stream, in a tenth of the time of
    torch.cuda.current_stream()."""
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


def _is_abandoned(entry: tuple[int, Any, float]) -> bool:
    """A message is only finished once it was waited for: one that only we still hold never will be.
    (We do not query how a work ended because torch warns about that.)"""
    lone = entry[2] and sys.getrefcount(entry[1]) <= _LONE_REFERENCES
    return bool(lone) and time.monotonic() - entry[2] > _ABANDONED_S


def _measure(tensors: Any) -> tuple[int, int]:
    """The dtype of one tensor or of many, also in nested lists, and their bytes in all."""
    if isinstance(tensors, torch.Tensor):
        return _code(tensors.dtype), 0 if tensors.is_sparse else tensors.nbytes
    dtype, total = 0, 0
    for tensor in tensors or ():
        dtype, size_bytes = _measure(tensor)
        total += size_bytes
    return dtype, total


def _weight(giver: int, taker: int) -> int:
    """A number for each pair of ranks, so that two errors cancel out only by accident."""
    return (giver * 0x9E3779B1 + taker * 0x85EBCA77 + 0xC2B2AE3D) >> 7 | 1


def _splits(given: Sequence[Any], size: int) -> PairSizes | None:
    """What this rank sends to each and expects from each, in elements; None if unknown."""
    output, source, *more = given
    if not isinstance(output, torch.Tensor):
        sizes = [tensor.numel() for tensor in source], [tensor.numel() for tensor in output]
        return sizes if len(sizes[0]) == len(sizes[1]) == size else None
    wanted, gives = (more[0], more[1]) if len(more) > 1 else ((), ())
    return _parts(source, gives, size), _parts(output, wanted, size)


def _parts(tensor: Any, splits: Sequence[int], size: int) -> list[int]:
    rows = splits or [tensor.shape[0] // size] * size
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 1
    return [count * row for count in rows]


def _describe(operation: int, tensors: Any, options: Any) -> tuple[int, int, int, int, int]:
    """Operation, reduction, root, type and bytes of a call."""
    reduction = _REDUCTIONS.get(hash(getattr(options, "reduceOp", None)), 0)
    return operation, reduction, getattr(options, "rootRank", -1), *_measure(tensors)


def _forward(name: str, operation: int, at: int) -> Callable[..., Any]:
    """The method of this name. It must add less than four microseconds to a call."""
    is_split = operation == Operation.ALL_TO_ALL

    def method(self: WatchedProcessGroup, *given: Any, **named: Any) -> Any:
        methods, flying, numbers, begin, end, checks, queues, follow = self._parts
        try:
            while flying and not queues:  # do not query a GPU in the middle of its work
                entry = flying.popleft()
                if not entry[1].is_completed():
                    flying.appendleft(entry)
                    break
                end(entry[0], _OVER)
        except IndexError:  # the watching thread has just taken the last one
            pass
        options: Any = given[-1] if given else named.get("opts")
        tensors = given[at] if at >= 0 else None
        number = next(numbers)
        if is_split:
            record = self._begin_split(tensors, given, number)
        else:
            record = begin(operation, tensors, options, number)
        if record is None:
            record = self._begin(*_describe(operation, tensors, options), number)
        try:
            if checks:
                self.ledger.check(*_describe(operation, tensors, options), record)
            call = methods[name]
            work = call(*given, **named) if named else call(*given)
            try:
                blocks = not options.asyncOp
            except AttributeError:  # short forms have no options
                blocks = False
            if blocks and work is not None:
                work.wait()
        except Exception as error:
            self._fail(record, error)
            raise
        if queues:
            self._follow_queue(record, work)
        elif work is None or blocks:
            end(record, _OK)
        else:
            follow((record, work, 0.0))
        return None if blocks else work

    method.__name__ = method.__qualname__ = name
    return method


for _name, (_operation, _at) in COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(WatchedProcessGroup, _name, _forward(_name, int(_operation), _at))
never_compiled(WatchedProcessGroup)


# -- CUDA graphs: querying the GPU during a capture would break it ------

_capturing = threading.Lock()
_captures = 0
"""How many threads are capturing a graph."""


@contextlib.contextmanager
def _may_query_gpu() -> Iterator[bool]:
    """Whether the GPU may be queried; no capture starts meanwhile."""
    with _capturing:
        yield _captures == 0


def notice_captures() -> None:
    """Count the captures of graphs from now on."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    if hasattr(begin, "is_noticed"):
        return

    @functools.wraps(begin)
    def capture_begin(*args: Any, **named: Any) -> Any:
        _count_captures(1)
        try:
            return begin(*args, **named)
        except BaseException:
            _count_captures(-1)
            raise

    @functools.wraps(end)
    def capture_end(*args: Any, **named: Any) -> Any:
        try:
            return end(*args, **named)
        finally:
            _count_captures(-1)

    capture_begin.is_noticed = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def _count_captures(change: int) -> None:
    global _captures
    with _capturing:
        _captures += change
