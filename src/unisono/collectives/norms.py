"""Norms over tensors whose parts lie on different ranks, and what is done with them.

`l2_norm` and `normalize` have gradients, by the convention of `unisono.differentiable`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives.integers import device_of
from unisono.collectives.statistics import (
    gather_statistics,
    is_small,
    keep_or_squeeze,
    shard_of,
    sum_gradients,
    widen,
    widen_to_64_bits,
)
from unisono.comm.base import Communicator, Group
from unisono.world.world import resolve


def l2_norm(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, keepdim: bool = False
) -> torch.Tensor:
    """The square root of the sum of |x|^2 over `dim` and all ranks, on every rank.

    `x` is this rank's shard of a tensor that is cut along `dim`; `keepdim` leaves a dimension of
    one element in its place. With `dim=None` the sum is over the ranks of `group` (None: the
    world), element by element.

    Raises TypeError on every rank unless `x` is a floating-point or complex tensor.

    >>> unisono.l2_norm(torch.tensor([3.0 + comm.rank]), dim=0)  # of 3 and 4
    tensor(5.)
    """
    comm = resolve(group)
    shard, axis = shard_of(comm, "l2_norm", x, dim, complexes=True)
    result = _Norm.apply(shard, axis, comm)  # type: ignore[no-untyped-call]
    return keep_or_squeeze(result, axis, keepdim and dim is not None)


def normalize(
    x: torch.Tensor, dim: int | None = None, group: Group = None, *, eps: float = 1e-12
) -> torch.Tensor:
    """`x` divided by its `l2_norm` over `dim` and all ranks of `group`, or by `eps` where that is
    smaller; each rank has its shard's part. Raises what `l2_norm` raises.

    >>> unisono.normalize(torch.tensor([3.0 + comm.rank]), dim=0) * 5 - comm.rank
    tensor([3.])
    """
    norm = l2_norm(widen(x) if isinstance(x, torch.Tensor) else x, dim, group, keepdim=True)
    return (widen(x) / norm.clamp_min(eps)).to(x.dtype)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    group: Group = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down, in place, so that their norm over all ranks is at most `max_norm`.

    Each rank of `group` (None: the world) passes the `parameters` of its own shard: the norm, of
    order `norm_type`, is that of all ranks' gradients together, so a parameter that lies on several
    ranks counts several times. Where all ranks have the same gradients, as with data parallelism,
    torch's own clip_grad_norm_ is right. Returns the norm before clipping, the same on every rank.

    Raises RuntimeError on every rank if that is not finite and `error_if_nonfinite`.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0 + comm.rank])  # 3 and 4: together a norm of 5
    >>> unisono.clip_grad_norm(weight, max_norm=2.5).item()
    5.0
    >>> round(2 * weight.grad.item() - comm.rank, 3)
    3.0
    """
    comm = resolve(group)
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    device = gradients[0].device if gradients else torch.device(device_of(comm))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([_norm(gradient, norm_type) for gradient in gradients])
        total = torch.linalg.vector_norm(norms, norm_type)
    if norm_type == float("inf"):
        comm.all_reduce(total, "max")
    else:
        total = total**norm_type
        comm.all_reduce(total)
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """A norm that does not overflow in half precision."""
    dtype = widen(gradient.new_empty(0)).dtype
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return norm.double()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, comm: Communicator) -> torch.Tensor:
        local = torch.linalg.vector_norm(
            x, dim=dim, keepdim=True, dtype=widen_to_64_bits(x.new_empty(0)).dtype
        )
        if is_small(comm, local):
            norm = torch.linalg.vector_norm(gather_statistics(comm, local)[0], dim=0)
        else:
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
        slope = total / norm.masked_fill(norm == 0, torch.inf)  # at zero: no direction is better
        return (x * slope).to(x.dtype), None, None
