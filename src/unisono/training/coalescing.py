"""Many tensors in few messages: one per dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch

from unisono.collectives.arguments import check_rank, reduction, refuse_type
from unisono.collectives.results import ResultWork
from unisono.collectives.types import No, Op, Yes
from unisono.comm.base import Communicator, Group, Work
from unisono.comm.work import join_works
from unisono.torch_autograd import mark_written
from unisono.world.world import resolve

Item = TypeVar("Item")


@overload
def reduce_many(
    tensors: Iterable[torch.Tensor], op: Op = "sum", group: Group = None, *, async_op: No = False
) -> list[torch.Tensor]: ...
@overload
def reduce_many(
    tensors: Iterable[torch.Tensor], op: Op = "sum", group: Group = None, *, async_op: Yes
) -> Work[list[torch.Tensor]]: ...
def reduce_many(
    tensors: Iterable[torch.Tensor], op: Any = "sum", group: Group = None, *, async_op: bool = False
) -> Any:
    """Combine each of these `tensors` over all ranks of `group` (None: the world) by `op`, in
    place, in one message per dtype.

    All ranks pass tensors of the same shapes and dtypes in the same order. Returns them as a list;
    with `async_op` a Work whose `wait()` does. Raises what `unisono.all_reduce` raises.

    >>> unisono.training.reduce_many([torch.ones(1), torch.ones(2, dtype=torch.int64)])
    [tensor([2.]), tensor([2, 2])]
    """
    comm = resolve(group)
    given = _dense(comm, "all_reduce", tensors)
    op = reduction(op, comm, "all_reduce", *given)
    works, endings = [], []
    for alike in group_alike(given):
        work, end = _begin(comm, alike, op)
        works.append(work)
        endings.append(end)

    def finish() -> list[torch.Tensor]:
        for end in endings:
            end()
        return given

    result = ResultWork(join_works(works), finish=finish)
    return result if async_op else result.wait()


def _begin(
    comm: Communicator, tensors: list[torch.Tensor], op: Any
) -> tuple[Work | None, Callable[[], Any]]:
    plain = [tensor.detach() for tensor in tensors]
    if comm.backend == "unisono" and not _may_overlap(plain):
        work = comm.all_reduce(plain, op, async_op=True)
        mark_written(plain)
        return work, list
    flat = torch.cat([tensor.reshape(-1) for tensor in plain])

    def copy_back() -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in plain])
        rows = [part.view(tensor.shape) for part, tensor in zip(parts, plain, strict=True)]
        torch._foreach_copy_(plain, rows)

    return comm.all_reduce(flat, op, async_op=True), copy_back


def _may_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors may have elements in common: those cannot be reduced in place."""
    spans = sorted((tensor.data_ptr(), _span_bytes(tensor)) for tensor in tensors)
    return any(begin + size > after for (begin, size), (after, _) in itertools.pairwise(spans))


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((length - 1) * stride for length, stride in steps)) * tensor.itemsize


def broadcast_many(tensors: Iterable[torch.Tensor], src: int = 0, group: Group = None) -> None:
    """Copy rank `src`'s `tensors` into those of all ranks of `group` (None: the world), in one
    message per dtype. Raises TypeError on every rank for what is not a dense tensor, ValueError if
    `src` is not a rank.

    >>> x, y = torch.full((1,), comm.rank), torch.full((1,), comm.rank + 0.5)
    >>> unisono.training.broadcast_many([x, y], src=1)
    >>> x, y
    (tensor([1]), tensor([1.5000]))
    """
    comm = resolve(group)
    check_rank(comm, "broadcast", src)
    for alike in group_alike(_dense(comm, "broadcast", tensors)):
        comm.broadcast([tensor.detach() for tensor in alike], src)
        if comm.rank != src:
            mark_written(alike)


def group_alike(
    items: Iterable[Item], tensor_of: Callable[[Item], Any] = lambda item: item
) -> list[list[Item]]:
    """Items whose tensors have one dtype and device, together; in the order in which each pair of
    these first appears."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        tensor = tensor_of(item)
        groups.setdefault((tensor.dtype, tensor.device), []).append(item)
    return list(groups.values())


def _dense(comm: Communicator, operation: str, tensors: Any) -> list[torch.Tensor]:
    listed = list(tensors)
    for tensor in listed:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            refuse_type(comm, operation, f"{type(tensor).__name__} is not a dense tensor")
    return listed
