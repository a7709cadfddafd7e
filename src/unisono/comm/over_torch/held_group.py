"""A torch process group as OverTorch uses it: its calls, and which reductions its backends have.

Its methods are called directly, not `torch.distributed`'s functions: these take global ranks, and
their names change between versions of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.reductions import Reduction
from unisono.comm.transport import DEFAULT_TIMEOUT_S
from unisono.errors import UnisonoError

ON_STREAMS = frozenset(("nccl", "xccl"))
"""Backends whose calls return once they are queued on the device."""


class HeldGroup:
    """A process group, and which backend serves which device type."""

    def __init__(self, group: Any, keep: bool) -> None:
        self._group: Callable[[], Any] = (lambda: group) if keep else weakref.ref(group)
        self.backends = {
            device.type: str(group._get_backend(device).name()).lower()
            for device in group._device_types
        }
        self.timeout_s = DEFAULT_TIMEOUT_S
        for device in reversed(self.backends):
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            timeout = getattr(options, "_timeout", None)
            if timeout is not None:
                self.timeout_s = float(timeout.total_seconds())

    @property
    def group(self) -> Any:
        group = self._group()
        if group is None:
            raise UnisonoError("torch.distributed has destroyed the process group")
        return group

    def release(self) -> None:
        """Drop a process group that nothing else holds: its connections end with it."""
        self._group = lambda: None

    def backend(self, device: torch.device) -> str:
        return self.backends.get(device.type, next(iter(self.backends.values())))

    def begin(self, name: str, timeout_s: float, options: Any, *given: Any, **fields: Any) -> Any:
        """Begin a collective, by the group's name for it; `fields` are those of its options."""
        options.timeout = timedelta(seconds=timeout_s)
        for field, value in fields.items():
            setattr(options, field, value)
        return getattr(self.group, name)(*given, options)

    def run(self, name: str, timeout_s: float, options: Any, *given: Any, **fields: Any) -> None:
        """The same, and wait for it: on the device's stream, if there is one."""
        wait_for([self.begin(name, timeout_s, options, *given, **fields)])


def wait_for(works: list[Any]) -> None:
    """Wait for torch's works; a finished call may have returned none."""
    for work in works:
        if work is not None:
            work.wait()


# -- reductions: unsupported ones are refused before data moves ------------------------------------

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
"""The reductions and dtypes of each backend. One that is not listed raises its own errors."""


def check_supported(reduction: Reduction, dtype: str, backend: str) -> None:
    """Raise TypeError if a backend lacks a reduction that is defined for this dtype."""
    op = reduction.name
    if op == "premul_sum":  # nccl's own does not scale in a group of one rank
        raise TypeError(f"{backend} does not support premul_sum: scale the {dtype} tensor, use sum")
    reductions, dtypes = _KNOWN.get(backend, ((op,), (dtype,)))
    if op not in reductions:
        raise TypeError(f"{backend} does not support {op}, for {dtype} or others: use unisono")
    if (backend, dtype, op) == ("gloo", "bool", "sum"):  # it would store a 2 in a bool
        raise TypeError('gloo cannot reduce bool by sum: use op="max", which is the same')
    plain = op in ("sum", "avg") if dtype in _COMPLEX else True
    if dtype not in dtypes or not plain:
        raise TypeError(
            f"{backend} cannot reduce {dtype} by {op}: convert it (x.int(), x.float()), or "
            "use the backend unisono"
        )


def reduce_op(op: Reduction, backend: str) -> Any:
    """torch's object for a supported reduction; the sum for an average, except with nccl."""
    name = "sum" if op.name == "avg" and backend != "nccl" else op.name
    return getattr(dist.ReduceOp, name.upper())
