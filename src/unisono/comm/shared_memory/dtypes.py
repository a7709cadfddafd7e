"""Lists of tensors of several dtypes as lists of one each, which is what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from unisono.comm.arguments import check_tensor
from unisono.comm.base import dtype_name
from unisono.comm.engine import check_types_apart

_dtype_of = attrgetter("dtype")


def sort_by_dtype(
    outputs: Sequence[Any], inputs: Sequence[Any]
) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of tensors sorted into lists of one dtype each, in order of first appearance.

    Raises TypeError for what is no tensor, ValueError for tensors that share memory.
    """
    if outputs is inputs and len(dtypes_of(outputs)) == 1:  # the usual case
        both = list(outputs)
        return [(both, both)]
    alike: dict[str, tuple[list[Any], list[Any]]] = {}
    for output, input in zip(outputs, inputs, strict=True):
        for tensor in (output, input):
            if not hasattr(tensor, "dtype"):
                check_tensor(tensor, False, ("cpu",))
        pair = alike.setdefault(dtype_name(output), ([], []))
        pair[0].append(output)
        pair[1].append(input)
    if len(alike) > 1:  # the engine sees one list after the other
        together = outputs if outputs is inputs else [*outputs, *inputs]
        check_types_apart(together, len(outputs))
    if outputs is inputs:
        return [(both, both) for both, _ in alike.values()]
    return list(alike.values())


def dtypes_of(tensors: Sequence[Any]) -> set[Any]:
    """Their dtypes, found without Python code for each; none if something is not a tensor."""
    try:
        return set(map(_dtype_of, tensors))
    except AttributeError:
        return set()
