"""Many tensors in few messages: one a dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from unisono.collectives.reductions import reduction
from unisono.collectives.refusals import check_rank, refuse_type
from unisono.collectives.results import ResultWork
from unisono.comm.base import Communicator, Work
from unisono.comm.work import joined
from unisono.world.world import resolve


def reduce_many(
    tensors: Iterable[torch.Tensor], op: Any = "sum", group: Any = None, *, async_op: bool = False
) -> Any:
    """Combine each of these tensors over all ranks, in place, in one message a dtype.

    All ranks pass tensors of the same shapes and dtypes in the same order. Returns them as a list;
    with `async_op` a Work whose `wait()` does.
    """
    comm = resolve(group)
    given = _dense(comm, "all_reduce", tensors)
    op = reduction(op, comm, "all_reduce", *given)
    works, endings = [], []
    for alike in by_kind(given):
        work, end = _begin(comm, alike, op)
        works.append(work)
        endings.append(end)

    def finish() -> list[torch.Tensor]:
        for end in endings:
            end()
        return given

    result = ResultWork(joined(works), finish=finish)
    return result if async_op else result.wait()


def _begin(
    comm: Communicator, tensors: list[torch.Tensor], op: Any
) -> tuple[Work | None, Callable[[], Any]]:
    plain = [one.detach() for one in tensors]
    if comm.backend == "unisono" and not _may_overlap(plain):
        return comm.all_reduce(plain, op, async_op=True), list
    flat = torch.cat([one.reshape(-1) for one in plain])

    def copy_back() -> None:
        parts = torch.split(flat, [one.numel() for one in plain])
        torch._foreach_copy_(
            plain, [part.view(one.shape) for part, one in zip(parts, plain, strict=True)]
        )

    return comm.all_reduce(flat, op, async_op=True), copy_back


def _may_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors may have elements in common: those cannot be reduced in place."""
    spans = sorted((one.data_ptr(), _span_bytes(one)) for one in tensors)
    return any(begin + size > after for (begin, size), (after, _) in itertools.pairwise(spans))


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((length - 1) * stride for length, stride in steps)) * tensor.itemsize


def broadcast_many(tensors: Iterable[torch.Tensor], src: int = 0, group: Any = None) -> None:
    """Copy rank `src`'s tensors into those of all ranks, in one message a dtype."""
    comm = resolve(group)
    check_rank(comm, "broadcast", src)
    for alike in by_kind(_dense(comm, "broadcast", tensors)):
        comm.broadcast([one.detach() for one in alike], src)


def by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of each dtype and device; kinds in the order in which they first appear."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for one in tensors:
        kinds.setdefault((one.dtype, one.device), []).append(one)
    return list(kinds.values())


def _dense(comm: Communicator, operation: str, tensors: Any) -> list[torch.Tensor]:
    listed = list(tensors)
    for one in listed:
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
            refuse_type(comm, operation, f"{type(one).__name__} is no dense tensor")
    return listed
