"""Arguments whose tensors share memory: what works in place, and what is refused.

The rules are those of csrc/python/overlaps.c, and the table is in docs/collectives.md. Here tensors
of any device are shown to it; where there is no engine, nobody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from unisono.comm import engine
from unisono.comm.base import dtype_name

_KNOWN = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_KNOWN += ("float16", "float32", "float64", "complex64", "complex128")
_OTHERS = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8", 16: "=c16"}


def overlaps_itself(tensor: Any) -> bool:
    """Whether two elements of a tensor or array share memory."""
    return engine.overlaps_itself(_memory(tensor))


def overlap_complaint(
    what: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any] = (),
    rank: int = 0,
    size: int = 1,
    coalesced: bool = False,
) -> str:
    """What is wrong with where the tensors of a call lie; nothing if nothing is. Without inputs the
    outputs are both; either side is one tensor or one for each rank, and of a coalesced call many.
    """
    to, source = list(map(_memory, outputs)), list(map(_memory, inputs))
    try:
        if what == "broadcast":  # written in order: the last one stays
            engine.check_types_apart(to, len(to))
        elif not source or (coalesced and len(to) != len(source)):  # the parts of several tensors
            engine.check_overlaps("all_reduce", [*to, *source], None, rank, size, False)
        else:
            sides = [side[0] if len(side) == 1 and not coalesced else side for side in (to, source)]
            engine.check_overlaps(what, *sides, rank, size, coalesced)
    except ValueError as error:
        return str(error)
    return ""


def _memory(tensor: Any) -> Any:
    """An array that lies where the tensor does, whatever its device; it is only looked at from
    outside."""
    name = dtype_name(tensor)
    if hasattr(tensor, "data_ptr"):
        item_bytes, address = tensor.element_size(), tensor.data_ptr()
        strides = tuple(step * item_bytes for step in tensor.stride())
    else:
        item_bytes, address = tensor.itemsize, tensor.__array_interface__["data"][0]
        strides = tensor.strides
    shape = tuple(tensor.shape)
    if item_bytes > 16:  # of pairs of long doubles
        shape, strides, item_bytes = (*shape, item_bytes // 16), (*strides, 16), 16
    interface = {
        "version": 3,
        "typestr": np.dtype(name).str if name in _KNOWN else _OTHERS[item_bytes],
        "data": (address, False),
        "shape": shape,
        "strides": strides,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
