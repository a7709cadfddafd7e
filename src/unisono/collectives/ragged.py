"""Moving tensors whose shapes only their owners know.

Every rank says first what it has, in a few integers: dtype and shape, its *spec*. A second message
moves the elements into tensors of the right shapes. Over shared memory small tensors of a gather
come along with the specs and need none. They move in less time than it takes to make them, so what
is alike on all ranks is not looked at twice.
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
    specs, rows = _all_gather_specs(comm, tensor)
    outputs = None
    if comm.rank == dst and out is not None:
        outputs = list(out)
        for spec, buffer in zip(specs, outputs, strict=True):
            dtype, shape = spec or (tensor.dtype, tensor.shape)
            check_out(comm, "gather", buffer, dtype, shape)
    elif dst is None or comm.rank == dst:
        outputs = [_empty_beside(tensor, spec) for spec in specs]
    if rows is not None:
        _take_rows(comm, outputs, rows, out is None)
        return result_or_work(None, async_op, outputs)
    parts, mine = outputs, tensor
    if any(spec is not None and spec[0] is not tensor.dtype for spec in specs):
        parts = None if outputs is None else [flat_bytes(output) for output in outputs]
        mine = flat_bytes(tensor)
    work = gather_rows(comm, parts, mine, dst, async_op)
    return result_or_work(work, async_op, outputs)


def _empty_beside(tensor: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """A tensor for what the spec describes, where `tensor` lies; None: for one like that. Of
    torch's ways to make one each is taken where it is the fastest."""
    if spec is None:
        output = torch.empty_like(tensor)
        if output.is_contiguous():
            return output
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dtype, shape = spec
    if dtype is tensor.dtype and shape:
        return tensor.new_empty(*shape)
    return torch.empty(shape, dtype=dtype, device=tensor.device)


def _take_rows(
    comm: Any, outputs: list[torch.Tensor] | None, rows: bytearray, are_ours: bool
) -> None:
    """Copy what came along with the specs. Tensors that the program gave may lie anyhow."""
    if outputs is None:
        return
    if are_ours:
        comm.take(outputs, rows)
        return
    plain = [torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu") for buffer in outputs]
    comm.take(plain, rows)
    for buffer, row in zip(outputs, plain, strict=True):
        buffer.detach().copy_(row)


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


def _all_gather_specs(
    comm: Communicator, tensor: torch.Tensor
) -> tuple[Sequence[TensorSpec | None], bytearray | None]:
    """What every rank has, with None for what is as here; and the rows for `take`, if elements came
    along."""
    if isinstance(comm, SharedMemoryCommunicator):
        shapes, rows = comm.exchange_shapes(tensor)
        if shapes.count(None) == len(shapes):
            return [None] * len(shapes), rows
        own = _dlpack_number(tensor.dtype)
        return [
            shape and (tensor.dtype if shape[0] == own else _dlpack_dtype(shape[0]), shape[1])
            for shape in shapes
        ], rows
    specs = all_gather_integers(comm, _pack_spec(tensor.dtype, tensor.shape), tensor.device)
    if any(integers[1] > _SHORT_DIMS for integers in specs):
        long = _pack_spec(tensor.dtype, tensor.shape, _MOST_DIMS)
        specs = all_gather_integers(comm, long, tensor.device)
    return [_unpack_spec(integers) for integers in specs], None


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
def _dlpack_number(dtype: torch.dtype) -> int:
    """DLPack's number of a dtype, as `exchange_shapes` has it."""
    return dtype_code(name_of_dtype(dtype))


@cache
def _dlpack_dtype(number: int) -> torch.dtype:
    return next(dtype for dtype in _dtypes() if _dlpack_number(dtype) == number)
