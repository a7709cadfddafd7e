"""Moving tensors whose shapes only their owners know.

Every rank says first what it has, in a few integers: dtype and shape, its *spec*. A second message
moves the elements into tensors of the right shapes. Over shared memory the engine gathers small
tensors in one, and has tensors made for them when it knows the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from unisono.collectives.integers import all_gather_integers
from unisono.collectives.refusals import check_out
from unisono.collectives.results import result_or_work
from unisono.collectives.tensor_bytes import flat_bytes
from unisono.comm.base import Communicator, Work, name_of_dtype
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.comm.shared_memory.error_texts import dtype_code

_SHORT_DIMS = 8
_MOST_DIMS = 64
"""A spec has room for so many dimensions; for more there is a second, long one. torch knows no
tensor with more than 64."""
_PADDING = (0,) * _MOST_DIMS


TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""What a rank has: a dtype and a shape."""


def gather(
    comm: Communicator,
    tensor: torch.Tensor,
    dst: int | None,
    out: Sequence[torch.Tensor] | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's tensor, in rank order, whatever its shape and dtype: on rank `dst`, in `out`
    where it is given, and None elsewhere; with None for `dst` on every rank."""
    is_wanted = dst is None or comm.rank == dst
    if isinstance(comm, SharedMemoryCommunicator):
        outputs, shapes = comm.gather_ragged(tensor, dst, torch.empty_like, _empty_beside)
        if shapes is None:
            if out is not None and outputs is not None:
                outputs = _copy_into(comm, out, outputs)
            return result_or_work(None, async_op, outputs)
        specs = [(_dlpack_dtype(number), shape) for number, shape in shapes]
    else:
        specs = _all_gather_specs(comm, tensor)
    outputs = None
    if is_wanted and out is not None:
        outputs = list(out)
        for (dtype, shape), buffer in zip(specs, outputs, strict=True):
            check_out(comm, "gather", buffer, dtype, shape)
    elif is_wanted:
        outputs = [torch.empty(shape, dtype=dtype, device=tensor.device) for dtype, shape in specs]
    parts, mine = outputs, tensor
    if any(dtype is not tensor.dtype for dtype, _ in specs):
        parts = None if outputs is None else [flat_bytes(output) for output in outputs]
        mine = flat_bytes(tensor)
    work = gather_rows(comm, parts, mine, dst, async_op)
    return result_or_work(work, async_op, outputs)


def _empty_beside(tensor: torch.Tensor, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the dtype with DLPack's number, where `tensor` lies."""
    return torch.empty(shape, dtype=_dlpack_dtype(number), device=tensor.device)


def _copy_into(
    comm: Communicator, out: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The program's own tensors, which may lie anyhow, with what has been gathered."""
    buffers = list(out)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        check_out(comm, "gather", buffer, tensor.dtype, tensor.shape)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.detach().copy_(tensor)
    return buffers


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
    dtype, shape = _unpack_spec(mine.tolist())
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        check_out(comm, "scatter", out, dtype, shape)
    return result_or_work(comm.scatter(out, tensors, src, async_op=async_op), async_op, out)


def all_to_all(comm: Communicator, tensors: Sequence[torch.Tensor], async_op: bool = False) -> Any:
    """Tensor r of every rank's, on rank r, in rank order."""
    device = tensors[0].device
    integers = torch.empty((comm.size, 2 + _MOST_DIMS), dtype=torch.int64, device=device)
    comm.all_to_all(integers, _pack_long_specs(tensors, device))
    specs = [_unpack_spec(row) for row in integers.tolist()]
    outputs = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in specs]
    return result_or_work(comm.all_to_all(outputs, tensors, async_op=async_op), async_op, outputs)


# -- specs ---------------------------------------------------------------------------------------


def _all_gather_specs(comm: Communicator, tensor: torch.Tensor) -> list[TensorSpec]:
    specs = all_gather_integers(comm, _pack_spec(tensor.dtype, tensor.shape), tensor.device)
    if any(integers[1] > _SHORT_DIMS for integers in specs):
        long = _pack_spec(tensor.dtype, tensor.shape, _MOST_DIMS)
        specs = all_gather_integers(comm, long, tensor.device)
    return [_unpack_spec(integers) for integers in specs]


def _pack_spec(
    dtype: torch.dtype, shape: Sequence[int], room: int = _SHORT_DIMS
) -> tuple[int, ...]:
    """A spec with room for so many dimensions; without them where it has more."""
    dims = len(shape)
    given = shape if dims <= room else ()
    return (_dtype_numbers()[dtype], dims, *given, *_PADDING[len(given) : room])


def _pack_long_specs(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    rows = [_pack_spec(tensor.dtype, tensor.shape, _MOST_DIMS) for tensor in tensors]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _unpack_spec(integers: Sequence[int]) -> TensorSpec:
    return _dtypes()[integers[0]], tuple(integers[2 : 2 + integers[1]])


@cache
def _dtypes() -> list[torch.dtype]:
    """Every dtype of torch, in an order that is the same in every process."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


@cache
def _dtype_numbers() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in enumerate(_dtypes())}


@cache
def _dlpack_dtype(number: int) -> torch.dtype:
    """The dtype with DLPack's number, as the engine has it."""
    return next(dtype for dtype in _dtypes() if dtype_code(name_of_dtype(dtype)) == number)
