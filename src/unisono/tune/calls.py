"""What is timed: a collective of some size, on memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from unisono.comm.base import Communicator

Call = Callable[[], object]


def make_call(
    comm: Communicator,
    collective: str,
    size_bytes: int,
    algorithm: str | None = None,
    *,
    shared: bool = False,
    reads: bool = False,
) -> Call:
    """One call whose tensor, or wide side, has about `size_bytes`; in shared tensors, or followed
    by one look at every element of the output, where asked for."""
    part = max(1, size_bytes // 4 // comm.size)
    whole = part * comm.size

    def zeros(count: int) -> Any:
        if shared:
            return comm.zeros((count,), numpy.dtype(numpy.float32))
        return numpy.zeros(count, numpy.float32)

    options = {} if algorithm is None else {"algorithm": algorithm}
    method = getattr(comm, collective)
    if collective in ("all_reduce", "broadcast", "reduce"):
        tensors = [zeros(whole)]
    elif collective == "all_gather":
        tensors = [zeros(whole), zeros(part)]
    elif collective == "reduce_scatter":
        tensors = [zeros(part), zeros(whole)]
    else:
        tensors = [zeros(whole), zeros(whole)]
    output = tensors[0]

    def call() -> object:
        method(*tensors, **options)
        return output.sum() if reads else None

    return call
