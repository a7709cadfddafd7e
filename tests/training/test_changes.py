"""The engine packs the changes between two versions of a row, and unpacks them."""

from __future__ import annotations

import numpy
import pytest

from unisono.comm.engine import native


def pack(old: numpy.ndarray, new: numpy.ndarray, size: int, room: int) -> bytes | None:
    """The changes; None if there is no room for them."""
    packed = numpy.zeros(room, dtype=numpy.uint8)
    places = old.ctypes.data, new.ctypes.data, new.nbytes, size, packed.ctypes.data, room
    length = native.pack_changes(*places)
    return None if length < 0 else packed[:length].tobytes()


def apply(at: numpy.ndarray, size: int, packed: bytes) -> bool:
    row = numpy.frombuffer(packed, dtype=numpy.uint8)
    return bool(native.apply_changes(at.ctypes.data, at.nbytes, size, row.ctypes.data, len(packed)))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_the_same_bits_in_as_many_bytes_as_promised(size: int, share: float) -> None:
    chance = numpy.random.default_rng(size)
    for count in (0, 1, 3, 255, 256, 4099):
        old = chance.integers(0, 256, (count, size), dtype=numpy.uint8)
        changed = chance.random(count) < share
        new = old.copy()
        new[changed] ^= 0x81
        base = old.copy()
        packed = pack(old, new, size, 4 * new.nbytes + 64)
        assert packed is not None
        elements = int(changed.sum()) * (2 if size == 16 else 1)
        most = elements * (min(size, 8) + 1) + new.nbytes // min(size, 8) // 255
        assert elements * (min(size, 8) + 1) <= len(packed) <= most
        assert numpy.array_equal(old, new)  # the snapshot is that of the new version
        assert apply(base, size, packed)
        assert numpy.array_equal(base, new)


def test_what_does_not_fit_is_refused() -> None:
    old, new = numpy.zeros(100, dtype=numpy.int16), numpy.ones(100, dtype=numpy.int16)
    assert pack(old.copy(), new, 2, 299) is None
    packed = pack(old.copy(), new, 2, 300)
    assert packed is not None
    at = numpy.zeros(120, dtype=numpy.int16)
    assert not apply(at[:99], 2, packed), "an element beyond the end"
    assert not apply(at[:100], 2, packed[:-1]), "half an element"
    assert not apply(at[:100], 2, b"\xff"), "255 elements of 100 stayed"
    assert (at[100:] == 0).all()
