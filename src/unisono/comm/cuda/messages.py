"""Messages of CUDA tensors: through pinned memory, matched and checked as those of CPU tensors are.

A message between a CUDA and a CPU tensor is as good as any. Large ones are at the mercy of the bus.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.arguments import check_tensor
from unisono.comm.base import Work
from unisono.comm.row_collectives import RowCollectives
from unisono.comm.rows import row_of

if TYPE_CHECKING:
    from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator


class GpuMessages(RowCollectives):
    """The messages of a group on CUDA tensors, over those of its `_comm`."""

    _comm: SharedMemoryCommunicator

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        self._comm.send(fetch(f"send on group {self.name}", tensor), dst, tag)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        return self._comm.isend(fetch(f"send on group {self.name}", tensor), dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        host = make_room(f"recv on group {self.name}", tensor)
        source = self._comm.recv(host, src, tag)
        deliver(tensor, host)
        return source

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Work:
        host = make_room(f"recv on group {self.name}", tensor)
        return ArrivingWork(self._comm.irecv(host, src, tag), tensor, host)


def fetch(doing: str, tensor: Any) -> torch.Tensor:
    """A tensor in pinned memory, once the GPU has it there. Raises TypeError or ValueError, as
    `doing`, for what cannot be sent."""
    host = make_room(doing, tensor, False)
    with torch.inference_mode():
        host.view(-1).copy_(row_of(tensor))
    return host


def make_room(doing: str, tensor: Any, writable: bool = True) -> torch.Tensor:
    """Pinned memory for what is in a tensor, or will be. Raises as `fetch` does."""
    try:
        check_tensor(tensor, writable, ("cuda",))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{doing}: {error}") from None
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def deliver(tensor: Any, host: torch.Tensor) -> None:
    """Copy what has arrived into its tensor, in the order of its GPU's current stream."""
    with torch.inference_mode():
        tensor.detach().copy_(host, non_blocking=True)


class ArrivingWork(Work):
    """A message that goes on by itself into pinned memory; whoever first sees that it is there
    brings it to the GPU."""

    __slots__ = ("_host", "_lock", "_tensor", "_work")

    def __init__(self, work: Work, tensor: Any, host: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor
        self._host: torch.Tensor | None = host
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(timeout_s)
        self._deliver()

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._work.exception() is None:
            self._deliver()
        return True

    def exception(self) -> Exception | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _deliver(self) -> None:
        with self._lock:
            host, self._host = self._host, None
            if host is not None:
                deliver(self._tensor, host)
