"""Tensors and arrays of any layout as rows, contiguous sequences of elements: the tensor's own
memory if it is contiguous, else a copy, which `write_back` copies back. (gloo writes a strided
tensor as if it were contiguous, and so overwrites its neighbours.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from unisono.comm.tensors import address_of, count

if TYPE_CHECKING:  # arrays do not need it
    import torch

Row = Any
"""A contiguous one-dimensional torch.Tensor or numpy.ndarray."""


def is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its memory does not hold its values: torch conjugates and negates lazily."""
    return tensor.is_neg() or tensor.is_conj()


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a lazy tensor with its values; any other tensor itself. The engine calls this,
    and `write_resolved`."""
    return tensor.detach().resolve_conj().resolve_neg()


def write_resolved(tensor: torch.Tensor, resolved: torch.Tensor) -> None:
    """Write a copy that `resolve` returned, and a call has changed, back into the tensor."""
    import torch

    with torch.inference_mode():  # allows writes to tensors of both kinds
        tensor.detach().copy_(resolved)


def row_of(tensor: Any) -> Row:
    """The elements of a tensor or array in order, contiguous."""
    if not is_torch(tensor):
        return numpy.ascontiguousarray(tensor).reshape(-1)
    plain = resolve(tensor) if is_lazy(tensor) else tensor.detach()
    if not plain.is_contiguous():
        try:
            plain = plain.contiguous()
        except NotImplementedError:  # a sub-byte type, which torch cannot copy
            plain = bytes_of(plain).contiguous().view(tensor.dtype)
    return plain.as_strided((plain.numel(),), (1,))


def torch_row_of(tensor: Any) -> torch.Tensor:
    """The same, as a tensor: of an array, too."""
    import torch

    row: Any = row_of(tensor)
    if isinstance(row, torch.Tensor):
        return row
    if not row.flags.writeable:
        row = row.copy()
    try:
        return torch.from_numpy(row)
    except TypeError:  # a type that torch does not know can still be moved
        return torch.from_numpy(row.view(numpy.uint8))


def write_back(tensor: Any, row: Row) -> None:
    """Write a row into a tensor or array, unless it is its own memory."""
    if not count(row) or address_of(tensor) == address_of(row):
        return
    if not is_torch(tensor):
        array = row.cpu().numpy() if is_torch(row) else row
        tensor[...] = array.view(tensor.dtype).reshape(tensor.shape)
        return
    plain, source = tensor.detach(), row.view(tensor.shape)
    try:
        plain.copy_(source)
    except NotImplementedError:
        bytes_of(plain).copy_(bytes_of(source))


def write_back_all(tensors: Sequence[Any], rows: Sequence[Row]) -> None:
    """The same for many, in order: lists may contain tied weights twice."""
    for tensor, row in zip(tensors, rows, strict=True):
        write_back(tensor, row)


def bytes_of(row: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can move."""
    import torch

    return row.view(torch.uint8) if row.numel() else row.new_empty(0, dtype=torch.uint8)


def concatenate(rows: Sequence[Row]) -> Row:
    """Rows of one dtype one after the other; a single one is itself."""
    if len(rows) == 1:
        return rows[0]
    if not is_torch(rows[0]):
        return numpy.concatenate(rows)
    import torch

    return torch.cat(list(rows))


def copy_into(whole: Row, rows: Sequence[Row]) -> None:
    """The reverse of `concatenate`: fill the rows, one after the other."""
    if len(rows) == 1 and address_of(rows[0]) == address_of(whole):
        return
    begin = 0
    for row in rows:
        row[...] = whole[begin : begin + count(row)]
        begin += count(row)


def cut(row: torch.Tensor, parts: int) -> list[torch.Tensor]:
    length = row.numel() // parts
    return [row[part * length : (part + 1) * length] for part in range(parts)]


def overlap(row: torch.Tensor, other: torch.Tensor) -> bool:
    begin, other_begin = row.data_ptr(), other.data_ptr()
    return begin < other_begin + other.numel() and other_begin < begin + row.numel()
