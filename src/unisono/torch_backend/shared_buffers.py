"""Buffers that torch requests from a backend, as FSDP2 does: shared tensors that are reused.

Allocating shared memory is a collective call and takes milliseconds; FSDP2 requests buffers in
every step, on all ranks in the same order. So the first requests of a size allocate memory, on all
ranks together. Later ones use a free buffer of their own rank, or else ordinary memory: calls work
on any mix.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import SegmentError

LEAST_BYTES = 64 * 1024
"""Smaller calls go through the group's segment anyway."""

MOST_OF_A_SIZE = 2
"""One in use and one being filled."""


class _Buffer:
    """Shared memory, and a view of it that lives as long as its user's storage."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._view: Any = lambda: None

    def take(self, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor over it; None if it is in use."""
        if self._view() is not None:
            return None
        memory: Any = self._memory.numpy()
        view = memoryview(memory)
        self._view = weakref.ref(view)
        return torch.frombuffer(view, dtype=dtype)


class SharedBuffers:
    """A group's buffers, by their size in bytes."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffers: dict[int, list[_Buffer]] = {}
        self._has_room = comm.size > 1

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor; all ranks ask in the same order. Raises what calls raise."""
        size_bytes = count * dtype.itemsize
        if size_bytes < LEAST_BYTES:
            return torch.empty(count, dtype=dtype)
        buffers = self._buffers.setdefault(size_bytes, [])
        if self._has_room and len(buffers) < MOST_OF_A_SIZE:
            try:
                buffers.append(_Buffer(self._comm.empty(size_bytes, torch.uint8)))
            except SegmentError:  # raised on every rank: not enough memory
                self._has_room = False
        taken = (buffer.take(dtype) for buffer in reversed(buffers))
        free = next((tensor for tensor in taken if tensor is not None), None)
        return torch.empty(count, dtype=dtype) if free is None else free

    def close(self) -> None:
        """Free unused buffers."""
        self._has_room = False
        self._buffers.clear()
