"""Tensors and arrays as flat rows of elements, with one set of functions for torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.comm.tensors import address_of, count

Row = Any
"""A contiguous one-dimensional torch.Tensor or numpy.ndarray."""


def is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr")


def flat(tensor: Any) -> Row:
    """Its elements as a row: the tensor's own memory where they lie there in one piece, as they
    read; else a copy."""
    if is_torch(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.reshape(-1)


def write_back(tensor: Any, row: Row) -> None:
    """Write a row into a tensor of any shape, unless that is where it lies."""
    if not count(row) or address_of(flat(tensor)) == address_of(row):
        return
    if is_torch(tensor):
        tensor.detach().copy_(row.reshape(tensor.shape))
    else:
        tensor[...] = row.reshape(tensor.shape)


def write_back_all(tensors: list[Any], row: Row) -> None:
    begin = 0
    for tensor in tensors:
        write_back(tensor, row[begin : begin + count(tensor)])
        begin += count(tensor)


def empty_like(row: Row, elements: int) -> Row:
    return row.new_empty(elements) if is_torch(row) else np.empty(elements, row.dtype)


def placed_like(array: Any, like: Any) -> Row:
    """A new array as a row of the kind of `like`, where that lies."""
    if like is None or not is_torch(like):
        return array
    import torch

    return torch.from_numpy(array).to(like.device)


def copy_of(row: Row) -> Row:
    return row.clone() if is_torch(row) else row.copy()


def concatenate(rows: list[Row]) -> Row:
    """Rows of one kind as one row; a single one is itself."""
    if len(rows) == 1:
        return rows[0]
    if is_torch(rows[0]):
        import torch

        return torch.cat(rows)
    return np.concatenate(rows)
