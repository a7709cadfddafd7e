"""Each rank's input and the expected result of a reduction: exact Python numbers, rounded once.

Integers use the type's whole range and wrap around. Floating-point numbers are small multiples of a
half, so neither the order nor the precision of a sum or product matters before the last rounding.
"""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any

import numpy
import torch

from expected import COMPLEXES, FLOATS, INTEGERS, SIGNED
from torch_parity.matrix import ONLY_MOVED

CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""Types of each size that torch fully supports; they carry the bits of the others."""

Row = tuple[Any, ...]


@cache
def numbers(dtype: torch.dtype, count: int, seed: str) -> Row:
    """This many numbers of a type; bits if the type is only moved."""
    random = Random(f"{dtype} {seed}")
    if dtype is torch.bool:
        return tuple(random.random() < 0.6 for _ in range(count))
    if dtype in FLOATS:
        return tuple(random.randint(-4, 4) / 2 for _ in range(count))
    if dtype in COMPLEXES:
        return tuple(
            complex(random.randint(-4, 4) / 2, random.randint(-4, 4) / 2) for _ in range(count)
        )
    low, high = _range_of(dtype)
    return tuple(random.randrange(low, high) for _ in range(count))


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    if dtype in ONLY_MOVED:
        return (0, 1 << 8) if dtype.itemsize == 1 else (-(1 << 31), 1 << 31)
    bits = 8 * dtype.itemsize
    return (-(1 << (bits - 1)), 1 << (bits - 1)) if dtype in SIGNED else (0, 1 << bits)


def factor_of(dtype: torch.dtype) -> float:
    """What PREMUL_SUM multiplies by: integers need a whole number."""
    return 3.0 if dtype in INTEGERS else 0.5


@cache
def combined(op: str, dtype: torch.dtype, rows: tuple[Row, ...]) -> Row:
    """The rows of all ranks, combined column by column."""
    columns = zip(*rows, strict=True)
    if dtype is torch.bool:
        return tuple(_combine_bools(op, column) for column in columns)
    if dtype in INTEGERS and op == "AVG":  # as in NCCL: the sum divided, rounded towards zero
        sums = combined("SUM", dtype, rows)
        return tuple(abs(value) // len(rows) * (-1 if value < 0 else 1) for value in sums)
    values = [_combine(op, column, factor_of(dtype)) for column in columns]
    if dtype in INTEGERS:
        low, high = _range_of(dtype)
        return tuple((int(value) - low) % (high - low) + low for value in values)
    return tuple(values)


def _combine_bools(op: str, column: Row) -> bool:
    if op in ("SUM", "MAX", "BOR"):
        return any(column)
    if op in ("PRODUCT", "MIN", "BAND"):
        return all(column)
    return sum(column) % 2 == 1


def _combine(op: str, column: Row, factor: float) -> Any:
    if op == "SUM":
        return sum(column)
    if op == "AVG":
        return sum(column) / len(column)
    if op == "PRODUCT":
        return math.prod(column)
    if op == "MIN":
        return min(column)
    if op == "MAX":
        return max(column)
    if op == "PREMUL_SUM":
        return sum(value * (int(factor) if isinstance(value, int) else factor) for value in column)
    bits = column[0]
    for value in column[1:]:
        bits = {"BAND": bits & value, "BOR": bits | value, "BXOR": bits ^ value}[op]
    return bits


def bits_of(dtype: torch.dtype, row: Row) -> torch.Tensor:
    """A row of numbers as the type stores them, in the type's carrier."""
    if dtype in INTEGERS:
        name = str(dtype).removeprefix("torch.")
        tensor = torch.from_numpy(numpy.array(row, dtype=name))
    elif dtype in ONLY_MOVED:
        return torch.tensor(row, dtype=CARRIERS[dtype.itemsize])
    elif dtype in COMPLEXES:
        tensor = torch.tensor(row, dtype=torch.complex128).to(dtype)
    else:
        tensor = torch.tensor(row, dtype=torch.bool if dtype is torch.bool else torch.float64)
        tensor = tensor.to(dtype)
    return tensor.view(CARRIERS[dtype.itemsize])
