"""Plain data as bytes, without pickle: bytes from a peer can only become data.

A value is a one-byte tag and its contents; lengths are 8 bytes, little-endian.

    N T F            None, True, False
    i LENGTH BYTES   int, two's complement, little-endian
    f, c             float, complex: 8 or 16 bytes
    s, b LENGTH ...  str (UTF-8), bytes
    l, t, e COUNT .. list, tuple, set: the values
    d COUNT ...      dict: key, value, key, value, ...
    x, a, n          torch tensor, NumPy array, NumPy scalar: dtype as a str, COUNT of dimensions
                     and each length, then the elements, row by row
    p LENGTH BYTES   a pickle, read only by those who allow it

Types are exact: a subclass of dict or int is not encoded. Tensors come back on the CPU, detached
from autograd's graph.
"""

import pickle
import re
import struct
from typing import Any, NoReturn

import numpy
import torch

from unisono.collectives.ragged import flat_bytes

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,10}")
_MANY: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e"}
_DEEPEST = 200
"""How deep structures may be nested; a structure that contains itself exceeds it."""


def encode(value: Any, allow_pickle: bool = False) -> bytearray:
    """The bytes of a value. Raises TypeError, with the path, for anything but plain data unless
    pickle is allowed, and ValueError if the value is nested too deeply."""
    out = bytearray()
    _put(out, value, (), allow_pickle)
    return out


def decode(data: bytes | bytearray | memoryview, allow_pickle: bool = False) -> Any:
    """The value of these bytes. Raises ValueError if `encode` did not make them, or if they hold a
    pickle that is not allowed. Never allocates more memory than the bytes account for."""
    reader = _Reader(memoryview(data).cast("B"), allow_pickle)
    try:
        value = reader.value(0)
    except (TypeError, UnicodeDecodeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"these bytes are not an encoded value: {error}") from error
    if reader.at != len(reader.data):
        raise ValueError(f"{len(reader.data) - reader.at} bytes are left after the value")
    return value


# -- writing -------------------------------------------------------------------------------------


def _put(out: bytearray, value: Any, path: tuple[str, ...], allow_pickle: bool) -> None:
    if len(path) > _DEEPEST:
        raise ValueError(f"a value is nested deeper than {_DEEPEST}, or contains itself")
    kind = type(value)
    if kind is str:
        _put_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is int:
        _put_bytes(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind in _MANY:
        out += _MANY[kind] + _LENGTH.pack(len(value))
        for index, member in enumerate(value):
            _put(out, member, (*path, f"[{index}]"), allow_pickle)
    elif kind is dict:
        out += b"d" + _LENGTH.pack(len(value))
        for key, member in value.items():
            below = (*path, f"[{key!r}]")
            _put(out, key, below, allow_pickle)
            _put(out, member, below, allow_pickle)
    elif value is None or kind is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    elif kind is torch.Tensor:
        if value.layout is not torch.strided or value.is_quantized:
            _refuse(value, path, "not dense")
        name = str(value.dtype).removeprefix("torch.")
        _put_elements(out, b"x", name, flat_bytes(value).cpu().numpy(), tuple(value.shape))
    elif kind is bytes:
        _put_bytes(out, b"b", value)
    elif kind is complex:
        out += b"c" + _COMPLEX.pack(value.real, value.imag)
    elif kind is numpy.ndarray and value.dtype.kind in "biufcSU":
        _put_elements(out, b"a", value.dtype.str, value, value.shape)
    elif isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        _put_elements(out, b"n", value.dtype.str, numpy.asarray(value), ())
    elif allow_pickle:
        _put_bytes(out, b"p", pickle.dumps(value))
    else:
        is_array = kind is numpy.ndarray
        _refuse(value, path, f"an array of {value.dtype}" if is_array else "not plain data")


def _refuse(value: Any, path: tuple[str, ...], why: str) -> NoReturn:
    kind = type(value)
    where = f"{''.join(path)}: " if path else ""
    raise TypeError(
        f"{where}{kind.__module__}.{kind.__qualname__} is {why}: convert it, or pass "
        "allow_pickle=True on every rank if you trust them all"
    )


def _put_bytes(out: bytearray, tag: bytes, data: bytes) -> None:
    out += tag
    out += _LENGTH.pack(len(data))
    out += data


def _put_elements(
    out: bytearray, tag: bytes, dtype: str, array: Any, shape: tuple[int, ...]
) -> None:
    _put_bytes(out, tag, dtype.encode())
    out += _LENGTH.pack(len(shape))
    for length in shape:
        out += _LENGTH.pack(length)
    out += numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data


# -- reading -------------------------------------------------------------------------------------


def torch_dtype(name: object) -> torch.dtype:
    """The dtype with this name. Raises ValueError if torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {str(name)[:80]!r}")
    return dtype


def _numpy_dtype(name: str) -> numpy.dtype[Any]:
    """numpy.dtype parses more than names: "i4,(" raises a SyntaxError there."""
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a dtype of plain elements")
    return numpy.dtype(name)


class _Reader:
    """A position in the bytes. Every length is checked against the bytes that remain."""

    def __init__(self, data: memoryview, allow_pickle: bool) -> None:
        self.data = data
        self.at = 0
        self.allow_pickle = allow_pickle

    def take(self, count: int) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise ValueError(f"{count} bytes expected, {left} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def length(self) -> int:
        return int(_LENGTH.unpack(self.take(8))[0])

    def count(self) -> int:
        """How many values follow; each takes at least one byte."""
        count = self.length()
        if count > len(self.data) - self.at:
            raise ValueError(f"{count} values expected in {len(self.data) - self.at} bytes")
        return count

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST + 1:
            raise ValueError(f"values are nested deeper than {_DEEPEST}")
        tag = bytes(self.take(1))
        if tag in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag == b"i":
            return int.from_bytes(self.take(self.length()), "little", signed=True)
        if tag == b"f":
            return _FLOAT.unpack(self.take(8))[0]
        if tag == b"c":
            return complex(*_COMPLEX.unpack(self.take(16)))
        if tag == b"s":
            return str(self.take(self.length()), "utf-8", "surrogatepass")
        if tag == b"b":
            return bytes(self.take(self.length()))
        if tag in b"lte":
            make: Any = {b"l": list, b"t": tuple, b"e": set}[tag]
            return make([self.value(depth + 1) for _ in range(self.count())])
        if tag == b"d":
            pairs = range(self.count())
            return {self.value(depth + 1): self.value(depth + 1) for _ in pairs}
        if tag in b"xan":
            return self.elements(tag)
        if tag == b"p":
            data = self.take(self.length())
            if not self.allow_pickle:
                raise ValueError("it is pickled, and this rank did not pass allow_pickle=True")
            return pickle.loads(data)
        raise ValueError(f"unknown tag {tag!r}")

    def elements(self, tag: bytes) -> Any:
        name = str(self.take(self.length()), "utf-8")
        shape = [self.length() for _ in range(self.count())]
        if len(shape) > 64 or any(length >= 2**63 for length in shape):
            raise ValueError(f"invalid shape {shape[:65]}")
        dtype: Any = torch_dtype(name) if tag == b"x" else _numpy_dtype(name)
        count = 1
        for length in shape:
            count *= length
        data = bytearray(self.take(count * dtype.itemsize))
        if tag == b"x":
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
        array = numpy.ndarray(shape, dtype, data)
        return array[()] if tag == b"n" and not shape else array
