"""A group of ours as a c10d Backend, which serves one device of a torch process group: for
`"cpu:unisono,cuda:nccl"`, from torch 2.15 on.

torch calls it through its dispatcher, which a complete process group of ours bypasses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from unisono.torch_backend.autoload import NAME
from unisono.torch_backend.process_group import UnisonoProcessGroup
from unisono.torch_support import never_compiled

CALLS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""What the dispatcher needs of a backend."""
_Backend: Any = _distributed_c10d.Backend


@never_compiled
class UnisonoBackend(_Backend):  # type: ignore[misc]
    """A backend for torch's dispatcher: it passes calls on to a group of ours."""

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False

    def __init__(self, group: UnisonoProcessGroup) -> None:
        super().__init__(group.comm.rank, group.comm.size)
        self.group = group

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return self.group.shown_name

    def start_coalescing(self) -> None:
        self.group._start_coalescing()

    def end_coalescing(self) -> Any:
        return self.group._end_coalescing()


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: UnisonoBackend, *given: Any) -> Any:
        return getattr(self.group, name)(*given)

    return call


for _name in (*CALLS, "abort", "shutdown", "set_timeout"):
    setattr(UnisonoBackend, _name, _handed_on(_name))


def register_stand_in(group: UnisonoProcessGroup) -> None:
    """torch attaches its hooks to a backend of each group, when it is made; calls of a whole group
    of ours never reach it."""
    held_by_group: Any = weakref.proxy(group)
    group.stand_in = UnisonoBackend(held_by_group)  # torch keeps only its C++ half
    kind: Any = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, group.stand_in)
    group._set_default_backend(kind)
