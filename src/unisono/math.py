"""`unisono.math`: sums, means, norms and softmax of tensors that are sharded over ranks.

A shard is a part of a tensor along `dim`; with `dim=None` the ranks' tensors are combined element
by element. Shards may differ in length, and may be empty. float16 and bfloat16 are computed in
float32. Every function has a gradient, by the convention of `unisono.differentiable`.
"""

from __future__ import annotations

from typing import Any

from unisono.torch_support import require_torch

require_torch(__name__)

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives import differentiable
from unisono.collectives.arguments import refuse_type
from unisono.comm.communicator import Communicator, Group
from unisono.world.world import resolve, well_formed

__all__ = [
    "l2_norm", "log_softmax", "logsumexp", "mean", "normalize", "softmax", "variance",
    "weighted_sum",
]  # fmt: skip


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

    Raises TypeError on every rank unless `x` is a tensor. Cost: an all_reduce of the result;
    another one in backward. See also `mean`.

    >>> unisono.math.weighted_sum(torch.ones(3), weight=comm.rank + 1)  # weights 1 and 2
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
    """The mean of x over `dim` and all ranks, on every rank: the mean of all elements, not of the
    ranks' means. `x`, `dim`, `group` and `keepdim` are as in `weighted_sum`. Raises TypeError on
    every rank unless `x` is a floating-point or complex tensor. Cost: that of `weighted_sum`.

    >>> shard = torch.ones(1) if comm.rank == 0 else torch.zeros(3)
    >>> unisono.math.mean(shard, dim=0)
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
    from the mean, divided by the number of elements less `correction`. `x`, `dim`, `group` and
    `keepdim` are as in `weighted_sum`. Raises TypeError on every rank unless `x` is floating-point.
    Cost: two all_reduces of the result's size; two more in backward.

    >>> unisono.math.variance(torch.tensor([1.0, 3.0]) + 4 * comm.rank, dim=0, correction=0)
    tensor(5.)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "variance", x, dim)
    wide = widen_to_64_bits(widen(shard))
    squares = (wide - mean(wide, axis, comm, keepdim=True)).square().sum(axis, keepdim=True)
    count = squares.new_full((1,), shard.size(axis))
    together = differentiable.all_reduce(torch.cat([squares.flatten(), count]), "sum", comm)
    freedom = (together[-1] - correction).clamp_min(0)
    result = (together[:-1] / freedom).view(squares.shape).to(x.dtype)
    return keep_or_squeeze(result, axis, keepdim and dim is not None)


def l2_norm(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, keepdim: bool = False
) -> torch.Tensor:
    """The square root of the sum of |x|^2 over `dim` and all ranks, on every rank. `x`, `dim`,
    `group` and `keepdim` are as in `weighted_sum`. Raises what `mean` raises. Cost: that of
    `weighted_sum`.

    >>> unisono.math.l2_norm(torch.tensor([3.0 + comm.rank]), dim=0)  # of 3 and 4
    tensor(5.)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "l2_norm", x, dim, complexes=True)
    result = _Norm.apply(shard, axis, comm)  # type: ignore[no-untyped-call]
    return keep_or_squeeze(result, axis, keepdim and dim is not None)


