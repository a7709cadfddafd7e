"""New rows, and arithmetic on rows in place, by the engine's rules; for torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.comm.on_rows.rows import Row, is_torch
from unisono.comm.tensors import dtype_name


def empty_like(row: Row, elements: int) -> Row:
    return row.new_empty(elements) if is_torch(row) else np.empty(elements, row.dtype)


def placed_like(array: Any, like: Any) -> Row:
    """A new array as a row of the same library and on the same device as `like`."""
    if like is None or not is_torch(like):
        return array
    import torch

    return torch.from_numpy(array).to(like.device)


def copy_of(row: Row) -> Row:
    return row.clone() if is_torch(row) else row.copy()


# -- arithmetic in place -------------------------------------------------------------------------

_FUNCTIONS = {"product": "multiply", "min": "minimum", "max": "maximum"}
_FUNCTIONS |= {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}
_NUMPY_ADDS = ("uint16", "uint32", "uint64")  # torch cannot, on the CPU


def combine(into: Row, other: Row, op: str) -> None:
    """`into` becomes `into` op `other`, rounded to its own type."""
    name = _FUNCTIONS.get(op, "add")
    if not is_torch(into):
        getattr(np, name)(into, other, out=into)
        return
    import torch

    if dtype_name(into) in _NUMPY_ADDS and into.device.type == "cpu":
        combine(into.numpy(), other.numpy(), op)
        return
    getattr(torch, name)(into, other, out=into)


def divide(row: Row, number: int) -> None:
    row = _parts(row)
    if is_torch(row):
        row.div_(number)
    else:
        np.divide(row, number, out=row)


def scale(row: Row, factor: float) -> None:
    """Multiply in place as the engine does: integers wrap, half precision is rounded once, and
    complex numbers are scaled part by part."""
    row = _parts(row)
    dtype = dtype_name(row)
    if is_torch(row):
        if "int" not in dtype:
            wide = row.float() if dtype in ("float16", "bfloat16") else row
            row.copy_(wide * factor)
            return
        if row.device.type != "cpu":  # torch cannot multiply all integer types
            copy_here = row.cpu()
            scale(copy_here, factor)
            row.copy_(copy_here)
            return
        row = row.numpy()
    if "int" in dtype:
        number = np.array(int(factor)).astype(row.dtype)
    else:
        number = np.array(factor, dtype="float32" if dtype == "float16" else row.dtype)
    np.multiply(row, number, out=row, casting="unsafe")


def _parts(row: Row) -> Row:
    """Complex numbers as pairs of real ones, in the same memory; other rows unchanged."""
    if not dtype_name(row).startswith("complex"):
        return row
    if not is_torch(row):
        return row.view(row.real.dtype)
    import torch

    return torch.view_as_real(row)
