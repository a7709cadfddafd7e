"""Tensors of other libraries, shared in place: the pages of their memory are replaced by those
of a shared tensor. The bytes before the first and after the last whole page stay private."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

from unisono.comm.engine import native
from unisono.errors import SegmentError

if TYPE_CHECKING:
    import torch

    from unisono.comm.communicator import Communicator

LEAST_BYTES = 64 * 1024
"""Smaller tensors are not worth the extra call for the bytes at the edges."""

_in_use: weakref.WeakSet[SharedPages] = weakref.WeakSet()
_kept_for_ever: list[Any] = []


class SharedPages:
    """Room for tensors of one dimension and `count` elements in memory that all ranks map, and
    the tensor that is there now, which each rank chooses itself. `middle` is the shared part of
    that tensor, at other addresses, and `edges` are the elements before and after it: the same
    on all ranks."""

    def __init__(self, count: int, dtype: torch.dtype, comm: Communicator) -> None:
        import torch

        self.count, self.dtype = count, dtype
        self._tensor: torch.Tensor | None = None
        self._is_shared = False
        self._memory: Any = None
        self.edges: list[torch.Tensor] = []
        self.middle: Any = None
        with contextlib.suppress(SegmentError):  # raised on every rank: not enough memory
            memory = comm.empty(count * dtype.itemsize, torch.uint8)
            if comm.is_shared(memory):
                self._memory = memory

    def hold(self, tensor: torch.Tensor) -> None:
        """Place this tensor here, with its elements; no other thread may write to it meanwhile.
        If the system refuses, `middle` is the tensor's own memory, and not shared."""
        if self._tensor is not None and self._tensor.data_ptr() == tensor.data_ptr():
            return
        self.release()
        page, address = mmap.PAGESIZE, tensor.data_ptr()
        margin = page // tensor.itemsize
        self._tensor = tensor
        self.edges = [tensor[:margin], tensor[-margin:]]
        self.middle = tensor[margin:-margin]
        self._begin = -(-address // page) * page
        self._bytes = (address + tensor.nbytes) // page * page - self._begin
        if self._memory is None:
            return
        if native.share_pages(self._begin, self._memory.data_ptr(), self._bytes):
            begin = address + page - self._begin
            self.middle = self._memory[begin : begin + self.middle.nbytes].view(tensor.dtype)
            self._is_shared = True
            _in_use.add(self)

    def release(self) -> None:
        """Give the tensor private memory again, with its elements, and drop it."""
        if self._is_shared:
            self._is_shared = False
            _in_use.discard(self)
            if not native.share_pages(self._begin, 0, self._bytes):
                _kept_for_ever.append(self._memory)
        self._tensor = None
        self.edges, self.middle = [], None

    def __del__(self) -> None:
        self.release()

    def protect(self) -> None:
        """In a forked child: its parent and the other ranks would see its writes."""
        self._is_shared = False
        native.protect_pages(self._begin, self._bytes)
        _kept_for_ever.append(self)

    @staticmethod
    def can_hold(tensor: torch.Tensor, comm: Communicator) -> bool:
        """Whether all ranks can make one for tensors like this; the same on every rank."""
        return (
            comm.transport.is_on_one_host
            and comm.size > 1
            and tensor.device.type == "cpu"
            and tensor.nbytes >= LEAST_BYTES
        )


def _protect_all() -> None:
    for pages in list(_in_use):
        pages.protect()


os.register_at_fork(after_in_child=_protect_all)
