"""Combining what each rank has computed of its shard.

A shard is a part of a tensor along `dim`; with `dim=None` the ranks' tensors lie on top of each
other and are combined element by element, which is the same with a new first dimension of which
each rank has one row. Halves are computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.collectives.refusals import refuse_type
from unisono.comm.base import Communicator

_GATHERED_BYTES = 64 * 1024
"""Up to so many bytes over all ranks, one all_gather takes less time than two all_reduces."""

_64_BITS = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
HALF_DTYPES = (torch.float16, torch.bfloat16)


def shard_of(
    comm: Communicator, operation: str, x: Any, dim: int | None, complexes: bool = False
) -> tuple[torch.Tensor, int]:
    """The shard and the dimension along which it is one. Refuses what has no fractions."""
    if not isinstance(x, torch.Tensor):
        refuse_type(comm, "all_reduce", f"{operation} takes a torch tensor, not {type(x).__name__}")
    if not x.is_floating_point() and not (complexes and x.is_complex()):
        why = f"{operation} of {x.dtype}: pass a floating tensor (x.float())"
        refuse_type(comm, "all_reduce", why)
    if dim is None:
        return x.unsqueeze(0), 0
    if not -x.dim() <= dim < x.dim():
        comm.refuse("all_reduce", f"{operation}: a tensor of shape {tuple(x.shape)} has no {dim=}")
    return x, dim % x.dim()


def keep_or_squeeze(result: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    """A result whose dimension `dim` has one element: with that dimension, or without it."""
    return result if keepdim else result.squeeze(dim)


def widen(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype to compute in: halves in float32."""
    return x.float() if x.dtype in HALF_DTYPES else x


def widen_to_64_bits(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in 64 bits, in which sums of shards lose nothing that matters."""
    return x.to(_64_BITS.get(x.dtype, torch.float64))


def is_small(comm: Communicator, *statistics: torch.Tensor) -> bool:
    """Whether to gather these from all ranks rather than reduce them."""
    return comm.size * sum(tensor.nbytes for tensor in statistics) <= _GATHERED_BYTES


def reduced_shape(x: torch.Tensor, dim: int) -> list[int]:
    """The shape of `x` with `dim` reduced to one element."""
    return [1 if i == dim else length for i, length in enumerate(x.shape)]


def sum_gradients(comm: Communicator, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' gradients of a result that every rank has."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def gather_statistics(comm: Communicator, *statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every rank's statistics, of one shape and dtype, in one message: for each, a tensor whose
    first dimension is the rank."""
    mine = torch.stack(statistics)
    everyone = torch.empty((comm.size, *mine.shape), dtype=mine.dtype, device=mine.device)
    comm.all_gather(everyone, mine)
    return everyone.unbind(1)
