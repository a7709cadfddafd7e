"""Operators that return a new tensor, with gradients by the rule of `unisono.differentiable`: the
loss is the sum of all ranks' local losses.

A compiler takes them apart into a new tensor and an operator in place, and reuses memory for both.
It keeps the parts in a cache on disk, by the operator's arguments alone: nothing here may depend on
the rank or, unless it is an argument, on the size of the group.
"""

from collections.abc import Callable
from typing import Any

import torch

from unisono.torch_autograd import linear

Move = Callable[[torch.Tensor], torch.Tensor]


def register(library: Any) -> None:
    """Define the operators."""
    for schema, body in (
        ('all_reduce(Tensor x, str group, str op="sum") -> Tensor', all_reduce),
        ("broadcast(Tensor x, str group, int root=0) -> Tensor", broadcast),
        ("sum_to_root(Tensor x, str group, int root=0) -> Tensor", sum_to_root),
        ("all_gather(Tensor x, str group, int size) -> Tensor", all_gather),
        ('reduce_scatter(Tensor x, str group, int size, str op="sum") -> Tensor', reduce_scatter),
        ("all_to_all(Tensor x, str group) -> Tensor", all_to_all),
    ):
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(schema.partition("(")[0], body, "CompositeImplicitAutograd")


def all_reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    move = _in_place(torch.ops.unisono.all_reduce_, group, op)
    return _differentiable(x, move, lambda dx: all_reduce(dx, group, op), op)


def broadcast(x: torch.Tensor, group: str, root: int = 0) -> torch.Tensor:
    move = _in_place(torch.ops.unisono.broadcast_, group, root)
    return _differentiable(x, move, lambda dx: sum_to_root(dx, group, root))


def sum_to_root(x: torch.Tensor, group: str, root: int = 0) -> torch.Tensor:
    """The sum of all ranks' tensors on `root`, and zeros on the others."""
    move = _in_place(torch.ops.unisono.sum_to_root_, group, root)
    return _differentiable(x, move, lambda dx: broadcast(dx, group, root))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """The tensors of all `size` ranks, one after the other along the first dimension."""

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty((size * x.shape[0], *x.shape[1:]) if x.dim() else (size,))
        torch.ops.unisono.all_gather_(result, x.contiguous(), group)
        return result

    return _differentiable(x, move, lambda dx: reduce_scatter(dx, group, size).view(x.shape))


def reduce_scatter(x: torch.Tensor, group: str, size: int, op: str = "sum") -> torch.Tensor:
    """This rank's part of the result, which is cut into `size` along the first dimension."""
    torch._check(  # type: ignore[no-untyped-call]
        x.dim() > 0 and x.shape[0] % size == 0,
        lambda: (
            f"reduce_scatter on group {group}: a tensor of shape {tuple(x.shape)} has no {size} "
            "equal parts along its first dimension"
        ),
    )

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        torch.ops.unisono.reduce_scatter_(result, x.contiguous(), group, op)
        return result

    def back(dx: torch.Tensor) -> torch.Tensor:
        return all_gather(dx, group, size) / (1 if op == "sum" else size)

    return _differentiable(x, move, back, op)


def all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    """Part i of rank j's tensor is part j of rank i's result, cut along the first dimension."""

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.new_empty(x.shape)
        torch.ops.unisono.all_to_all_(result, x.contiguous(), group)
        return result

    return _differentiable(x, move, lambda dx: all_to_all(dx, group))


def _in_place(operator: Callable[..., object], *arguments: Any) -> Move:
    """The same on a copy."""

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        operator(result, *arguments)
        return result

    return move


def _differentiable(x: torch.Tensor, move: Move, back: Move, op: str = "sum") -> torch.Tensor:
    """The result of a call; its gradient is another call."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        with torch.no_grad():  # so that the engine need not ask about the result
            return move(x)
    if op not in ("sum", "avg"):
        raise ValueError(
            f"an operator of unisono by {op!r} has no gradient: call it under torch.no_grad() or "
            "on x.detach(), or use unisono.differentiable, which has one for min and max"
        )
    return linear(move, lambda dx: [back(dx)], x)  # type: ignore[no-any-return]
