"""The few things that this implementation asks of a process group: rows in one piece, to the end.

They are asked of the group itself and not of `torch.distributed`'s functions: these want global
ranks, and have other names from one version of torch to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from unisono.comm.over_torch.backend_reductions import reduce_op
from unisono.comm.reductions import Reduction
from unisono.comm.transport import DEFAULT_TIMEOUT_S
from unisono.errors import UnisonoError

_AllToAllOptions: Any = AllToAllOptions  # torch's stubs do not know its fields
ON_STREAMS = frozenset(("nccl", "xccl"))
"""Backends whose calls are over, for the caller, once the device has them in its queue."""


class ProcessGroupCalls:
    """A process group, held on to only where it is ours. Ranks are ranks of the group."""

    def __init__(self, group: Any, keep: bool) -> None:
        self._group: Callable[[], Any] = (lambda: group) if keep else weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.backends = _backends(group)
        self.timeout_s = _timeout_s(group, self.backends)

    @property
    def group(self) -> Any:
        """The process group."""
        group = self._group()
        if group is None:
            raise UnisonoError("torch.distributed has destroyed the process group")
        return group

    def release(self) -> None:
        """Let go of a process group that nobody else holds: its connections end with it."""
        self._group = lambda: None

    def backend(self, device: torch.device) -> str:
        """The name of the backend that serves a device."""
        return self.backends.get(device.type, next(iter(self.backends.values())))

    # -- what is over when they return (for the device's stream, where the backend works on one) --

    def all_reduce(self, row: torch.Tensor, op: Reduction, timeout_s: float) -> None:
        options = _options(AllreduceOptions(), timeout_s)
        options.reduceOp = reduce_op(op, self.backend(row.device))
        _wait(self.group.allreduce([row], options))

    def reduce(self, row: torch.Tensor, root: int, op: Reduction, timeout_s: float) -> None:
        """`row` is scratch on the other ranks."""
        options = _options(ReduceOptions(), timeout_s)
        options.reduceOp, options.rootRank = reduce_op(op, self.backend(row.device)), root
        _wait(self.group.reduce([row], options))

    def broadcast(
        self, rows: Sequence[torch.Tensor], roots: Sequence[int], timeout_s: float
    ) -> None:
        """One row, or several at once, from a root each."""
        works = []
        for row, root in zip(rows, roots, strict=True):
            options = _options(BroadcastOptions(), timeout_s)
            options.rootRank, options.rootTensor = root, 0
            works.append(self.group.broadcast([row], options))
        for work in works:
            _wait(work)

    def all_gather(self, rows: Sequence[torch.Tensor], row: torch.Tensor, timeout_s: float) -> None:
        """`rows` are of one length."""
        options = _options(AllgatherOptions(), timeout_s)
        _wait(self.group.allgather([list(rows)], [row], options))

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Reduction, timeout_s: float
    ) -> None:
        """`parts` are of one length."""
        options = _options(ReduceScatterOptions(), timeout_s)
        options.reduceOp = reduce_op(op, self.backend(output.device))
        _wait(self.group.reduce_scatter([output], [list(parts)], options))

    def exchange(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Send so many elements of `input` to each rank, and receive so many from each."""
        call = getattr(self.group, "all_to_all_single", None) or self.group.alltoall_base
        options = _options(_AllToAllOptions(), timeout_s)
        _wait(call(output, input, list(from_each), list(to_each), options))

    def barrier(self, timeout_s: float) -> None:
        options = _options(BarrierOptions(), timeout_s)
        if "cpu" not in self.backends:
            options.device = torch.device("cuda", torch.cuda.current_device())
            options.device_ids = [torch.cuda.current_device()]
        _wait(self.group.barrier(options))


def _backends(group: Any) -> dict[str, str]:
    """Which backend serves which kind of device."""
    return {
        device.type: str(group._get_backend(device).name()).lower()
        for device in group._device_types
    }


def _timeout_s(group: Any, backends: dict[str, str]) -> float:
    for device in backends:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return DEFAULT_TIMEOUT_S


def _options(options: Any, timeout_s: float) -> Any:
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
