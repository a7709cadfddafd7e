"""Moving tensors whose shapes only their owners know.

Every rank says first what it has, in a few integers: dtype and shape, its *spec*. A second message
moves the elements into tensors of the right shapes. (To put small tensors onto their specs would
save that message, and costs more than it saves in packing and unpacking.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from unisono.collectives.integers import all_gather_integers
from unisono.collectives.refusals import check_out
from unisono.collectives.results import result_or_work
from unisono.collectives.tensor_bytes import flat_bytes
from unisono.comm.base import Communicator, Work

_SHORT_DIMS = 8
_MOST_DIMS = 64
"""A spec has room for so many dimensions; for more there is a second, long one. torch knows no
tensor with more than 64."""
_PADDING = (0,) * _MOST_DIMS


class TensorSpec(NamedTuple):
    """What a rank has: a dtype by its number, and a shape."""

    dtype_number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return _dtypes()[self.dtype_number]

    def empty(self, device: Any) -> torch.Tensor:
        """A tensor for what the spec describes."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def empty_beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same where `tensor` lies, sooner where it is alike."""
        if self.shape == tensor.shape and self.dtype is tensor.dtype:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return self.empty(tensor.device)


def gather(
    comm: Communicator,
    tensor: torch.Tensor,
    dst: int | None,
    out: Sequence[torch.Tensor] | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's tensor, in rank order, whatever its shape and dtype: on rank `dst`, in `out`
    where it is given, and None elsewhere; with None for `dst` on every rank."""
    specs = _all_gather_specs(comm, tensor)
    outputs = None
    if comm.rank == dst and out is not None:
        outputs = list(out)
        for spec, buffer in zip(specs, outputs, strict=True):
            check_out(comm, "gather", buffer, spec.dtype, spec.shape)
    elif dst is None or comm.rank == dst:
        outputs = [spec.empty_beside(tensor) for spec in specs]
    parts, mine = outputs, tensor
    if any(spec.dtype_number != specs[0].dtype_number for spec in specs):
        parts = None if outputs is None else [flat_bytes(output) for output in outputs]
        mine = flat_bytes(tensor)
    work = gather_rows(comm, parts, mine, dst, async_op)
    return result_or_work(work, async_op, outputs)


def gather_rows(
    comm: Communicator, parts: Any, mine: torch.Tensor, dst: int | None, async_op: bool = False
) -> Work | None:
    """The Communicator's gather to rank `dst`, or, without one, its all_gather."""
    if dst is None:
        return comm.all_gather(parts, mine, async_op=async_op)
    return comm.gather(parts, mine, dst, async_op=async_op)


def scatter(
    comm: Communicator,
    tensors: Sequence[torch.Tensor] | None,
    src: int,
    out: torch.Tensor | None,
    device: Any,
    async_op: bool = False,
) -> Any:
    """Tensor r of rank `src`'s, on rank r, which learns from `src` what it gets."""
    mine = torch.empty(2 + _MOST_DIMS, dtype=torch.int64, device=device)
    comm.scatter(mine, None if tensors is None else _pack_long_specs(tensors, device), src)
    spec = _unpack_spec(mine.tolist())
    if out is None:
        out = spec.empty(device)
    else:
        check_out(comm, "scatter", out, spec.dtype, spec.shape)
    return result_or_work(comm.scatter(out, tensors, src, async_op=async_op), async_op, out)


def all_to_all(comm: Communicator, tensors: Sequence[torch.Tensor], async_op: bool = False) -> Any:
    """Tensor r of every rank's, on rank r, in rank order."""
    device = tensors[0].device
    integers = torch.empty((comm.size, 2 + _MOST_DIMS), dtype=torch.int64, device=device)
    comm.all_to_all(integers, _pack_long_specs(tensors, device))
    outputs = [_unpack_spec(row).empty(device) for row in integers.tolist()]
    return result_or_work(comm.all_to_all(outputs, tensors, async_op=async_op), async_op, outputs)


# -- specs ---------------------------------------------------------------------------------------


def _all_gather_specs(comm: Communicator, tensor: torch.Tensor) -> list[TensorSpec]:
    """What every rank has."""
    number, shape = _dtype_numbers()[tensor.dtype], tuple(tensor.shape)
    dims = shape if len(shape) <= _SHORT_DIMS else ()
    integers = (number, len(shape), *dims, *_PADDING[len(dims) : _SHORT_DIMS])
    specs = all_gather_integers(comm, integers, tensor.device)
    if any(integers[1] > _SHORT_DIMS for integers in specs):
        long = (number, len(shape), *shape, *_PADDING[len(shape) :])
        specs = all_gather_integers(comm, long, tensor.device)
    return [_unpack_spec(integers) for integers in specs]


def _pack_long_specs(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    rows = []
    for tensor in tensors:
        shape = tensor.shape
        rows.append([_dtype_numbers()[tensor.dtype], len(shape), *shape, *_PADDING[len(shape) :]])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _unpack_spec(integers: Sequence[int]) -> TensorSpec:
    return TensorSpec(integers[0], tuple(integers[2 : 2 + integers[1]]))


@cache
def _dtypes() -> list[torch.dtype]:
    """Every dtype of torch, in an order that is the same in every process."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


@cache
def _dtype_numbers() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in enumerate(_dtypes())}
