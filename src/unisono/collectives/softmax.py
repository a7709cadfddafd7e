"""Softmax and its kin over tensors whose parts lie on different ranks.

Each rank computes the maximum m and the sum s of exp(x - m) of its shard; together they give the
maximum M and the sum S over all ranks, so that nothing overflows that would not in one process.
All have gradients, by the convention of `unisono.differentiable`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives.statistics import (
    gather_statistics,
    is_small,
    keep_or_squeeze,
    reduced_shape,
    shard_of,
    sum_gradients,
    widen,
)
from unisono.comm.base import Communicator, Group
from unisono.world.world import resolve


def softmax(x: torch.Tensor, dim: int | None = None, group: Group = None) -> torch.Tensor:
    """exp(x) divided by its sum over `dim` and all ranks; each rank has its shard's part.

    `x` is this rank's shard of a tensor that is cut along `dim`; shards may differ in length. With
    `dim=None` the sum is over the ranks of `group` (None: the world), element by element.

    Raises TypeError on every rank unless `x` is a floating-point tensor; CollectiveMismatch where
    the shards' other dimensions differ.

    >>> p = unisono.softmax(torch.zeros(3, 2), dim=1)  # two columns of four
    >>> p[0]
    tensor([0.2500, 0.2500])
    """
    return _softmax("softmax", x, dim, group)


def log_softmax(x: torch.Tensor, dim: int | None = None, group: Group = None) -> torch.Tensor:
    """The logarithm of `softmax`, computed so that small probabilities stay exact; each rank has
    its shard's part.

    `x`, `dim` and `group` are those of `softmax`. Raises what that raises.

    >>> unisono.log_softmax(torch.tensor([0.0, -1000.0]), dim=0)[1] < -1000
    tensor(True)
    """
    return _softmax("log_softmax", x, dim, group)


def _softmax(operation: str, x: torch.Tensor, dim: int | None, group: Group) -> torch.Tensor:
    comm = resolve(group)
    shard, axis = shard_of(comm, operation, x, dim)
    is_log = operation == "log_softmax"
    result: torch.Tensor = _Softmax.apply(shard, axis, comm, is_log)  # type: ignore[no-untyped-call]
    return result.squeeze(0) if dim is None else result


def logsumexp(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, keepdim: bool = False
) -> torch.Tensor:
    """The logarithm of the sum of exp(x) over `dim` and all ranks, on every rank.

    `x`, `dim` and `group` are those of `softmax`; `keepdim` leaves a dimension of one element in
    the place of `dim`. Raises what `softmax` raises.

    >>> unisono.logsumexp(torch.zeros(2), dim=0).exp()  # four elements on two ranks
    tensor(4.)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "logsumexp", x, dim)
    result = _LogSumExp.apply(shard, axis, comm)  # type: ignore[no-untyped-call]
    return keep_or_squeeze(result, axis, keepdim and dim is not None)


def _maximum_and_sum(
    comm: Communicator, x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """M, or 0 where it is infinite, and S relative to it, over all ranks."""
    if x.size(dim):
        maximum = x.amax(dim, keepdim=True)
    else:
        maximum = x.new_full(reduced_shape(x, dim), -torch.inf)
    finite = _finite(maximum)
    if is_small(comm, maximum, maximum):
        total = torch.exp(x - finite).sum(dim, keepdim=True)
        maxima, totals = gather_statistics(comm, maximum, total)
        shift = _finite(maxima.amax(0))
        # A shard of -inf alone has m = -inf and s = 0: exp(m - M) and not exp(0 - M), which may
        # be infinite.
        return shift, (totals * torch.exp(maxima - shift)).sum(0)
    comm.all_reduce(maximum, "max")
    shift = _finite(maximum)
    total = torch.exp(x - shift).sum(dim, keepdim=True)
    comm.all_reduce(total, "sum")
    return shift, total


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    return maximum.masked_fill(maximum.isinf(), 0)


class _Softmax(torch.autograd.Function):
    """softmax, or its logarithm."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, dim: int, comm: Communicator, is_log: bool
    ) -> torch.Tensor:
        x = widen(given)
        shift, total = _maximum_and_sum(comm, x, dim)
        # In one process +inf gives NaN everywhere along dim; so it does here.
        total = total.masked_fill(total.isposinf(), torch.nan)
        y = (x - shift) - total.log() if is_log else torch.exp(x - shift) / total
        ctx.dim, ctx.comm, ctx.is_log = dim, comm, is_log
        result = y.to(given.dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        y, g = widen(ctx.saved_tensors[0]), widen(gradient)
        total = (g if ctx.is_log else y * g).sum(ctx.dim, keepdim=True)
        ctx.comm.all_reduce(total)
        slope = g - y.exp() * total if ctx.is_log else y * (g - total)
        return slope.to(gradient.dtype), None, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, dim: int, comm: Communicator) -> torch.Tensor:
        x = widen(given)
        shift, total = _maximum_and_sum(comm, x, dim)
        ctx.comm = comm
        ctx.save_for_backward(given, shift, total)
        return (total.log() + shift).to(given.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, shift, total = ctx.saved_tensors
        total_gradient = sum_gradients(ctx.comm, widen(gradient))
        share = torch.exp(widen(given) - shift) / total.masked_fill(total == 0, 1)
        return (share * total_gradient).to(given.dtype), None, None
