"""A torch process group that forwards every call to another one and keeps its records.

torch calls some methods from Python and some, DDP's among them, from C++; both come here first.
Nothing waits that would not have waited: a call that torch makes blocking is waited for here and
not in torch; for any other, the end is looked for at the next call and by the watching thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.base import REDUCTIONS
from unisono.comm.engine import Operation, Status, hide_files
from unisono.comm.ledger import Ledger
from unisono.comm.torch_compile import never_compiled

hide_files(os.path.dirname(torch.__file__))

_Type: Any = dist.ReduceOp.RedOpType
_REDUCTIONS = {
    hash(getattr(_Type, name.upper())): number for number, name in enumerate(REDUCTIONS)
} | {hash(_Type.PREMUL_SUM): len(REDUCTIONS)}
_OK, _FAILED = int(Status.OK), int(Status.ABORTED)
_LONE_REFERENCES = 3  # to a work that only we keep: our list's, our variable's, the count's own
_ABANDONED_S = 1.0


def _codes() -> dict[torch.dtype, int]:
    """torch's types as DLPack writes them: code, bits, lanes."""
    kinds = {"float": 2, "bfloat": 4, "int": 0, "uint": 1, "complex": 5}
    codes = {torch.bool: 6 | 8 << 8 | 1 << 16}
    for kind, code in kinds.items():
        for bits in (8, 16, 32, 64, 128):
            dtype = getattr(torch, f"{kind}{bits}", None)
            if isinstance(dtype, torch.dtype):
                codes[dtype] = code | bits << 8 | 1 << 16
    return codes


_CODES = _codes()
_UNKNOWN = 0xFF | 8 << 8 | 1 << 16

# Which argument holds what this rank gives (or takes, where it gives nothing), by torch's names.
_COLLECTIVES: dict[str, tuple[Operation, int]] = {
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
    """`inner` moves the data; `explain` makes a report of a failed call, for its exception; `leave`
    is called before the records go."""

    def __init__(
        self,
        inner: Any,
        ledger: Ledger,
        check: bool,
        explain: Callable[[Any], Any],
        leave: Callable[[], None],
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.ledger = ledger
        self._check = check
        self._explain = explain
        self._leave = leave
        self._calls = 0
        self._flying: deque[tuple[int, Any, bool, float]] = deque()
        self._retiring = threading.Lock()
        self._name = inner.group_name
        self._description = inner.group_desc

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
        self._leave()
        self.inner.shutdown()
        self.ledger.close()

    def monitored_barrier(self, *args: Any, **named: Any) -> None:
        """gloo's own, which names a rank that is missing; it blocks."""
        record = self._open(Operation.BARRIER, 0, -1, 0, 0)
        try:
            self.inner.monitored_barrier(*args, **named)
        except Exception as error:
            self._fail(record, error)
            raise
        self.ledger.end(record, _OK)

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
        record = self.ledger.begin(operation, 0, peer, dtype, size_bytes, tag)
        if work is not None:
            self._flying.append((record, work, True, time.monotonic()))
        return work

    # -- how it is done --------------------------------------------------------------------------

    def _open(self, operation: int, reduction: int, root: int, dtype: int, size_bytes: int) -> int:
        if self._flying:
            self.retire()
        self._calls += 1
        record = self.ledger.begin(operation, reduction, root, dtype, size_bytes, self._calls)
        if self._check:
            self.ledger.check(operation, reduction, root, dtype, size_bytes, record)
        return record

    def _run(self, method: Callable[..., Any], operation: int, at: int, given: Any) -> Any:
        options = given[-1] if given else None
        dtype, size_bytes = _measure(given[at]) if 0 <= at < len(given) else (0, 0)
        reduction = _REDUCTIONS.get(hash(getattr(options, "reduceOp", None)), 0)
        root = getattr(options, "rootRank", -1)
        record = self._open(operation, reduction, root, dtype, size_bytes)
        try:
            work = method(*given)
            if work is not None and not getattr(options, "asyncOp", True):
                work.wait()
                work_is_over = True
            else:
                work_is_over = work is None
        except Exception as error:
            self._fail(record, error)
            raise
        if work_is_over:
            self.ledger.end(record, _OK)
        else:
            self._flying.append((record, work, False, 0.0))
        return work

    def _fail(self, record: int, error: Exception) -> None:
        report = self._explain(self)
        self.ledger.end(record, _FAILED)
        if report is not None:
            error.report = report  # type: ignore[attr-defined]
            error.add_note(f"unisono.watch: {report}")

    def retire(self) -> bool:
        """Write down the ends of calls that are over; whether any is still under way."""
        if self._retiring.acquire(blocking=False):
            try:
                for _ in range(len(self._flying)):
                    entry = self._flying.popleft()
                    if not self._retire(*entry):
                        self._flying.append(entry)
            finally:
                self._retiring.release()
        return bool(self._flying)

    def _retire(self, record: int, work: Any, is_message: bool, began_s: float) -> bool:
        """Whether a call is over. A message says so only once it was waited for: one that nobody
        but us knows any more never will. How it ended is not asked: torch warns who asks."""
        over = work.is_completed() or (
            is_message
            and sys.getrefcount(work) <= _LONE_REFERENCES
            and time.monotonic() - began_s > _ABANDONED_S
        )
        if over:
            self.ledger.end(record, _OK)
        return bool(over)


def _measure(tensors: Any) -> tuple[int, int]:
    """The type of one tensor or of many, lists of lists too, and their bytes together."""
    if isinstance(tensors, torch.Tensor):
        size_bytes = 0 if tensors.is_sparse else tensors.numel() * tensors.element_size()
        return _CODES.get(tensors.dtype, _UNKNOWN), size_bytes
    if len(tensors) == 1:
        return _measure(tensors[0])
    dtype, total = 0, 0
    for tensor in tensors:
        dtype, size_bytes = _measure(tensor)
        total += size_bytes
    return dtype, total


def _forward(name: str, operation: int, at: int) -> Callable[..., Any]:
    def method(self: WatchedProcessGroup, *given: Any, **named: Any) -> Any:
        inner = getattr(self.inner, name)
        if named:
            return self._run(lambda *g: inner(*g, **named), operation, at, given)
        return self._run(inner, operation, at, given)

    method.__name__ = method.__qualname__ = name
    return method


for _name, (_operation, _at) in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(WatchedProcessGroup, _name, _forward(_name, int(_operation), _at))
never_compiled(WatchedProcessGroup)
