"""DDP's buckets in shared memory, by the hook that DDP has for its communication."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.training.memory import zeros_for


def share_ddp_buckets(model: DistributedDataParallel) -> None:
    """Let the gradients of a `model` in DDP be averaged in memory that all ranks have mapped, a
    bucket as large as each of DDP's own. All ranks call, before the first backward. The gradients
    are those that DDP would have, bit for bit.

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
    """For each of DDP's buckets a tensor of the same length. DDP copies what it needs out of it
    before the next backward begins."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._tensors: dict[int, torch.Tensor] = {}

    def average(self, bucket: Any) -> Any:
        """The future of a bucket's averages."""
        given = bucket.buffer()
        shared = self._tensor_for(bucket.index(), given)
        torch.mul(given, 1 / self._group.size(), out=shared)  # as DDP does without a hook
        work: Any = dist.all_reduce(shared, group=self._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _tensor_for(self, index: int, given: torch.Tensor) -> torch.Tensor:
        mine = self._tensors.get(index)
        if mine is None or (mine.shape, mine.dtype) != (given.shape, given.dtype):
            # DDP cuts its buckets anew after the first backward, on all ranks alike.
            self._tensors.pop(index, None)
            mine = zeros_for(self._group.comm, given.numel(), given.dtype, given.device)
            self._tensors[index] = mine
        return mine
