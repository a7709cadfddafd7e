"""bfloat16 is combined in float32 and rounded once: to nearest, ties to even.

Every NaN becomes the quiet one. The expectation is made of integers, from the bits of a float32 sum
that NumPy computed.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from numpy.typing import NDArray

from unisono.comm.base import Communicator

Bits = NDArray[numpy.uint16]


def widen(bits: Bits) -> NDArray[numpy.float32]:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def round_once(values: NDArray[numpy.float32]) -> Bits:
    bits = values.view(numpy.uint32).astype(numpy.uint64)
    rest, kept = bits & 0xFFFF, bits >> 16
    up = (rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))
    rounded = (kept + up).astype(numpy.uint16)
    return numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), rounded)


def every_bfloat16_beside(rank: int, shift: int) -> Bits:
    """Rank 0 has all of them in their order, others all of them turned around by `shift`."""
    every = numpy.arange(1 << 16, dtype=numpy.uint16)
    return numpy.roll(every, rank * shift)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg", "product", "max"])
def test_bfloat16_is_rounded_once(comm: Communicator, op: str) -> None:
    # 13 elements take the way of the last few, 65,536 that of many.
    for shift in (0, 1, 0x80, 0x100, 0x7F81, 0x8000, 0x8003, 12345, 54321):
        for count in (1 << 16, 13):
            a, b = (every_bfloat16_beside(rank, shift)[-count:] for rank in range(2))
            with numpy.errstate(all="ignore"):
                match op:
                    case "product":
                        expected = round_once(widen(a) * widen(b))
                    case "max":
                        expected = round_once(numpy.maximum(widen(a), widen(b)))
                    case _:
                        total = widen(a) + widen(b)
                        expected = round_once(total / 2 if op == "avg" else total)
            mine = torch.from_numpy((a, b)[comm.rank].copy()).view(torch.bfloat16)
            comm.all_reduce(mine, op=op)
            got = mine.view(torch.uint16).numpy()
            if op == "max":  # 0 and -0 are equal
                got, expected = (numpy.where(x == 0x8000, 0, x) for x in (got, expected))
            wrong = numpy.flatnonzero(got != expected)
            assert not wrong.size, (shift, wrong[:3], got[wrong[:3]], expected[wrong[:3]])
    # The processor treats NaNs as before: arithmetic keeps what else is in them.
    nan = numpy.array([0x7FC01234], dtype=numpy.uint32)
    assert (nan.view(numpy.float32) + numpy.float32(1)).view(numpy.uint32) == nan
