"""DDP's communication hooks, which get each full bucket: in shared memory, by which its pages are
replaced on the first call; or in few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.reductions import WIRES, WireFormat
from unisono.comm.shared_memory.shared_pages import SharedPages


def share_ddp_buckets(model: DistributedDataParallel) -> None:
    """Average the gradients of a `model` in DDP in place: its buckets become memory that all ranks
    have mapped. All ranks call it, before the first backward. The gradients are bitwise those of
    plain DDP.

    It uses DDP's communication hook, of which a model has only one. Buckets on a GPU are left
    unchanged.

    Raises TypeError if `model` is not a DDP model, ValueError if its group is not on the backend
    "unisono", and torch's RuntimeError if it already has a hook. Cost: an all_reduce of the
    gradients per step, without copies. See also `compress_ddp_gradients`.

    >>> from torch.nn.parallel import DistributedDataParallel
    >>> import torch.distributed as dist
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=dist.group.WORLD)
    >>> unisono.training.share_ddp_buckets(model)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    """
    group = _group_of(model, "share_ddp_buckets")
    # A lambda, because DDP rejects other annotations than its own.
    model.register_comm_hook(_SharedBuckets(group), lambda state, bucket: state.average(bucket))


def compress_ddp_gradients(model: DistributedDataParallel, wire: WireFormat = "int8") -> None:
    """Average the gradients of a `model` in DDP over hosts in a `wire` format: "int8", "fp8" or
    "bfloat16". What a step loses is added in the next. All ranks call it, before the first
    backward; it is DDP's communication hook, of which a model has only one.

    Raises TypeError if `model` is not a DDP model, ValueError for another format, or if its group
    is not on the backend "unisono", and torch's RuntimeError if it already has a hook. Cost: an
    all_reduce of the gradients per step; between hosts a quarter of float32's bytes by int8 and
    fp8, half by bfloat16. See also `share_ddp_buckets`.

    >>> from torch.nn.parallel import DistributedDataParallel
    >>> import torch.distributed as dist
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=dist.group.WORLD)
    >>> unisono.training.compress_ddp_gradients(model, "int8")
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    """
    if wire not in WIRES:
        raise ValueError(f"unknown wire format {wire!r}: use {', '.join(WIRES)}")
    group = _group_of(model, "compress_ddp_gradients")
    hook = _PackedBuckets(group, wire)
    model.register_comm_hook(hook, lambda state, bucket: state.average(bucket))


def _group_of(model: DistributedDataParallel, name: str) -> Any:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"{type(model).__name__} is not a DistributedDataParallel")
    group: Any = model.process_group
    if getattr(group, "comm", None) is None:
        raise ValueError(f"{name}: the model's process group is not on the backend unisono")
    return group


class _PackedBuckets:
    """What each of DDP's buckets has lost, by its number."""

    def __init__(self, group: Any, wire: WireFormat) -> None:
        self._group, self._wire = group, wire
        self._residuals: dict[int, torch.Tensor] = {}

    def average(self, bucket: Any) -> Any:
        """The future of a bucket's averages."""
        given, index = bucket.buffer(), bucket.index()
        residual = self._residuals.get(index)
        if residual is None or len(residual) != len(given):  # DDP rebuilds its buckets once
            residual = self._residuals[index] = torch.zeros(len(given))
        comm, wire = self._group.comm, self._wire
        work = comm.all_reduce(given, "avg", async_op=True, wire=wire, residual=residual)
        return self._group.future_of(work, given)


class _SharedBuckets:
    """DDP's buckets by number, shared in place."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._buckets: dict[int, SharedPages] = {}
        self._is_exact = group.size() & (group.size() - 1) == 0

    def average(self, bucket: Any) -> Any:
        """The future of a bucket's averages."""
        given = bucket.buffer()
        comm = self._group.comm
        op = "avg"
        if not self._is_exact or not given.is_floating_point():
            given.mul_(1 / comm.size)  # as DDP does without a hook
            op = "sum"
        if not SharedPages.can_hold(given, comm):
            return self._group.future_of(comm.all_reduce(given, op, async_op=True), given)
        pages = self._pages_for(bucket.index(), given)
        pages.hold(given)
        comm.all_reduce(pages.edges, op, async_op=True)
        return self._group.future_of(comm.all_reduce(pages.middle, op, async_op=True), given)

    def _pages_for(self, index: int, given: torch.Tensor) -> SharedPages:
        """DDP rebuilds its buckets after the first backward, in the same way on all ranks."""
        pages = self._buckets.get(index)
        if pages is None or (pages.count, pages.dtype) != (len(given), given.dtype):
            if pages is not None:
                self._buckets.pop(index).release()
            pages = self._buckets[index] = SharedPages(len(given), given.dtype, self._group.comm)
        return pages
