"""torch's Flight Recorder on groups of ours, from torch 2.15 on.

torch records calls on their way through its dispatcher to a backend, and inspects that backend when
a group is made. Our groups bypass the dispatcher. So a group has a stand-in for such a backend, and
if TORCH_FR_BUFFER_SIZE turns recording on, every call goes through the dispatcher, torch's hooks,
the stand-in, and back into the group. Without recording there is no cost.
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

from unisono.comm.communicator import Communicator
from unisono.torch_backend.backend import CALLS, UnisonoBackend
from unisono.torch_backend.process_group import UnisonoProcessGroup
from unisono.torch_support import never_compiled

_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_OLD_NAMES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)
_ProcessGroup: Any = dist.ProcessGroup


def recorded_group_over(comm: Communicator, store: Any) -> UnisonoProcessGroup:
    """A torch process group over a Communicator, with what torch's hooks need."""
    return with_backend(
        (RecordedProcessGroup if _is_asked_for() else UnisonoProcessGroup)(comm, store)
    )


def with_backend(group: UnisonoProcessGroup) -> UnisonoProcessGroup:
    """The same group, with the stand-in that torch inspects."""
    held_by_group: Any = weakref.proxy(group)
    group.recorded_backend = RecordedBackend(held_by_group)  # torch keeps only its C++ half
    kind = _ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, group.recorded_backend)
    group._set_default_backend(kind)
    return group


def _is_asked_for() -> bool:
    size = os.environ.get(_VARIABLE, "")
    return size.isdigit() and int(size) > 0


class RecordedProcessGroup(UnisonoProcessGroup):
    """A group whose calls pass torch's hooks."""


class RecordedBackend(UnisonoBackend):
    """The group's backend for torch's dispatcher: it passes calls back to the group."""

    def __init__(self, group: UnisonoProcessGroup) -> None:
        super().__init__(group)
        self.last = threading.local()
        """`work`: the result of this thread's last call."""

    def carry_out(self, name: str, given: tuple[Any, ...]) -> Any:
        """torch counts a call as finished once it has a work, and would pass on only `wait` of
        ours: it gets an empty one, and the program gets `last.work`."""
        self.last.work = getattr(UnisonoProcessGroup, name)(self.group, *given)
        return dist.Work()


def _recorded(name: str) -> Callable[..., Any]:
    base = getattr(_ProcessGroup, name)

    def call(self: RecordedProcessGroup, *given: Any, **named: Any) -> Any:
        last = self.recorded_backend.last
        last.work = None
        base(self, *given, **named)
        return last.work

    # pybind11 uses the calling code's name to see that a class looks up its own override.
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


for _name in CALLS:
    setattr(RecordedProcessGroup, _name, _recorded(_name))
for _name in _OLD_NAMES:  # torch looks up its own names, too, which lead to the new ones
    setattr(RecordedProcessGroup, _name, getattr(_ProcessGroup, _name, None))
never_compiled(RecordedProcessGroup)
never_compiled(RecordedBackend)
