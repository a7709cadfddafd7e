"""Objects between ranks, and how they are encoded."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono
from unisono.collectives.encoding import decode, encode
from unisono.comm.communicator import Communicator

relaxed = settings(
    derandomize="EXPLORE" not in os.environ,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)

TORCH_DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.uint16),
]
NUMPY_DTYPES = ["?", "i1", "<i2", ">i4", "u8", "f2", "<f4", ">f8", "c8", "c16", "S3", "<U2"]
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(shapes), draw(st.sampled_from(TORCH_DTYPES))
    count = int(numpy.prod(shape, dtype=int)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw + b" "), dtype=torch.uint8)[:-1].view(dtype).view(shape)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape, dtype = draw(shapes), numpy.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    count = int(numpy.prod(shape, dtype=int))
    numbers = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return numpy.array(numbers).reshape(shape).astype(dtype)


hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
scalars = st.sampled_from([numpy.float32(0.5), numpy.int8(-3), numpy.bool_(True), numpy.float64(2)])
plain = st.recursive(
    hashables | tensors() | arrays() | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=15,
)


def assert_alike(actual: Any, other: Any) -> None:
    """Equal in type and value; tensors bit for bit."""
    assert type(actual) is type(other)
    if isinstance(actual, torch.Tensor):
        assert (actual.dtype, actual.shape) == (other.dtype, other.shape)
        assert bytes(actual.flatten().view(torch.uint8).numpy()) == bytes(
            other.flatten().view(torch.uint8).numpy()
        )
    elif isinstance(actual, (numpy.ndarray, numpy.generic)):
        assert (actual.dtype, actual.shape) == (other.dtype, other.shape)
        assert actual.tobytes() == other.tobytes()
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(other)
        for a, b in zip(actual, other, strict=True):
            assert_alike(a, b)
    elif isinstance(actual, dict):
        assert list(map(repr, actual)) == list(map(repr, other))
        for a, b in zip(actual.values(), other.values(), strict=True):
            assert_alike(a, b)
    else:
        assert repr(actual) == repr(other) if not isinstance(actual, set) else actual == other


@relaxed
@given(plain)
def test_what_is_encoded_comes_back(value: Any) -> None:
    assert_alike(decode(encode(value)), value)


@relaxed
@given(plain, st.data())
def test_what_is_cut_short_or_too_long_is_refused(value: Any, data: st.DataObject) -> None:
    whole = bytes(encode(value))
    for cut in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)):
        with pytest.raises(ValueError, match=r"."):
            decode(whole[:cut])
    with pytest.raises(ValueError, match="left"):
        decode(whole + b"N")


@relaxed
@given(plain, st.data())
def test_what_is_corrupted_is_refused_or_is_other_data(value: Any, data: st.DataObject) -> None:
    broken = bytearray(encode(value))
    spots = st.tuples(st.integers(0, len(broken) - 1), st.integers(0, 255))
    for at, byte in data.draw(st.lists(spots, min_size=1, max_size=6)):
        broken[at] = byte
    with contextlib.suppress(ValueError):
        decode(broken)


@relaxed
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_data(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(raw)


def length(number: int) -> bytes:
    return struct.pack("<Q", number)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"z",
        b"l" + length(2**60),
        b"b" + length(2**63),
        b"i" + length(2**64 - 1),
        b"d" + length(1) + b"l" + length(0) + b"N",  # a list cannot be a key
        b"e" + length(1) + b"d" + length(0),
        b"s" + length(1) + b"\xff",
        b"x" + length(7) + b"float32" + length(2) + length(2**40) + length(2**40),
        b"x" + length(7) + b"float32" + length(2) + length(0) + length(2**62),
        b"x" + length(4) + b"load" + length(0),  # an attribute of torch, but not a dtype
        b"a" + length(1) + b"O" + length(0) + bytes(8),
        b"a" + length(3) + b"i4," + length(0) + bytes(8),
        b"a" + length(4) + b"i4,(" + length(0) + bytes(8),  # NumPy parses it, as Python
        b"n" + length(4) + b"f4,)" + length(0) + bytes(8),
        b"a" + length(2) + b"i3" + length(0) + bytes(8),
        b"l" + length(1) + (b"l" + length(1)) * 5000 + b"N",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_lies_about_lengths_and_types_are_refused(raw: bytes) -> None:
    if raw.endswith(length(0) + length(2**62)):  # empty despite its size
        with contextlib.suppress(ValueError):
            assert decode(raw).numel() == 0
        return
    with pytest.raises(ValueError, match=r"."):
        decode(raw)


def test_what_is_not_plain_data_is_named() -> None:
    class Own(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match=r"\['a'\]\[1\]: builtins.object is not plain data.*allow"):
        encode({"a": [1, object()]})
    with pytest.raises(TypeError, match="Own is not plain data"):
        encode(Own())
    with pytest.raises(TypeError, match="not dense"):
        encode(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match="array of object"):
        encode(numpy.array([None]))
    with pytest.raises(ValueError, match="pickle"):
        decode(encode(range(3), allow_pickle=True))
    assert decode(encode([range(3)], allow_pickle=True), allow_pickle=True) == [range(3)]
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="contains itself"):
        encode(circle)


# -- between ranks -----------------------------------------------------------------------------


def thing(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "text": "x" * 1000 * rank,
        ("a", 1): [None, True, -(2**70), 1.5, 2j, b"\x00", {1, 2}],
        "tensor": torch.arange(rank),
        "array": numpy.ones((rank, 2), dtype=numpy.float16),
    }


@pytest.mark.ranks([1, 2, 3, 4, 8])
def test_objects_travel(comm: Communicator) -> None:
    for src in {0, comm.size - 1}:
        mine = thing(comm.rank) if comm.rank == src else object()
        assert_alike(unisono.broadcast_object(mine, src, comm), thing(src))
    for rank, received in enumerate(unisono.all_gather_object(thing(comm.rank), comm)):
        assert_alike(received, thing(rank))
    dst = comm.size - 1
    got = unisono.gather_object(thing(comm.rank), dst, comm)
    assert (got is None) == (comm.rank != dst)
    for rank, received in enumerate(got or []):
        assert_alike(received, thing(rank))
    assert unisono.all_gather_object(None) == [None] * comm.size


@pytest.mark.ranks([1, 3])
def test_one_rank_s_bad_object_is_an_error_everywhere(comm: Communicator) -> None:
    bad = comm.size - 1
    mine = {"k": [print]} if comm.rank == bad else 1
    for call in (unisono.all_gather_object, unisono.gather_object):
        with pytest.raises(TypeError, match=rf"rank {bad} .*\['k'\]\[0\].*allow_pickle=True"):
            call(mine)
    with pytest.raises(TypeError, match=rf"rank {bad} "):
        unisono.broadcast_object(mine, bad)
    assert unisono.all_gather_object(mine, allow_pickle=True)[bad] == {"k": [print]}


@pytest.mark.ranks(2)
def test_pickle_is_allowed_by_all_or_by_none(comm: Communicator) -> None:
    for call in (unisono.all_gather_object, unisono.gather_object, unisono.broadcast_object):
        with pytest.raises(ValueError, match=r"only rank 1 of group .* passed allow_pickle=True"):
            call(1, allow_pickle=comm.rank == 1)
    assert unisono.broadcast_object(range(3), allow_pickle=True) == range(3)
