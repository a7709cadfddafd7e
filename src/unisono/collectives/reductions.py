"""What `op=` means: a name, a torch ReduceOp or a PremulSum."""

from __future__ import annotations

from typing import Any

import torch

from unisono.collectives.refusals import refuse_type
from unisono.comm.arguments import describe_meaningless, describe_unknown_reduction
from unisono.comm.base import REDUCTIONS, Communicator, Op, PremulSum, dtype_name, has_meaning
from unisono.torch_habits import describe_output_first, name_type

_NAMES = {name: name for name in REDUCTIONS} | {"mean": "avg", "prod": "product"}


def reduction(op: Any, comm: Communicator, operation: str, *tensors: Any, where: str = "") -> Op:
    """The Communicator's name of `op`, which the caller is about to apply to these tensors, found
    at `where` in a structure.

    Raises, on every rank, ValueError for a reduction that nobody knows and TypeError for one that
    has no meaning for a tensor's dtype.
    """
    known = _known(op)
    if known is None:
        if isinstance(op, Communicator) or hasattr(op, "rank"):
            comm.refuse(
                operation, f"{op!r} is not a reduction: pass a group by its name, group=..."
            )
        hint = describe_output_first(operation)
        if hint and isinstance(op, (list, tuple, torch.Tensor)):
            comm.refuse(operation, f"{name_type(op)} is not a reduction: {hint}")
        others = "PremulSum, or a torch ReduceOp"
        comm.refuse(operation, describe_unknown_reduction(op, others))
    name = "premul_sum" if isinstance(known, PremulSum) else known
    for dtype in {dtype_name(tensor) for tensor in tensors}:
        if not has_meaning(name, dtype):
            why = describe_meaningless(name, dtype)
            refuse_type(comm, operation, f"{where}: {why}" if where else why)
    return known


def _known(op: Any) -> Op | None:
    if isinstance(op, str):
        return _NAMES.get(op.lower())
    if isinstance(op, PremulSum):
        return op
    kind = getattr(op, "op", op)  # a ReduceOp has its type in `op`; it may be that type itself
    name = str(getattr(kind, "name", ""))
    if name == "PREMUL_SUM" and hasattr(op, "__getstate__"):
        state = op.__getstate__()
        return PremulSum(float(state[1])) if isinstance(state, tuple) else None
    return _NAMES.get(name.lower())
