"""Collectives with gradients: results are new tensors that autograd can differentiate.

The loss is the sum of all ranks' local losses. A program that computes the same loss on every rank
counts it once per rank: divide by the group's size, or use rank 0's alone and zero elsewhere.

Backward passes are collective, too: every rank must run backward through the same calls, in reverse
order. A rank whose loss does not depend on a result adds `0 * result.sum()` to it. If one rank's
input requires a gradient, every rank's result does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unisono.collectives import arguments, ragged
from unisono.collectives.arguments import check_rank, inputs_first, reduction, refuse_type
from unisono.collectives.ragged import all_gather_integers
from unisono.collectives.types import Group, Op
from unisono.comm.communicator import Communicator
from unisono.comm.reductions import NamedReduction as Reduction
from unisono.comm.reductions import PremulSum
from unisono.torch_autograd import linear
from unisono.world.world import resolve, well_formed

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]


@well_formed
def all_reduce(tensor: torch.Tensor, op: Op = "sum", group: Group = None) -> torch.Tensor:
    """The ranks' tensors combined, on every rank of `group` (None: the world); `tensor` stays as it
    is.

    Gradients flow through sum, mean, min, max and PremulSum as `op`. For min and max, ranks that
    share the extreme value share the gradient evenly, as in torch.amax.

    Raises TypeError on every rank if `tensor` is not a tensor, or for the mean of integers;
    ValueError for a reduction without a gradient. Cost: an all_reduce; another one in backward (for
    min and max two). See also `reduce_scatter`, `all_gather`.

    >>> x = torch.ones(1, requires_grad=True)
    >>> y = unisono.differentiable.all_reduce(x)
    >>> (y * (comm.rank + 1)).sum().backward()
    >>> y.item(), x.grad.item()  # the sum; the gradients 1 and 2 of both ranks' losses together
    (2.0, 3.0)
    """
    comm = _group_of(group, "all_reduce", tensor)
    known = _differentiable_op(op, comm, "all_reduce", tensor)
    (tracked,) = _track_alike(comm, [tensor])
    if known in ("min", "max"):
        return _Extreme.apply(tracked, comm, known)  # type: ignore[no-any-return, no-untyped-call]
    move = partial(_on_a_copy, lambda copy: comm.all_reduce(copy, known))
    # scaled the same way as the tensors
    return linear(move, lambda gradient: [all_reduce(gradient, known, comm)], tracked)  # type: ignore[no-any-return]


@inputs_first
def all_gather(tensor: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """A list of every rank's `tensor`, on every rank of `group` (None: the world); shapes may
    differ.

    Raises TypeError on every rank if `tensor` is not a tensor. Cost: an all_gather; in backward a
    reduce_scatter. See also `reduce_scatter`.

    >>> x = torch.full((2,), float(comm.rank), requires_grad=True)
    >>> parts = unisono.differentiable.all_gather(x)
    >>> torch.cat(parts).sum().backward()
    >>> x.grad  # both ranks' losses depend on it
    tensor([2., 2.])
    """
    comm = _group_of(group, "all_gather", tensor)

    def move(mine: torch.Tensor) -> Any:
        return tuple(ragged.gather(comm, mine.detach(), None))

    def back(*gradients: torch.Tensor) -> Any:
        return [reduce_scatter(gradients, "sum", comm)]

    return list(linear(move, back, *_track_alike(comm, [tensor])))


@inputs_first
def reduce_scatter(
    tensors: torch.Tensor | Sequence[torch.Tensor], op: Op = "sum", group: Group = None
) -> torch.Tensor:
    """The ranks' `tensors` combined by `op`; rank r of `group` (None: the world) has part r. Sum,
    mean and PremulSum have gradients.

    `tensors` is a list with a tensor for each rank, or one that is cut evenly along its first
    dimension. Raises ValueError on every rank for another reduction, TypeError for anything but
    tensors. Cost: a reduce_scatter; in backward an all_gather. See also `all_gather`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> part = unisono.differentiable.reduce_scatter(x)
    >>> (part * (comm.rank + 1)).sum().backward()
    >>> part.item(), x.grad
    (2.0, tensor([1., 2.]))
    """
    comm = resolve(group)
    parts = arguments.parts(comm, "reduce_scatter", tensors)
    known = _differentiable_op(op, comm, "reduce_scatter", parts[0])
    if known in ("min", "max"):
        comm.reject_call("reduce_scatter", f"{known} has no gradient here: use all_reduce")

    def move(*parts: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(parts[comm.rank], memory_format=torch.contiguous_format)
        comm.reduce_scatter(result, [part.detach() for part in parts], known)
        return result

    def back(gradient: torch.Tensor) -> Any:
        if isinstance(known, PremulSum):
            gradient = gradient * known.factor
        elif known == "avg":
            gradient = gradient / comm.size
        return all_gather(gradient, comm)

    return linear(move, back, *_track_alike(comm, parts))  # type: ignore[no-any-return]


@inputs_first
def all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor], group: Group = None
) -> torch.Tensor | list[torch.Tensor]:
    """Part i of rank j's `tensors` is part j of rank i's result; `tensors` is one tensor that is
    cut evenly along its first dimension, and so is the result; or a list with a tensor for each
    rank of `group` (None: the world), and so is the result.

    Raises ValueError on every rank for a tensor that cannot be cut evenly, TypeError for anything
    but tensors. Cost: an all_to_all; another one in backward. See also `all_gather`.

    >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> y = unisono.differentiable.all_to_all(x)
    >>> (y * (comm.rank + 1)).sum().backward()
    >>> x.grad  # part r went to rank r
    tensor([1., 2.])
    """
    comm = resolve(group)
    parts = arguments.parts(comm, "all_to_all", tensors)

    def move(*parts: torch.Tensor) -> Any:
        return tuple(ragged.all_to_all(comm, [part.detach() for part in parts]))

    def back(*gradients: torch.Tensor) -> Any:
        return all_to_all(gradients, comm)

    results = list(linear(move, back, *_track_alike(comm, parts)))
    return torch.cat(results) if isinstance(tensors, torch.Tensor) else results


@well_formed
def broadcast(tensor: torch.Tensor, src: int = 0, group: Group = None) -> torch.Tensor:
    """Rank `src`'s `tensor`, on every rank of `group` (None: the world); others pass one of the
    same shape, which stays as it is and gets a gradient of zero.

    Raises TypeError if `tensor` is not a tensor, ValueError if `src` is not a rank. Cost: a
    broadcast; in backward a reduce. See also `all_reduce`.

    >>> x = torch.ones(1, requires_grad=True)
    >>> unisono.differentiable.broadcast(x, src=1).backward()
    >>> x.grad.item() == (2.0 if comm.rank == 1 else 0.0)
    True
    """
    comm = _group_of(group, "broadcast", tensor)
    check_rank(comm, "broadcast", src)
    move = partial(_on_a_copy, lambda copy: comm.broadcast(copy, src))
    back = partial(_sum_on, comm, src)
    return linear(move, lambda dy: [back(dy)], *_track_alike(comm, [tensor]))  # type: ignore[no-any-return]


def _sum_on(comm: Communicator, dst: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum on one rank, zero on the others: the backward of a broadcast."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        result = _on_a_copy(lambda copy: comm.reduce(copy, dst), tensor)
        return result if comm.rank == dst else torch.zeros_like(result)

    return linear(move, lambda dy: [broadcast(dy, dst, comm)], tensor)  # type: ignore[no-any-return]


def _group_of(group: Any, operation: str, tensor: Any) -> Communicator:
    comm = resolve(group)
    if not isinstance(tensor, torch.Tensor):
        refuse_type(comm, operation, f"{type(tensor).__name__} is not a torch tensor")
    return comm


def _track_alike(comm: Communicator, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, tracked by autograd on every rank if they are on one. Otherwise that rank's
    backward pass would wait for ranks that have none."""
    if comm.size == 1 or not torch.is_grad_enabled():
        return tensors
    wanted = any(tensor.requires_grad for tensor in tensors)
    flags = all_gather_integers(comm, (int(wanted),), tensors[0].device)
    if wanted or (1,) not in flags:
        return tensors
    first = tensors[0].detach()
    if first.is_floating_point() or first.is_complex():
        first.requires_grad_()
    return [first, *tensors[1:]]


def _differentiable_op(
    op: Any, comm: Communicator, operation: str, tensor: torch.Tensor
) -> Reduction:
    known = reduction(op, comm, operation, tensor)
    if known in ("product", "band", "bor", "bxor"):
        comm.reject_call(operation, f"{known} has no gradient")
    return known


def _on_a_copy(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = arguments.copy_of(tensor)
    call(copy)
    return copy


class _Extreme(torch.autograd.Function):
    """min and max: the gradient goes to the ranks that had the extreme value."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Communicator, op: Reduction) -> torch.Tensor:
        ctx.comm = comm
        result = _on_a_copy(lambda copy: comm.all_reduce(copy, op), tensor)
        ctx.save_for_backward(tensor == result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (is_mine,) = ctx.saved_tensors
        holders = is_mine.to(gradient.dtype)
        ctx.comm.all_reduce(holders)
        total = all_reduce(gradient, "sum", ctx.comm)
        return torch.where(is_mine, total / holders, torch.zeros_like(total)), None, None
