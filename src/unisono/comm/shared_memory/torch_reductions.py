"""torch's reductions in the options of its calls: identified by name, whatever their numbers.

A ReduceOp from `options.reduceOp` is a new object every time. Its hash depends only on its kind,
and takes a third of the time of its name; so each kind's hash is looked up once, by name.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import ReduceOp, _make_nccl_premul_sum

from unisono.comm.engine import native
from unisono.comm.reductions import REDUCTIONS

_Type: Any = ReduceOp.RedOpType


@functools.cache
def reductions_by_hash() -> dict[int, str]:
    """The name of a torch ReduceOp with this hash; the engine knows them from now on."""
    names = (*REDUCTIONS, "premul_sum")
    ops, others = [_make(name) for name in names], [_make(name) for name in names]
    hashes = tuple(map(hash, ops))
    if len(set(hashes)) < len(names) or hashes != tuple(map(hash, others)):
        raise RuntimeError(
            "unisono cannot identify the reductions of this torch: the hash of a ReduceOp no "
            "longer depends on its kind alone. See `unisono doctor` for versions that work"
        )
    native.know_torch(_profiler_enabled, hashes)
    return dict(zip(hashes, names, strict=True))


def _make(name: str) -> ReduceOp:
    if name == "premul_sum":
        return _make_nccl_premul_sum(1.0)
    return ReduceOp(getattr(_Type, name.upper()))
