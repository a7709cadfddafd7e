"""What `op=` means: a name, a torch ReduceOp or a PremulSum."""

from __future__ import annotations

from typing import Any

from unisono.collectives.refusals import refuse_type
from unisono.comm.base import REDUCTIONS, Communicator, Op, PremulSum, dtype_name, has_meaning

_NAMES = {name: name for name in REDUCTIONS} | {"mean": "avg", "prod": "product"}


def reduction(op: Any, comm: Communicator, operation: str, *tensors: Any, where: str = "") -> Op:
    """The Communicator's name of `op`, which the caller is about to apply to these tensors, found
    at `where` in a structure.

    Raises, on every rank, ValueError for a reduction that nobody knows and TypeError for one that
    has no meaning for a tensor's dtype.
    """
    known = _known(op)
    if known is None:
        names = ", ".join(_NAMES)
        comm.refuse(
            operation, f"unknown reduction {op!r}: use {names}, a torch ReduceOp or a PremulSum"
        )
    name = "premul_sum" if isinstance(known, PremulSum) else known
    for dtype in {dtype_name(tensor) for tensor in tensors}:
        if not has_meaning(name, dtype):
            place = f"{where}: " if where else ""
            why = f"{place}{name} has no meaning for {dtype}{_remedy(name)}"
            refuse_type(comm, operation, why)
    return known


def _remedy(name: str) -> str:
    """What to do about a reduction that has no meaning for a dtype."""
    if name == "avg":
        return ': pass a floating tensor (x.float()), or use op="sum" and divide'
    if name in ("band", "bor", "bxor"):
        return ": it combines bits, which only integers and bools have"
    return ""


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
