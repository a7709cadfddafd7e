"""Half types are combined in float32 and rounded once: to nearest, ties to even.

Every NaN of bfloat16 becomes the quiet one. The expected result is computed with integers, from the
bits of NumPy's float32 sum; for float16 NumPy, which also rounds with integers, computes it.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from numpy.typing import NDArray

from unisono.comm.communicator import Communicator

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
    """Rank 0 has all of them in order, the others all of them rotated by `shift`."""
    every = numpy.arange(1 << 16, dtype=numpy.uint16)
    return numpy.roll(every, rank * shift)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg", "product", "max"])
def test_bfloat16_is_rounded_once(comm: Communicator, op: str) -> None:
    # 13 elements take the path for the last few, 65,536 that for many.
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
    # The processor's NaN mode is unchanged: arithmetic keeps their payload.
    nan = numpy.array([0x7FC01234], dtype=numpy.uint32)
    assert (nan.view(numpy.float32) + numpy.float32(1)).view(numpy.uint32) == nan


def beside_everything(kind: str) -> list[Bits]:
    """What every number of the type is combined with: special values, and near ties."""
    every = numpy.arange(1 << 16, dtype=numpy.uint16)
    fraction = 7 if kind == "bfloat16" else 10
    infinity = 0x7F80 if kind == "bfloat16" else 0x7C00
    one = (infinity >> fraction >> 1) << fraction
    unsigned = [0, 1, 2, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1]
    unsigned += [one, one + 1, one + 0x55, infinity - 1, infinity, infinity + 1]
    unsigned += [infinity | 1 << (fraction - 1), 0x7FFF]
    constants = [numpy.full_like(every, sign | bits) for bits in unsigned for sign in (0, 0x8000)]
    # Half a unit in the last place of each number, and a little more or less; 0 for small ones.
    last_place = numpy.clip((every & infinity).astype(int) - (fraction + 1 << fraction), 0, None)
    near_ties = [
        ((every & 0x8000 ^ sign) | numpy.clip(last_place + more, 0, None)).astype(numpy.uint16)
        for more in (-1, 0, 1)
        for sign in (0, 0x8000)
    ]
    return constants + near_ties + [numpy.roll(every, shift) for shift in (1, 0x7F81, 12345)]


@pytest.mark.ranks([2, 3, 4, 8])
@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_every_half_number_beside_every_kind_of_partner(
    comm: Communicator, kind: str, op: str
) -> None:
    def wide(bits: Bits) -> NDArray[numpy.float32]:
        return widen(bits) if kind == "bfloat16" else bits.view(numpy.float16).astype("float32")

    partners, sources = beside_everything(kind), comm.size
    for first in range(0, len(partners), 1 if sources == 2 else 5):
        others = [partners[(first + n * n) % len(partners)] for n in range(sources - 1)]
        rows = [numpy.arange(1 << 16, dtype=numpy.uint16), *others]
        with numpy.errstate(all="ignore"):
            total = wide(rows[0])
            for row in others:
                total = total * wide(row) if op == "product" else total + wide(row)
            total = total / numpy.float32(sources) if op == "avg" else total
            half = total.astype(numpy.float16).view(numpy.uint16)
        expected = round_once(total) if kind == "bfloat16" else half
        got = rows[comm.rank].copy()
        comm.all_reduce(torch.from_numpy(got).view(getattr(torch, kind)), op)
        if kind == "float16":  # any NaN is accepted
            both_nan = numpy.isnan(wide(got)) & numpy.isnan(total)
            got = numpy.where(both_nan, expected, got)
        wrong = numpy.flatnonzero(got != expected)[:3]
        assert not wrong.size, (first, wrong, got[wrong], expected[wrong])
