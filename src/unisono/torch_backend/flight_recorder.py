"""torch's Flight Recorder on groups of ours, from torch 2.15 on.

torch records calls on their way through its dispatcher to a backend, and looks at that backend when
a group is made. Ours are carried out before that way begins. So a group has a stand-in for such a
backend, and where TORCH_FR_BUFFER_SIZE asks for recording, every call takes the long way: the
dispatcher, torch's hooks, the stand-in, and back into the group. Whoever does not ask does not pay.
"""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from unisono.comm.communicator import Communicator
from unisono.torch_backend.autoload import NAME
from unisono.torch_backend.process_group import UnisonoProcessGroup
from unisono.torch_support import never_compiled

_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_CALLS = (
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
_OLD_NAMES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)
_ProcessGroup: Any = dist.ProcessGroup
_Backend: Any = _distributed_c10d.Backend


def recorded_group_over(comm: Communicator, store: Any) -> UnisonoProcessGroup:
    """A torch process group over a Communicator, such that torch's hooks can be attached."""
    group = (RecordedProcessGroup if _is_asked_for() else UnisonoProcessGroup)(comm, store)
    group.recorded_backend = RecordedBackend(group)  # torch keeps its C++ half alone
    kind = _ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, group.recorded_backend)
    group._set_default_backend(kind)
    return group


def _is_asked_for() -> bool:
    size = os.environ.get(_VARIABLE, "")
    return size.isdigit() and int(size) > 0


class RecordedProcessGroup(UnisonoProcessGroup):
    """A group whose calls pass torch's hooks."""


class RecordedBackend(_Backend):  # type: ignore[misc]
    """What torch's dispatcher takes for the group's backend: it hands calls back to the group."""

    def __init__(self, group: UnisonoProcessGroup) -> None:
        super().__init__(group.comm.rank, group.comm.size)
        self._group = weakref.ref(group)
        self.last = threading.local()
        """`work`: what came of this thread's last call."""

    def getBackendName(self) -> str:
        return NAME

    def carry_out(self, name: str, given: tuple[Any, ...]) -> Any:
        """What the dispatcher asks for. torch counts a call as over once it has a work, and of one
        of ours would show only `wait` to the program: it gets another."""
        self.last.work = getattr(UnisonoProcessGroup, name)(self._group(), *given)
        return dist.Work()


def _handed_back(name: str) -> Callable[..., Any]:
    def call(self: RecordedBackend, *given: Any) -> Any:
        return self.carry_out(name, given)

    return call


def _recorded(name: str) -> Callable[..., Any]:
    base = getattr(_ProcessGroup, name)

    def call(self: RecordedProcessGroup, *given: Any, **named: Any) -> Any:
        last = self.recorded_backend.last
        last.work = None
        base(self, *given, **named)
        return last.work

    # pybind11 knows by the name of the calling code that a class asks for what it overrides.
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


for _name in _CALLS:
    if hasattr(_ProcessGroup, _name) and hasattr(_Backend, _name):
        setattr(RecordedBackend, _name, _handed_back(_name))
        setattr(RecordedProcessGroup, _name, _recorded(_name))
for _name in _OLD_NAMES:  # torch's own: it asks for them, too, and they come to the new ones
    setattr(RecordedProcessGroup, _name, getattr(_ProcessGroup, _name, None))
never_compiled(RecordedProcessGroup)
never_compiled(RecordedBackend)
