"""DDP's buckets in shared memory: the hook that DDP has for its communication shows them when they
are full, and there they are given the pages of shared memory, once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.shared_memory.shared_pages import SharedPages


def share_ddp_buckets(model: DistributedDataParallel) -> None:
    """Let the gradients of a `model` in DDP be averaged where they lie: its buckets become memory
    that all ranks have mapped. All ranks call, before the first backward. The gradients are those
    that DDP would have, bit for bit.

    It takes the place of DDP's communication hook, of which a model has one. Buckets on a GPU stay
    as they are.

    Raises TypeError for what is no such model, ValueError for one whose group is not on the backend
    "unisono", and RuntimeError, which is torch's, for one that has a hook.

    >>> from torch.nn.parallel import DistributedDataParallel
    >>> import torch.distributed as dist
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=dist.group.WORLD)
    >>> unisono.training.share_ddp_buckets(model)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"{type(model).__name__} is no DistributedDataParallel")
    group: Any = model.process_group
    if getattr(group, "comm", None) is None:
        raise ValueError(
            "share_ddp_buckets: the model's process group is not on the backend unisono"
        )
    # A lambda, for DDP wants no annotations but its own.
    model.register_comm_hook(_SharedBuckets(group), lambda state, bucket: state.average(bucket))


class _SharedBuckets:
    """DDP's buckets by their numbers, shared where they lie."""

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
        """DDP cuts its buckets anew after the first backward, on all ranks alike."""
        pages = self._buckets.get(index)
        if pages is None or (pages.count, pages.dtype) != (len(given), given.dtype):
            if pages is not None:
                self._buckets.pop(index).release()
            pages = self._buckets[index] = SharedPages(len(given), given.dtype, self._group.comm)
        return pages
