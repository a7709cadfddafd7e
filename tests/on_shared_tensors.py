"""A Communicator whose collectives get a test's tensors in memory that the group shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.work import Work

ARENA_BYTES = 96 << 20
LEAST_BYTES = 4096  # smaller calls always go through descriptors and slots
COLLECTIVES = {
    "all_reduce", "reduce", "broadcast", "all_gather",
    "reduce_scatter", "gather", "scatter", "all_to_all",
}  # fmt: skip


class OnSharedTensors:
    """Moves the tensors of a call, with their whole storage, into shared memory, and back when it
    is over. `with_ranks` do so, the other ranks pass their own."""

    def __init__(self, comm: Communicator, with_ranks: Callable[[int], bool]) -> None:
        self._comm = comm
        self._shares = with_ranks(comm.rank)
        self._arena = comm.empty(ARENA_BYTES, torch.uint8)
        self._next = 0
        self._works = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        if name not in COLLECTIVES or not self._shares:
            return method

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            moved = Move(self)
            named = {word: moved.move_in(value) for word, value in named.items()}
            work = method(*map(moved.move_in, args), **named)
            if work is None:
                moved.move_out()
                return None
            self._works += 1
            return MovedWork(work, moved, self)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "timeout_s":
            self._comm.timeout_s = value
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return repr(self._comm)

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """A piece of the arena, from which calls allocate in turn."""
        if not self._works and self._next > ARENA_BYTES // 2:
            self._next = 0
        start, end = self._next, self._next + size_bytes
        if end > ARENA_BYTES:
            return None
        self._next = (end + 63) // 64 * 64
        return self._arena[start:end]

    def finish(self) -> None:
        self._works -= 1


class Move:
    """The storages of one call, and where they were moved."""

    def __init__(self, arena: OnSharedTensors) -> None:
        self._arena = arena
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._moved: dict[int, Any] = {}

    def move_in(self, tensors: Any) -> Any:
        if isinstance(tensors, (list, tuple)):
            if id(tensors) not in self._moved:  # in place: the same list on both sides
                self._moved[id(tensors)] = type(tensors)(map(self._move_tensor, tensors))
            return self._moved[id(tensors)]
        return self._move_tensor(tensors)

    def _move_tensor(self, tensor: Any) -> Any:
        if type(tensor) is not torch.Tensor or tensor.is_sparse or tensor.device.type != "cpu":
            return tensor
        if id(tensor) in self._moved:
            return self._moved[id(tensor)]
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        try:
            if storage.nbytes() < LEAST_BYTES or not storage.data_ptr():
                return tensor
        except RuntimeError:  # a tensor without memory, which is rejected
            return tensor
        if storage.data_ptr() not in self._storages:
            there = self._arena.take(storage.nbytes())
            if there is None:
                return tensor
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = here, there.copy_(here)
        _, there = self._storages[storage.data_ptr()]
        offset = there.storage_offset() // tensor.element_size() + tensor.storage_offset()
        moved = torch.empty(0, dtype=tensor.dtype).set_(
            there.untyped_storage(), offset, tensor.shape, tensor.stride()
        )
        moved.requires_grad_(tensor.requires_grad)
        self._moved[id(tensor)] = moved
        return moved

    def move_out(self) -> None:
        for here, there in self._storages.values():
            here.copy_(there)
        self._storages.clear()


class MovedWork(Work[Any]):
    """A work whose results are in place once it is over."""

    def __init__(self, work: Any, moved: Move, arena: OnSharedTensors) -> None:
        self._work, self._moved, self._arena = work, moved, arena
        self._is_over = False

    def wait(self, timeout_s: float | None = None) -> Any:
        result = self._work.wait(timeout_s)
        self._finish()
        return result

    def is_completed(self) -> bool:
        if self._work.is_completed():
            self._finish()
            return True
        return False

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._moved.move_out()
            self._arena.finish()
