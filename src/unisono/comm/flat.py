"""Tensors and arrays as flat rows of elements, by the same words for torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.comm.base import PremulSum, dtype_name
from unisono.comm.solo import SoloCommunicator

Row = Any
"""A contiguous one-dimensional torch.Tensor or numpy.ndarray."""

_FUNCTIONS = {
    "sum": "add",
    "avg": "add",
    "mean": "add",
    "premul_sum": "add",
    "product": "multiply",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}
_NUMPY_ADDS = ("uint16", "uint32", "uint64")  # and torch does not, on the CPU


def is_torch(tensor: Any) -> bool:
    """Whether it is torch's and not NumPy's."""
    return hasattr(tensor, "data_ptr")


def count(tensor: Any) -> int:
    """How many elements it has."""
    return int(tensor.numel() if is_torch(tensor) else tensor.size)


def flat(tensor: Any) -> Row:
    """Its elements as a row: the tensor's own memory where it is contiguous, else a copy."""
    return (tensor.detach() if is_torch(tensor) else tensor).reshape(-1)


def give_back(tensor: Any, row: Row) -> None:
    """Write a row into a tensor of any shape, unless that is where it lies."""
    own = flat(tensor)
    if _address(own) == _address(row) != 0:
        return
    if is_torch(tensor):
        tensor.detach().copy_(row.reshape(tensor.shape))
    else:
        tensor[...] = row.reshape(tensor.shape)


def empty_like(row: Row, elements: int) -> Row:
    """A new row of the same kind."""
    return row.new_empty(elements) if is_torch(row) else np.empty(elements, row.dtype)


def copy_of(row: Row) -> Row:
    """A row of its own with the same elements."""
    return row.clone() if is_torch(row) else row.copy()


def concatenate(rows: list[Row]) -> Row:
    """Rows of one kind as one new row."""
    if is_torch(rows[0]):
        import torch

        return torch.cat(rows)
    return np.concatenate(rows)


def combine(into: Row, other: Row, op: str) -> None:
    """`into` becomes `into` op `other`, rounded to its own type."""
    name = _FUNCTIONS[op]
    if not is_torch(into):
        getattr(np, name)(into, other, out=into)
        return
    import torch

    if dtype_name(into) in _NUMPY_ADDS and into.device.type == "cpu":
        combine(into.numpy(), other.numpy(), op)
        return
    getattr(torch, name)(into, other, out=into)


def divide(row: Row, number: int) -> None:
    """Divide every element; complex ones part by part."""
    if dtype_name(row).startswith("complex"):
        if is_torch(row):
            import torch

            row = torch.view_as_real(row)
        else:
            row = row.view(row.real.dtype)
    if is_torch(row):
        row.div_(number)
    else:
        np.divide(row, number, out=row)


def scale(row: Row, factor: float) -> None:
    """Multiply every element as the engine does, which is what a group of one does."""
    SoloCommunicator("scaling").all_reduce(row, PremulSum(factor))


def _address(row: Row) -> int:
    if not count(row):
        return 0
    return int(row.data_ptr() if is_torch(row) else row.__array_interface__["data"][0])
