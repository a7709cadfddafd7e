"""Tensors whose shapes differ from rank to rank: every rank first sends its dtype and shape as a
few integers, its *spec*. Over shared memory the engine gathers small tensors in one message."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import torch

from unisono.collectives.arguments import check_out, result_or_work
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.tensors import name_of_dtype
from unisono.comm.work import Work


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes, in the tensor's own memory if it is contiguous."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    # The stride of zero or one element may be anything, but view() needs 1.
    return row.as_strided(row.shape, (1,)).view(torch.uint8)


def tensor_from_bytes(data: bytearray, device: Any) -> torch.Tensor:
    """A row of these bytes: on the CPU in the same memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def bytes_of(row: torch.Tensor) -> memoryview:
    """The bytes of a row: of one on the CPU in the same memory."""
    return row.cpu().numpy().data


def device_of(comm: Communicator) -> Any:
    """The default device of a Communicator's tensors."""
    return getattr(comm, "device", "cpu")


def all_gather_integers(
    comm: Communicator, integers: tuple[int, ...], device: Any
) -> list[tuple[int, ...]]:
    """Every rank's integers, in rank order; all ranks pass the same number. Without a short cut in
    the transport they travel in memory of this device."""
    exchange = comm.transport.exchange_integers
    if exchange is not None:
        return exchange(integers)
    everyone: Any
    if str(device) == "cpu":  # arrays are much cheaper to make than tensors
        everyone = numpy.empty((comm.size, len(integers)), dtype=numpy.int64)
        comm.all_gather(everyone, numpy.array(integers, dtype=numpy.int64))
    else:
        everyone = torch.empty((comm.size, len(integers)), dtype=torch.int64, device=device)
        comm.all_gather(everyone, torch.tensor(integers, dtype=torch.int64, device=device))
    return [tuple(theirs) for theirs in everyone.tolist()]


_MOST_DIMS = 64
"""torch's limit."""

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""A rank's dtype and shape."""


def gather(
    comm: Communicator,
    tensor: torch.Tensor,
    dst: int | None,
    out: Sequence[torch.Tensor] | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's tensor, in rank order, of any shape and dtype: on rank `dst`, in `out` if given,
    and None elsewhere; on every rank if `dst` is None."""
    is_wanted = dst is None or comm.rank == dst
    if comm.transport.gather_ragged is not None:
        try:
            outputs, shapes = comm.transport.gather_ragged(
                tensor, dst, torch.empty_like, _empty_beside
            )
        except TypeError as error:
            comm._refuse_for("all_gather" if dst is None else "gather", error)
        if shapes is None:
            if out is not None and outputs is not None:
                outputs = _copy_into(comm, out, outputs)
            return result_or_work(None, async_op, outputs)
        specs = [(_numbered_dtype(number), shape) for number, shape in shapes]
    else:
        rows = all_gather_integers(comm, _pack_spec(tensor), tensor.device)
        specs = list(map(_unpack_spec, rows))
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
    """A tensor of the dtype with this DLPack number, on the device of `tensor`."""
    return torch.empty(shape, dtype=_numbered_dtype(number), device=tensor.device)


def _copy_into(
    comm: Communicator, out: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copy what was gathered into the program's own tensors, of any layout."""
    buffers = list(out)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        check_out(comm, "gather", buffer, tensor.dtype, tensor.shape)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.detach().copy_(tensor)
    return buffers


def gather_rows(
    comm: Communicator, parts: Any, mine: torch.Tensor, dst: int | None, async_op: bool = False
) -> Work | None:
    """The Communicator's gather to rank `dst`, or its all_gather if `dst` is None."""
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
    """Tensor r of rank `src`, on rank r, which learns dtype and shape from `src`."""
    mine = torch.empty(2 + _MOST_DIMS, dtype=torch.int64, device=device)
    comm.scatter(mine, None if tensors is None else _pack_specs(tensors, device), src)
    dtype, shape = _unpack_spec(mine.tolist())
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        check_out(comm, "scatter", out, dtype, shape)
    return result_or_work(comm.scatter(out, tensors, src, async_op=async_op), async_op, out)


def all_to_all(comm: Communicator, tensors: Sequence[torch.Tensor], async_op: bool = False) -> Any:
    """Tensor r of every rank, on rank r, in rank order."""
    device = tensors[0].device
    integers = torch.empty((comm.size, 2 + _MOST_DIMS), dtype=torch.int64, device=device)
    comm.all_to_all(integers, _pack_specs(tensors, device))
    specs = [_unpack_spec(row) for row in integers.tolist()]
    outputs = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in specs]
    return result_or_work(comm.all_to_all(outputs, tensors, async_op=async_op), async_op, outputs)


# -- specs ---------------------------------------------------------------------------------------


def _pack_spec(tensor: torch.Tensor) -> tuple[int, ...]:
    padding = (0,) * (_MOST_DIMS - tensor.dim())
    return (dtype_code(name_of_dtype(tensor.dtype)), tensor.dim(), *tensor.shape, *padding)


def _pack_specs(tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
    return torch.tensor(list(map(_pack_spec, tensors)), dtype=torch.int64, device=device)


def _unpack_spec(integers: Sequence[int]) -> TensorSpec:
    return _numbered_dtype(integers[0]), tuple(integers[2 : 2 + integers[1]])


@cache
def _numbered_dtype(number: int) -> torch.dtype:
    """The dtype with this DLPack number."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return next(dtype for dtype in found if dtype_code(name_of_dtype(dtype)) == number)