def normalize(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, eps: float = 1e-12
) -> torch.Tensor:
    """`x` divided by its `l2_norm` over `dim` and all ranks of `group`, or by `eps` if that is
    larger; each rank has its shard's part. Raises what `l2_norm` raises. Cost: that of `l2_norm`.

    >>> unisono.math.normalize(torch.tensor([3.0 + comm.rank]), dim=0) * 5 - comm.rank
    tensor([3.])
    """
    norm = l2_norm(widen(x) if isinstance(x, torch.Tensor) else x, dim, group, keepdim=True)
    return (widen(x) / norm.clamp_min(eps)).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, comm: Communicator) -> torch.Tensor:
        local = torch.linalg.vector_norm(
            x, dim=dim, keepdim=True, dtype=widen_to_64_bits(x.new_empty(0)).dtype
        )
        squares = local.square_()
        comm.all_reduce(squares)
        norm = squares.sqrt_()
        ctx.comm = comm
        ctx.save_for_backward(x, norm)
        result: torch.Tensor = norm.to(x.real.dtype if x.is_complex() else x.dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, norm = ctx.saved_tensors
        total = sum_gradients(ctx.comm, widen_to_64_bits(gradient))
        slope = total / norm.masked_fill(norm == 0, torch.inf)  # the gradient at zero is zero
        return (x * slope).to(x.dtype), None, None


# -- softmax and related functions -----------------------------------------------------------------
# Each rank computes the maximum m and the sum s of exp(x - m) of its shard; together they give the
# maximum M and the sum S over all ranks, so that nothing overflows that would not overflow in one
# process.


def softmax(x: torch.Tensor, dim: int | None = None, group: Group = None) -> torch.Tensor:
    """exp(x) divided by its sum over `dim` and all ranks; each rank has its shard's part.

    `x` is this rank's shard of a tensor that is cut along `dim`; shards may differ in length. With
    `dim=None` the sum is over the ranks of `group` (None: the world), element by element.

    Raises TypeError on every rank unless `x` is a floating-point tensor; CollectiveMismatch if the
    shards' other dimensions differ. Cost: two all_reduces of the reduced size, or one all_gather if
    it is small; an all_reduce in backward. See also `log_softmax`, `logsumexp`.

    >>> p = unisono.math.softmax(torch.zeros(3, 2), dim=1)  # two columns of four
    >>> p[0]
    tensor([0.2500, 0.2500])
    """
    return _softmax("softmax", x, dim, group)


def log_softmax(x: torch.Tensor, dim: int | None = None, group: Group = None) -> torch.Tensor:
    """The logarithm of `softmax`, computed so that small probabilities stay exact; each rank has
    its shard's part. `x`, `dim` and `group` are those of `softmax`. Raises what that raises. Cost:
    that of `softmax`.

    >>> unisono.math.log_softmax(torch.tensor([0.0, -1000.0]), dim=0)[1] < -1000
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
    """The logarithm of the sum of exp(x) over `dim` and all ranks, on every rank. `x`, `dim`,
    `group` and `keepdim` are as in `weighted_sum`. Raises what `softmax` raises. Cost: that of
    `softmax`.

    >>> unisono.math.logsumexp(torch.zeros(2), dim=0).exp()  # four elements on two ranks
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
        maximum = x.new_full([*x.shape[:dim], 1, *x.shape[dim + 1 :]], -torch.inf)
    if comm.size * 2 * maximum.nbytes <= _GATHERED_BYTES:
        total = torch.exp(x - _finite(maximum)).sum(dim, keepdim=True)
        mine = torch.stack([maximum, total])
        everyone = mine.new_empty((comm.size, *mine.shape))
        comm.all_gather(everyone, mine)
        maxima, totals = everyone.unbind(1)
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
        # As in one process, +inf gives NaN everywhere along dim.
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


# -- shards ----------------------------------------------------------------------------------------

_GATHERED_BYTES = 64 * 1024
"""Up to this many bytes over all ranks, one all_gather is faster than two all_reduces."""

_64_BITS = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
HALF_DTYPES = (torch.float16, torch.bfloat16)


def shard_of(
    comm: Communicator, operation: str, x: Any, dim: int | None, complexes: bool = False
) -> tuple[torch.Tensor, int]:
    """The shard and the dimension along which it is cut. Rejects integer tensors."""
    if not isinstance(x, torch.Tensor):
        refuse_type(comm, "all_reduce", f"{operation} takes a torch tensor, not {type(x).__name__}")
    if not x.is_floating_point() and not (complexes and x.is_complex()):
        why = f"{operation} of {x.dtype}: pass a floating-point tensor (x.float())"
        refuse_type(comm, "all_reduce", why)
    if dim is None:
        return x.unsqueeze(0), 0
    if not -x.dim() <= dim < x.dim():
        shape = tuple(x.shape)
        comm.reject_call("all_reduce", f"{operation}: a tensor of shape {shape} has no {dim=}")
    return x, dim % x.dim()


def keep_or_squeeze(result: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    """A result whose dimension `dim` has one element, with or without that dimension."""
    return result if keepdim else result.squeeze(dim)


def widen(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype to compute in: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in HALF_DTYPES else x


def widen_to_64_bits(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in 64 bits, to add up shards without losing precision."""
    return x.to(_64_BITS.get(x.dtype, torch.float64))


def sum_gradients(comm: Communicator, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' gradients of a result that every rank has."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


for _name in __all__:
    globals()[_name] = well_formed(globals()[_name])
