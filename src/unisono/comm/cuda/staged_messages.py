"""Messages of CUDA tensors: through pinned memory, matched and checked like those of CPU tensors.

A message may go between a CUDA and a CPU tensor. Large ones are limited by the bus.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from unisono.comm.on_rows.rows import torch_row_of
from unisono.comm.work import Work


def fetch(tensor: Any) -> torch.Tensor:
    """A copy of a tensor in pinned memory, once the GPU has finished it."""
    host = make_room(tensor)
    with torch.inference_mode():
        host.view(-1).copy_(torch_row_of(tensor))
    return host


def make_room(tensor: Any) -> torch.Tensor:
    """Pinned memory with room for a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def deliver(tensor: Any, host: torch.Tensor) -> None:
    """Copy an arrived message into its tensor, in the order of its GPU's current stream."""
    with torch.inference_mode():
        tensor.detach().copy_(host, non_blocking=True)


class ArrivingWork(Work):
    """An asynchronous receive into pinned memory; the first query that finds it complete copies
    it to the GPU."""

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
