"""Which reductions a backend of torch's has; others are refused before anything moves."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.comm.reductions import Reduction

_OF_ALL = ("sum", "avg", "product", "min", "max")
_BITWISE = ("band", "bor", "bxor")
_USUAL = ("int8", "uint8", "int32", "int64", "float32", "float64")
_HALVES = ("float16", "bfloat16")
_COMPLEX = ("complex64", "complex128")
_KNOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gloo": ((*_OF_ALL, *_BITWISE), ("bool", *_USUAL, *_HALVES, *_COMPLEX)),
    "nccl": (_OF_ALL, ("bool", *_USUAL, *_HALVES, *_COMPLEX)),
    "mpi": (_OF_ALL, ("int16", *_USUAL)),
}
"""The reductions and the dtypes of each. A backend that is not listed speaks for itself."""


def check_supported(reduction: Reduction, dtype: str, backend: str) -> None:
    """Raise TypeError where a backend lacks a reduction that has a meaning for this dtype."""
    op = reduction.name
    if op == "premul_sum":  # nccl's own does not scale in a group of one
        raise TypeError(f"{backend} has no premul_sum: scale the {dtype} tensor, and use sum")
    reductions, dtypes = _KNOWN.get(backend, ((op,), (dtype,)))
    if op not in reductions:
        raise TypeError(f"{backend} has no {op}, of {dtype} or others: use the backend unisono")
    if (backend, dtype, op) == ("gloo", "bool", "sum"):  # it would leave a 2 in a bool
        raise TypeError('gloo cannot reduce bool by sum: use op="max", which is the same')
    plain = op in ("sum", "avg") if dtype in _COMPLEX else True
    if dtype not in dtypes or not plain:
        raise TypeError(
            f"{backend} cannot reduce {dtype} by {op}: convert it (x.int(), x.float()), or "
            "use the backend unisono"
        )


def averages(backend: str) -> bool:
    """Whether a backend divides by itself; of others the sum is taken, and divided here."""
    return backend == "nccl"


def reduce_op(op: Reduction, backend: str) -> Any:
    """torch's object for a reduction that is supported."""
    name = "sum" if op.name == "avg" and not averages(backend) else op.name
    return getattr(dist.ReduceOp, name.upper())
