"""Which reductions a backend of torch's has; others are refused before anything moves."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.comm.base import Op, PremulSum

_OF_ALL = ("sum", "avg", "product", "min", "max")
_BITWISE = ("band", "bor", "bxor")
_USUAL = ("int8", "uint8", "int32", "int64", "float32", "float64")
_HALVES = ("float16", "bfloat16")
_COMPLEX = ("complex64", "complex128")
_KNOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gloo": ((*_OF_ALL, *_BITWISE), ("bool", *_USUAL, *_HALVES, *_COMPLEX)),
    "nccl": ((*_OF_ALL, "premul_sum"), ("bool", *_USUAL, *_HALVES, *_COMPLEX)),
    "mpi": (_OF_ALL, ("int16", *_USUAL)),
}
"""The reductions and the dtypes of each. A backend that is not listed speaks for itself."""


def check_supported(op: Op, dtype: str, backend: str) -> None:
    """Raise TypeError where a backend lacks a reduction that has a meaning for this dtype."""
    name = "premul_sum" if isinstance(op, PremulSum) else op
    reductions, dtypes = _KNOWN.get(backend, ((name,), (dtype,)))
    if name == "premul_sum" and name not in reductions:
        raise TypeError(f"{backend} has no premul_sum: scale the {dtype} tensor, and use sum")
    if name not in reductions:
        raise TypeError(f"{backend} has no {name}, of {dtype} or others: use the backend unisono")
    if (backend, dtype, name) == ("gloo", "bool", "sum"):  # it would leave a 2 in a bool
        raise TypeError('gloo cannot reduce bool by sum: use op="max", which is the same')
    plain = name in ("sum", "avg") if dtype in _COMPLEX else True
    scales = name != "premul_sum" or dtype in ("float32", "float64", *_HALVES)
    if dtype not in dtypes or not plain or not scales:
        raise TypeError(
            f"{backend} cannot reduce {dtype} by {name}: convert it (x.int(), x.float()), or "
            "use the backend unisono"
        )


def averages(backend: str) -> bool:
    """Whether a backend divides by itself; of others the sum is taken, and divided here."""
    return backend == "nccl"


def reduce_op(op: Op, backend: str) -> Any:
    """torch's object for a reduction."""
    if isinstance(op, PremulSum):
        return dist._make_nccl_premul_sum(op.factor)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, "SUM" if op == "avg" and not averages(backend) else op.upper())
