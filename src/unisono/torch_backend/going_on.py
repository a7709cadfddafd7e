"""torch's own ways to continue with a group, since torch 2.15: `shrink_group`, and groups made with
`enable_reconfigure`, whose members the program can replace at any time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d

from unisono.comm.factory import alone, connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.work import FinishedWork
from unisono.errors import GroupAborted, PeerLost, UnisonoError
from unisono.torch_backend.backend import UnisonoBackend
from unisono.torch_backend.process_group import UnisonoProcessGroup, our_group
from unisono.torch_support import never_compiled

_torch: Any = c10d  # torch's stubs lack them
_c_torch: Any = _distributed_c10d


def shrink(group: UnisonoProcessGroup, excluded: Sequence[int], aborts: bool) -> UnisonoBackend:
    """A Backend of the ranks that are not excluded; only they call it. `aborts`: calls in progress
    on any rank of the group end. Raises NoQuorum if, over hosts, other ranks have died, too."""
    comm = group.comm
    if aborts:
        comm.abort("shrink_group ended the calls in progress")
    left = [rank for rank in range(comm.size) if rank not in excluded]
    may_split = comm.transport.is_on_one_host or comm.errored is None
    made = comm.split(left, label="shrunk") if may_split else comm.shrink(at_least=len(left))
    assert made is not None  # torch has rejected excluded callers
    if our_group(dist.group.WORLD) is group:  # torch renumbers the ranks of the world
        made.global_ranks = made.transport.global_ranks = tuple(range(made.size))
    shrunk = UnisonoProcessGroup(made, group.get_group_store())
    shrunk.shown_name = group.shown_name
    return ShrunkBackend(shrunk)


class ShrunkBackend(UnisonoBackend):
    """The backend that `shrink` returns. torch registers it as gloo's (or, for a group bound to a
    GPU, as NCCL's), and DDP's logger then casts it to that class in C++, which may crash. The first
    call, before DDP makes its logger, registers it as a custom backend."""

    is_registered = False

    def carry_out(self, name: str, given: tuple[Any, ...]) -> Any:
        if not self.is_registered:
            self.is_registered = True
            custom = _torch.ProcessGroup.BackendType.CUSTOM
            for group in _torch._world.pg_map:
                for device in group._device_types if type(group) is _torch.ProcessGroup else ():
                    if group._get_backend(device) is self:
                        group._register_backend(device, custom, self)
                        group._set_default_backend(custom)
        return super().carry_out(name, given)


@never_compiled
class ReconfigurableProcessGroup(UnisonoProcessGroup):
    """A group without members until `reconfigure` names them, any number of times. They meet in the
    group's store, under each `uuid` separately."""

    supports_reconfigure = True

    def __init__(self, store: Any, name: str, timeout_s: float) -> None:
        nobody = alone(name, timeout_s=timeout_s)
        nobody.close()
        super().__init__(nobody, store)
        self._handle = uuid4().hex
        self._used: set[int] = set()

    def get_reconfigure_handle(self) -> str:
        """The name that peers use for this process."""
        return self._handle

    def get_error(self) -> Any:
        """What has ended the group, for torch. A program's own `abort` is no error."""
        error, kinds = self.comm.errored, _c_torch.ErrorType
        if isinstance(error, PeerLost):
            return kinds.REMOTE_ERROR
        is_none = error is None or isinstance(error, GroupAborted)
        return kinds.SUCCESS if is_none else kinds.COMM_ERROR

    def reconfigure(self, opts: Any) -> Any:
        """Leave the current members and meet those of `opts.handles`, in their order if they have
        one. Only these call it."""
        is_ordered = isinstance(opts.handles, list)
        handles = opts.handles if is_ordered else sorted(opts.handles)
        if opts.uuid in self._used:
            raise UnisonoError(f"reconfigure: uuid {opts.uuid} was already used on this group")
        if self._handle not in handles:
            raise UnisonoError("reconfigure: this process's own handle is not among the handles")
        self._used.add(opts.uuid)
        name, timeout_s = self.comm.name, self.comm.timeout_s
        self.shutdown()
        members = zlib.crc32("".join(handles).encode())
        limit_s = timeout_s if opts.timeout is None else opts.timeout.total_seconds()
        board = Board(self._store, Deadline(limit_s)).part(f"{opts.uuid}/{members}")
        own, size = handles.index(self._handle), len(handles)
        comm = connect(board, own, size, name=name, timeout_s=timeout_s)
        self._go_over(comm)
        if self in _torch._world.pg_group_ranks:
            _torch._world.pg_group_ranks[self] = {rank: rank for rank in range(comm.size)}
        return self._work(FinishedWork(), [], self._completer)
