"""What `op=` means: a name, a torch ReduceOp or a PremulSum."""

from __future__ import annotations

from typing import Any

from unisono.collectives.refusals import refuse_type
from unisono.comm.arguments import describe_meaningless, describe_unknown_reduction
from unisono.comm.base import (
    Communicator,
    PremulSum,
    Reduction,
    dtype_name,
    has_meaning,
)
from unisono.comm.reductions import known_reduction


def reduction(
    op: Any, comm: Communicator, operation: str, *tensors: Any, where: str = ""
) -> Reduction:
    """The Communicator's name of `op`, which the caller is about to apply to these tensors, found
    at `where` in a structure.

    Raises, on every rank, ValueError for a reduction that nobody knows and TypeError for one that
    has no meaning for a tensor's dtype.
    """
    known = known_reduction(op)
    if known is None:
        if isinstance(op, Communicator) or hasattr(op, "rank"):
            comm.refuse(
                operation, f"{op!r} is not a reduction: pass a group by its name, group=..."
            )
        comm.refuse(operation, describe_unknown_reduction(op))
    name: str = "premul_sum" if isinstance(known, PremulSum) else known
    for dtype in {dtype_name(tensor) for tensor in tensors}:
        if not has_meaning(name, dtype):
            why = describe_meaningless(name, dtype)
            refuse_type(comm, operation, f"{where}: {why}" if where else why)
    return known
