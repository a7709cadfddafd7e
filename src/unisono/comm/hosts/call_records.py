"""The records of one member's calls and messages, for whoever watches the job.

They are kept in the shared memory of its host's part of the group, or in memory of the same kind
where it is alone on its host, so that other processes read them whatever becomes of this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.comm.engine import create_segment, open_group
from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.on_rows.announced_calls import AnnouncedCall, bytes_given
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.shared_memory.group_parts import BETWEEN_HOSTS, Part, name_part
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.shared_memory.segment_listeners import announce_segment
from unisono.comm.tensors import dtype_name
from unisono.comm.transport import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator
    from unisono.comm.engine.group_types import Group

_OPERATIONS = {operation.name.lower(): int(operation) for operation in Operation}
_BARRIER = int(Operation.BARRIER)
_OK, _FAILED = int(Status.OK), int(Status.ABORTED)


class CallRecords:
    """`local` is the group of the members on this host, `part` says who this one is."""

    def __init__(self, local: Communicator, name: str, part: Part, global_rank: int) -> None:
        self._own: Group | None = None
        self._calls = 0
        self._size = part.size
        text = name_part(name, part)
        if isinstance(local.transport, SharedMemory):
            group = local.transport.become_part(text)
        else:
            group = self._own = _make_memory()
            group.become_part(text, global_rank)
            announce_segment(group.descriptor)
        self._open, self._end = group.record_open, group.record_end

    def begin_call(self, call: AnnouncedCall, tensors: Sequence[Any]) -> int:
        """A call begins, on these tensors; its record, for `end`. Its line is the caller's."""
        self._calls += 1
        operation = _OPERATIONS.get(call.operation, _BARRIER)
        dtype = dtype_code(dtype_name(tensors[0])) if tensors else 0
        size_bytes = bytes_given(call, tensors, self._size)
        return self._open(operation, 0, -1, dtype, size_bytes, self._calls)

    def begin_message(self, sends: bool, peer: int | None, tag: int, tensor: Any) -> int:
        """A message between hosts begins, to or from a rank of the group, or anybody."""
        operation = int(Operation.SEND if sends else Operation.RECV)
        dtype = dtype_code(dtype_name(tensor))
        to = -1 if peer is None else peer
        return self._open(operation, 0, to, dtype, int(tensor.nbytes), tag | BETWEEN_HOSTS)

    def end(self, record: int, *, failed: bool = False) -> None:
        """It is over."""
        self._end(record, _FAILED if failed else _OK)

    def close(self) -> None:
        """Let go of the memory that is this member's alone."""
        if self._own is not None:
            self._own.close()


def _make_memory() -> Group:
    nonce = int.from_bytes(os.urandom(8), "big") >> 1
    descriptor = create_segment(1, 1, nonce)
    try:
        return open_group(descriptor, 0, 1, nonce, DEFAULT_TIMEOUT_S)
    finally:
        os.close(descriptor)
