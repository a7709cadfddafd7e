"""Sums, means and variances over tensors whose parts lie on different ranks.

All have gradients, by the convention of `unisono.differentiable`. Shards may differ in length, and
be empty: every element counts once, whoever has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives import differentiable
from unisono.collectives.refusals import refuse_type
from unisono.collectives.statistics import (
    gather_statistics,
    is_small,
    keep_or_squeeze,
    reduced_shape,
    shard_of,
    sum_gradients,
    widen,
    widen_to_64_bits,
)
from unisono.comm.base import Communicator, Group
from unisono.world.world import resolve


def weighted_sum(
    x: torch.Tensor,
    weight: torch.Tensor | float,
    dim: int | None = None,
    group: Group = None,
    *,
    keepdim: bool = False,
) -> torch.Tensor:
    """The sum of weight * x over `dim` and all ranks, on every rank. `weight` is this rank's own, a
    number or a tensor that broadcasts with `x`.

    `x` is this rank's shard of a tensor that is cut along `dim`; `keepdim` leaves a dimension of
    one element in its place. With `dim=None` the sum is over the ranks of `group` (None: the
    world), element by element.

    Raises TypeError on every rank unless `x` is a tensor.

    >>> unisono.weighted_sum(torch.ones(3), weight=comm.rank + 1)  # weights 1 and 2
    tensor([3., 3., 3.])
    """
    comm = resolve(group)
    if not isinstance(x, torch.Tensor):
        refuse_type(comm, "all_reduce", f"weighted_sum takes a tensor, not {type(x).__name__}")
    product = x * weight
    local = widen(product)
    if dim is not None:
        local = local.sum(dim, keepdim=keepdim)
    return differentiable.all_reduce(local, "sum", comm).to(product.dtype)


def mean(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, keepdim: bool = False
) -> torch.Tensor:
    """The mean of x over `dim` and all ranks, on every rank: that of all elements, not of the
    ranks' means. With `dim=None` it is the mean over the ranks, element by element.

    `x` is this rank's shard of a tensor that is cut along `dim`; `keepdim` leaves a dimension of
    one element in its place. `group` is a Communicator, a torch process group, or None for the
    world.

    Raises TypeError on every rank unless `x` is a floating-point or complex tensor.

    >>> shard = torch.ones(1) if comm.rank == 0 else torch.zeros(3)
    >>> unisono.mean(shard, dim=0)
    tensor(0.2500)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "mean", x, dim, complexes=True)
    if dim is None:
        return differentiable.all_reduce(x, "mean", comm)
    total = widen_to_64_bits(widen(shard).sum(axis, keepdim=True))
    count = total.new_full((1,), shard.size(axis))
    together = differentiable.all_reduce(torch.cat([total.flatten(), count]), "sum", comm)
    result = (together[:-1] / together[-1]).view(total.shape).to(x.dtype)
    return keep_or_squeeze(result, axis, keepdim)


def variance(
    x: torch.Tensor,
    dim: int | None = None,
    group: Group = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> torch.Tensor:
    """The variance of x over `dim` and all ranks, on every rank: the sum of the squared distances
    from the mean, divided by the number of elements less `correction`.

    `x` is this rank's shard of a tensor that is cut along `dim`; `keepdim` leaves a dimension of
    one element in its place. With `dim=None` it is the variance over the ranks of `group` (None:
    the world), element by element.

    Raises TypeError on every rank unless `x` is a floating-point tensor.

    >>> unisono.variance(torch.tensor([1.0, 3.0]) + 4 * comm.rank, dim=0, correction=0)
    tensor(5.)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "variance", x, dim)
    result = _Variance.apply(shard, axis, comm, correction)  # type: ignore[no-untyped-call]
    return keep_or_squeeze(result, axis, keepdim and dim is not None)


class _Variance(torch.autograd.Function):
    """Ranks' means and sums of squares are combined as Chan, Golub and LeVeque do (1979), which
    does not subtract large numbers from each other."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, comm: Communicator, correction: float
    ) -> torch.Tensor:
        length = x.size(dim)
        if length:
            spread, centre = torch.var_mean(widen(x), dim, correction=0, keepdim=True)
            spread, centre = widen_to_64_bits(spread) * length, widen_to_64_bits(centre)
        else:
            shape = reduced_shape(x, dim)
            spread = centre = torch.zeros(shape, dtype=torch.float64, device=x.device)
        count = torch.full_like(centre, length)
        if is_small(comm, centre, spread, count):
            counts, centres, spreads = gather_statistics(comm, count, centre, spread)
            elements = counts.sum(0)
            middle = (counts * centres).sum(0) / elements
            squares = (spreads + counts * (centres - middle).square()).sum(0)
        else:
            total = torch.stack([centre * count, count])
            comm.all_reduce(total)
            sums, elements = total
            middle = sums / elements
            squares = spread + count * (centre - middle).square()
            comm.all_reduce(squares)
        freedom = (elements - correction).clamp_min(0)
        ctx.comm = comm
        ctx.save_for_backward(x, middle, freedom)
        return (squares / freedom).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, middle, freedom = ctx.saved_tensors
        total = sum_gradients(ctx.comm, widen_to_64_bits(gradient))
        return (2 * (x - middle) / freedom * total).to(x.dtype), None, None, None
