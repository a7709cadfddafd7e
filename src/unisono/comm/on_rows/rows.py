"""Tensors and arrays of any layout as rows, contiguous sequences of elements: the tensor's own
memory if it is contiguous, else a copy, which `write_back` copies back. (gloo writes a strided
tensor as if it were contiguous, and so overwrites its neighbours.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its memory does not hold its values: torch conjugates and negates lazily."""
    return tensor.is_neg() or tensor.is_conj()


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a lazy tensor with its values; any other tensor itself. The engine calls this,
    and `write_resolved`."""
    return tensor.detach().resolve_conj().resolve_neg()


@torch.inference_mode()  # allows writes to tensors of both kinds
def write_resolved(tensor: torch.Tensor, resolved: torch.Tensor) -> None:
    """Write a copy that `resolve` returned, and a call has changed, back into the tensor."""
    tensor.detach().copy_(resolved)


def row_of(tensor: Any) -> torch.Tensor:
    """The elements of a tensor or array in order, contiguous."""
    if isinstance(tensor, torch.Tensor):
        plain = resolve(tensor) if is_lazy(tensor) else tensor.detach()
        if not plain.is_contiguous():
            try:
                plain = plain.contiguous()
            except NotImplementedError:  # a sub-byte type, which torch cannot copy
                plain = plain.view(torch.uint8).contiguous().view(tensor.dtype)
        return plain.as_strided((plain.numel(),), (1,))
    array = numpy.ascontiguousarray(tensor).reshape(-1)
    if not array.flags.writeable:
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # a type that torch does not know can still be moved
        return torch.from_numpy(array.view(numpy.uint8))


def write_back(tensor: Any, row: torch.Tensor) -> None:
    """Write a tensor's row back into the tensor, if the row was a copy."""
    if isinstance(tensor, torch.Tensor):
        if tensor.is_contiguous() and not is_lazy(tensor):
            return
        plain = tensor.detach()
        try:
            plain.copy_(row.view(tensor.shape))
        except NotImplementedError:
            plain.view(torch.uint8).copy_(row.view(torch.uint8).view(tensor.shape))
    elif not tensor.flags.c_contiguous:
        tensor[...] = row.numpy().view(tensor.dtype).reshape(tensor.shape)


def write_back_all(tensors: Sequence[Any], rows: Sequence[torch.Tensor]) -> None:
    """The same for many, in order: lists may contain tied weights twice."""
    for tensor, row in zip(tensors, rows, strict=True):
        write_back(tensor, row)


def bytes_of(row: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can move."""
    return row.view(torch.uint8) if row.numel() else row.new_empty(0, dtype=torch.uint8)


def concatenate(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of one dtype one after the other; a single one is itself."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def copy_into(whole: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """The reverse of `concatenate`: fill the rows, one after the other."""
    if len(rows) == 1 and rows[0].data_ptr() == whole.data_ptr():
        return
    begin = 0
    for row in rows:
        row.copy_(whole[begin : begin + row.numel()])
        begin += row.numel()


def cut(row: torch.Tensor, parts: int) -> list[torch.Tensor]:
    length = row.numel() // parts
    return [row[part * length : (part + 1) * length] for part in range(parts)]


def overlap(row: torch.Tensor, other: torch.Tensor) -> bool:
    begin, other_begin = row.data_ptr(), other.data_ptr()
    return begin < other_begin + other.numel() and other_begin < begin + row.numel()
