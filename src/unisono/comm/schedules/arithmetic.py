"""Arithmetic on the elements of tensors and arrays in place, by the engine's rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.comm.schedules.flat import Row, is_torch
from unisono.comm.tensors import dtype_name

_FUNCTIONS = {
    "sum": "add",
    "avg": "add",
    "premul_sum": "add",
    "product": "multiply",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}
_NUMPY_ADDS = ("uint16", "uint32", "uint64")  # and torch does not, on the CPU


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


def scale(tensor: Any, factor: float) -> None:
    """Multiply in place as the engine does: integers wrap, half precision is rounded once, and
    complex numbers are scaled part by part."""
    if dtype_name(tensor).startswith("complex"):
        tensor = tensor.detach() if is_torch(tensor) else tensor
        scale(tensor.real, factor)
        scale(tensor.imag, factor)
        return
    dtype = dtype_name(tensor)
    if is_torch(tensor):
        tensor = tensor.detach()
        if "int" not in dtype:
            wide = tensor.float() if dtype in ("float16", "bfloat16") else tensor
            tensor.copy_(wide * factor)
            return
        if tensor.device.type != "cpu":  # torch itself cannot multiply all integers
            copy_here = tensor.cpu()
            scale(copy_here, factor)
            tensor.copy_(copy_here)
            return
        tensor = tensor.numpy()
    if "int" in dtype:
        number = np.array(int(factor)).astype(tensor.dtype)
    else:
        number = np.array(factor, dtype="float32" if dtype == "float16" else tensor.dtype)
    np.multiply(tensor, number, out=tensor, casting="unsafe")
