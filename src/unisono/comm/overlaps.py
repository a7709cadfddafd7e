"""Arguments whose tensors share memory: what works in place, and what is refused.

The rules are those of csrc/python/overlaps.c, which the shared-memory implementation goes by; the
table is in docs/collectives.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from unisono.comm.base import dtype_name

_shares_memory: Any = np.shares_memory  # its stubs know two limits of the work only
_WIDE_INPUT = ("reduce_scatter", "scatter", "all_to_all")
_WIDE_OUTPUT = ("all_gather", "gather", "all_to_all")


def overlaps_itself(tensor: Any) -> bool:
    """Whether two elements of a tensor or array share memory."""
    memory = _memory(tensor)
    if memory.flags.c_contiguous:  # as an empty one is
        return False
    steps = [pair for pair in zip(memory.strides, memory.shape, strict=True) if pair[1] > 1]
    reach = memory.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in steps):
        if stride == 0:
            return True
        if stride < reach:  # not nested as the units of a clock are: look at every element
            addresses = np.sort(_addresses(memory))
            return bool((np.diff(addresses) < memory.itemsize).any())
        reach += (length - 1) * stride
    return False


def shared_pairs(tensors: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The numbers of those tensors that share memory, two by two, the smaller one first."""
    memories = [_memory(tensor) for tensor in tensors] if len(tensors) > 1 else []
    known = sorted(
        (*_extent(memory), number, memory) for number, memory in enumerate(memories) if memory.size
    )
    for index, (_, end, number, memory) in enumerate(known):
        for begin, _, other_number, other in itertools.islice(known, index + 1, None):
            if begin >= end:
                break
            if _share(memory, other):
                yield min(number, other_number), max(number, other_number)


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
    for one, other in shared_pairs([*outputs, *inputs]):
        if one >= len(outputs):
            continue  # what is only read may share memory
        if what == "broadcast" and dtype_name(outputs[one]) == dtype_name(outputs[other]):
            continue  # they are written in order: the last one stays
        input = other - len(outputs)
        if (
            input < 0
            or (coalesced and one != input)
            or not _is_in_place(
                _Side(outputs, one, what in _WIDE_OUTPUT, size, coalesced),
                _Side(inputs, input, what in _WIDE_INPUT, size, coalesced),
                range(size) if what == "all_to_all" else (rank,),
            )
        ):
            return describe_overlap(what, one, other, len(outputs), len(inputs))
    return ""


def describe_overlap(what: str, one: int, other: int, outputs: int, inputs: int) -> str:
    """The reason for refusing a call with so many outputs and inputs, counted in this order, of
    which these two share memory."""
    if other < outputs and inputs:
        return (
            f"outputs {one} and {other} share memory, and there is one result for each: pass clones"
        )
    if other < outputs:
        return (
            f"tensors {one} and {other} of the list share memory, and each would go into the "
            "other: pass a tensor once, or clones"
        )
    output = f"output {one}" if outputs > 1 else "output"
    input = f"input {other - outputs}" if inputs > 1 else "input"
    own = "the same part of both" if what == "all_to_all" else "this rank's own part"
    return (
        f"{output} and {input} share memory, and not as {own} in place: pass a .clone() of the "
        "input"
    )


class _Side:
    """One tensor of one side of a call, and its parts."""

    def __init__(
        self, tensors: Sequence[Any], number: int, is_wide: bool, size: int, coalesced: bool
    ) -> None:
        self.memory = _memory(tensors[number])
        self._addresses = _addresses(self.memory)
        self._own = number if is_wide and not coalesced and len(tensors) > 1 else None
        self._parts = size if is_wide and self._own is None else 1

    def part(self, rank: int) -> Any:
        """Where the elements of a rank's part lie; None: this tensor has no such part."""
        if self._parts == 1:
            return self._addresses if self._own in (None, rank) else None
        return np.split(self._addresses, self._parts)[rank]


def _is_in_place(output: _Side, input: _Side, parts: Sequence[int]) -> bool:
    """Whether an output lies where that part of the input lies which goes into it, or which was
    combined into it, and of nothing else."""
    pairs = [(output.part(part), input.part(part)) for part in parts]
    pairs = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    is_same = bool(pairs) and all(np.array_equal(taken, given) for taken, given in pairs)
    return is_same and not overlaps_itself(input.memory)


def _memory(tensor: Any) -> Any:
    """An array that lies where the tensor does, whatever its device; it is only looked at from
    outside."""
    if not hasattr(tensor, "data_ptr"):
        return np.asarray(tensor)
    item_bytes = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{item_bytes}",
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(step * item_bytes for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _extent(memory: Any) -> tuple[int, int]:
    begin = memory.__array_interface__["data"][0]
    reaches = [(n - 1) * step for n, step in zip(memory.shape, memory.strides, strict=True)]
    below, above = (
        sum(reach for reach in reaches if (reach < 0) is less) for less in (True, False)
    )
    return begin + below, begin + above + memory.itemsize


def _share(one: Any, other: Any) -> bool:
    """Of two whose extents overlap, whether they share an element; yes, where that is too hard."""
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return True
    try:
        return bool(_shares_memory(one, other, max_work=1_000_000))
    except np.exceptions.TooHardError:
        return True


def _addresses(memory: Any) -> Any:
    """Where each element lies, in order."""
    addresses = np.full((), memory.__array_interface__["data"][0], np.int64)
    for length, stride in zip(memory.shape, memory.strides, strict=True):
        addresses = addresses[..., None] + np.arange(length, dtype=np.int64) * stride
    return addresses.reshape(-1)
