"""Small tensors through pinned memory, where the engine works on them on the CPU.

The copy engine needs no turn on a GPU that processes share. It handles all copies from the GPU, and
copies to it that are long, or have several rows with a gap between them. So short ones are spread
into rows first.

Large broadcasts go through pinned memory that all ranks share, one buffer at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from unisono.comm.cuda.driver import COPY_ENGINE_BYTES, Driver
from unisono.comm.shared_tensors import Memory
from unisono.torch_autograd import outlasting_inference_mode

_ALIGNMENT = 256
_BUFFER_BYTES = 16 << 20
RELAY_BYTES = 2 * _BUFFER_BYTES


class PinnedStaging:
    """Pinned memory of one group, for the rows of one call at a time.

    Without a driver, or if the rows are large, torch copies, and manages the memory. `check` raises
    if the group has ended, while this rank waits for its GPU.
    """

    def __init__(self, driver: Driver | None, size: int, check: Callable[[], None]) -> None:
        self._driver = driver
        self._check = check
        self._size = size
        self._buffer: torch.Tensor | None = None
        self._begin = 0
        self._used = 0
        self._stream: int | None = None
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def _memory(self) -> torch.Tensor:
        if self._buffer is None:
            with outlasting_inference_mode():
                self._buffer = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            self._begin = self._buffer.data_ptr()
        return self._buffer

    def start(self, stream: int) -> None:
        """A call begins: what the last one left here is no longer needed."""
        if self._driver is not None:
            if self._stream is not None and self._stream != stream:
                self._driver.finish(self._stream, self._check)
            self._driver.finish(stream, self._check)
        self._stream = stream
        self._used = 0

    def take(self, row: torch.Tensor) -> torch.Tensor:
        """A copy of a GPU row in pinned memory, once the GPU has finished it."""
        host = self.room_for(row)
        if not row.numel():
            return host
        if self._is_ours(host):
            assert self._driver is not None
            assert self._stream is not None
            self._driver.copy_to_host(host.data_ptr(), row.data_ptr(), row.nbytes, self._stream)
            self._driver.finish(self._stream, self._check)
        else:
            host.copy_(row)
        return host

    def room_for(self, row: torch.Tensor) -> torch.Tensor:
        """Pinned memory for the result of a row."""
        size = row.nbytes
        if self._driver is not None and self._used + size <= self._size:
            begin = self._used
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._memory()[begin : begin + size].view(row.dtype)
        return torch.empty(row.shape, dtype=row.dtype, pin_memory=True)

    def give(self, row: torch.Tensor, host: torch.Tensor) -> None:
        """Copy from pinned memory into a GPU row, in the order of the stream."""
        size = row.nbytes
        if size and self._is_ours(host):
            self._give(row.data_ptr(), host.data_ptr(), size)
        elif size:
            row.copy_(host, non_blocking=True)  # torch tracks how long the memory is needed

    def _give(self, device: int, host: int, size: int) -> None:
        assert self._driver is not None
        assert self._stream is not None
        stream = self._stream
        width, height = (size // 2, 2) if size % 2 == 0 else (1, size)
        if size >= COPY_ENGINE_BYTES or height == 1 or self._used + 2 * size > self._size:
            self._driver.copy_to_device(device, host, size, stream)
            return
        first = self._used
        self._used += -(-2 * size // _ALIGNMENT) * _ALIGNMENT
        spread = self._begin + first
        if height == 2:
            ctypes.memmove(spread, host, width)
            ctypes.memmove(spread + 2 * width, host + width, width)
        else:  # an odd number of bytes: each is a row
            assert self._buffer is not None
            rows = self._buffer[first : first + 2 * size].view(size, 2)
            rows[:, 0] = self._buffer[host - self._begin : host - self._begin + size]
        self._driver.copy_rows_to_device(device, spread, width, height, stream)

    def _is_ours(self, host: torch.Tensor) -> bool:
        address = host.data_ptr()
        return self._buffer is not None and 0 <= address - self._begin < self._size

    # -- one small row, in place: the most common call ---------------------------------------------

    def exchange(self, row: torch.Tensor, stream: int, combine: Callable[[Any], None]) -> None:
        """Copy a contiguous row to pinned memory, let `combine` work on it, and copy it back."""
        driver = self._driver
        if driver is None:
            self.start(stream)
            host = self.take(row)
            combine(host)
            self.give(row, host)
            return
        if stream != self._stream and self._stream is not None:
            driver.finish(self._stream, self._check)
        self._stream = stream
        size = row.nbytes
        key = row.dtype, size
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 1024:
                self._views.clear()
            with outlasting_inference_mode():
                view = self._views[key] = self._memory()[:size].view(row.dtype)
        device = row.data_ptr()
        driver.copy_to_host(self._begin, device, size, stream)
        driver.finish(stream, self._check)  # also for what an earlier call left here
        combine(view)
        self._used = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._give(device, self._begin, size)


class CommonMemory:
    """Pinned memory that rank 0 provides and all ranks and the GPU map. Raises DriverError if
    the GPU cannot."""

    def __init__(self, driver: Driver, memory: Memory, size: int) -> None:
        self._driver = driver
        array: Any = memory.tensor(0, 0, (size,), numpy.dtype("uint8"))
        self.array = array
        self.address: int = array.ctypes.data
        self._page = self.address - self.address % mmap.PAGESIZE
        end = -(-(self.address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        on_gpu = driver.open_host_memory(self._page, end - self._page)
        self.on_gpu = on_gpu + self.address - self._page

    def close(self) -> None:
        """The GPU does not need it any more."""
        self._driver.close_host_memory(self._page)


class Relay:
    """A broadcast through two buffers that all ranks share: while one is filled, the other is
    emptied."""

    def __init__(self, driver: Driver, memory: Memory) -> None:
        self._driver = driver
        self._buffers = CommonMemory(driver, memory, RELAY_BYTES)
        self.close = self._buffers.close

    def carry(
        self,
        rows: Sequence[torch.Tensor],
        sends: bool,
        stream: int,
        meet: Callable[[], object],
        check: Callable[[], None],
    ) -> None:
        """Copy the sender's rows to those of the others. At each meeting one buffer is full, and
        the other empty. `check` raises if the group has ended."""
        parts = [
            (row.data_ptr() + begin, min(row.nbytes - begin, _BUFFER_BYTES))
            for row in rows
            for begin in range(0, row.nbytes, _BUFFER_BYTES)
        ]
        for step in range(len(parts) + 1):
            turn = step if sends else step - 1
            if 0 <= turn < len(parts):
                device, size = parts[turn]
                buffer = self._buffers.address + turn % 2 * _BUFFER_BYTES
                if sends:
                    self._driver.copy_to_host(buffer, device, size, stream)
                else:
                    self._driver.copy_to_device(device, buffer, size, stream)
                self._driver.finish(stream, check)
            meet()
