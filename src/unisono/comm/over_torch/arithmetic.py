"""How numbers travel so that a torch backend, whatever it can reduce, reduces them right.

What a backend lacks or gets wrong is turned into what it has: gloo knows no int16 and adds bools
to something that is not a bool, nccl knows no bitwise reductions, and neither lets a NaN win a
minimum. Integers wrap around; float16 and bfloat16 are combined in float32 where the backend would
round in between (nccl combines them by itself).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm.base import Op, PremulSum

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
_BITWISE: dict[str, Callable[..., torch.Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_SIGN = -(2**63)


@dataclass(frozen=True)
class Encoding:
    """One reduction of one dtype in terms of what a backend has.

    `encode` makes what travels, `op` is torch's name for its reduction, `decode` turns the result
    (and the number of ranks) into numbers again. Where `fold` is given the backend has no such
    reduction: gather what travels and fold it here, in rank order. Where `is_plain` the numbers
    travel as they are.
    """

    op: str
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int], torch.Tensor]
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    is_plain: bool = False


def choose_encoding(op: Op, dtype: torch.dtype, backend: str) -> Encoding:
    """How to encode a reduction that `has_meaning` for a dtype, on gloo, nccl, mpi, ..."""
    name = "premul_sum" if isinstance(op, PremulSum) else op
    if name == "mean":
        name = "avg"
    factor = float(op.factor) if isinstance(op, PremulSum) else 1.0
    if dtype is torch.bool:
        return _of_bools(name)
    if dtype.is_complex:
        return _of_complex(name, factor)
    if dtype.is_floating_point:
        return _of_floats(name, factor, dtype, backend)
    return _of_integers(name, factor, dtype, backend)


def _of_bools(name: str) -> Encoding:
    """As bytes 0 and 1: "any" is their maximum, "all" their minimum, xor the last bit of a sum."""
    kinds = {"sum": "MAX", "bor": "MAX", "product": "MIN", "band": "MIN", "bxor": "SUM"}
    return Encoding(
        kinds.get(name, name.upper()),
        lambda row: row.to(torch.uint8),
        lambda row, _: (row & 1).to(torch.bool),
    )


def _of_integers(name: str, factor: float, dtype: torch.dtype, backend: str) -> Encoding:
    wire = _WIDER.get(dtype, dtype)
    flips = dtype is torch.uint64 and name in ("min", "max")

    def encode(row: torch.Tensor) -> torch.Tensor:
        row = row.view(torch.int64) if dtype is torch.uint64 else row
        if flips:  # so that signed numbers stand in the order of the unsigned ones
            return row ^ _SIGN
        if name == "premul_sum":
            row = row.to(torch.int64) * int(factor)
        return row if dtype is torch.uint64 else row.to(wire)

    def decode(row: torch.Tensor, _: int) -> torch.Tensor:
        if dtype is torch.uint64:
            return (row ^ _SIGN if flips else row).view(torch.uint64)
        return row.to(dtype)

    fold = _BITWISE.get(name) if backend != "gloo" else None
    is_plain = wire is dtype and dtype is not torch.uint64 and name != "premul_sum"
    return Encoding(_torch_name(name), encode, decode, fold, is_plain)


def _of_floats(name: str, factor: float, dtype: torch.dtype, backend: str) -> Encoding:
    if name in ("min", "max"):
        return _of_ordered_floats(name, dtype)
    combines_halves = backend == "nccl" and name != "premul_sum"
    wire = dtype if combines_halves else _WIDER.get(dtype, dtype)
    averages = backend == "nccl" and name == "avg"

    def encode(row: torch.Tensor) -> torch.Tensor:
        row = row.to(wire)
        return row * factor if name == "premul_sum" else row

    def decode(row: torch.Tensor, ranks: int) -> torch.Tensor:
        return (row / ranks if name == "avg" and not averages else row).to(dtype)

    is_plain = wire is dtype and (averages or name in ("sum", "product"))
    return Encoding("AVG" if averages else _torch_name(name), encode, decode, None, is_plain)


def _of_ordered_floats(name: str, dtype: torch.dtype) -> Encoding:
    """As integers in the same order, with NaN beyond all numbers: so it wins everywhere."""
    wide = _WIDER.get(dtype, dtype)
    bits = torch.int32 if wide is torch.float32 else torch.int64
    limits = torch.iinfo(bits)
    beyond = limits.max if name == "max" else limits.min

    def reordered(row: torch.Tensor) -> torch.Tensor:
        return torch.where(row < 0, row ^ limits.max, row)

    def encode(row: torch.Tensor) -> torch.Tensor:
        row = row.to(wide)
        return reordered(row.view(bits)).masked_fill_(row.isnan(), beyond)

    def decode(row: torch.Tensor, _: int) -> torch.Tensor:
        return reordered(row).view(wide).to(dtype)

    return Encoding(name.upper(), encode, decode)


def _of_complex(name: str, factor: float) -> Encoding:
    """Pairs of reals add and scale alike; for products no backend can be relied on."""
    if name == "product":
        return Encoding("PRODUCT", lambda row: row, lambda row, _: row, _multiply)
    return Encoding(
        "SUM",
        lambda row: torch.view_as_real(row).reshape(-1) * factor,
        lambda row, ranks: torch.view_as_complex(
            (row / ranks if name == "avg" else row).view(-1, 2)
        ),
    )


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """As the engine multiplies: no step fused with another, so that the bits are the same."""
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    return torch.complex(real, imag)


def _torch_name(name: str) -> str:
    return {"avg": "SUM", "premul_sum": "SUM"}.get(name, name.upper())


def reduce_op(name: str) -> Any:
    """torch's object for the name of a reduction."""
    return getattr(torch.distributed.ReduceOp, name)
