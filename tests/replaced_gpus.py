"""A GPU for machines without one, as far as weights need it: memory of the replaced driver in CPU
tensors. `install()` replaces torch's functions for GPUs, and the driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

import replaced_driver
from unisono.training.weights import gpu_memory as gpus

name = "GPU-one"
"""The UUID of the GPU that holds all memory of the replaced driver."""
waits: list[torch.device] = []
"""The devices whose streams were waited for."""
is_expandable = False
"""Whether memory is in expandable segments."""


def install(folder: str, expandable: bool = False) -> Any:
    """The replaced driver, for a GPU whose memory is in a folder."""
    global name, is_expandable
    is_expandable = expandable
    os.environ["REPLACED_DRIVER_FOLDER"] = folder
    driver = replaced_driver.install()
    driver.log.clear()
    driver.refuses_export = False
    name = "GPU-one"
    waits.clear()
    gpus.gpu_of = _gpu_of  # type: ignore[assignment]
    gpus.find_gpu = lambda name: torch.device("cpu")
    gpus.on_gpu = lambda device: contextlib.nullcontext()  # type: ignore[assignment]
    gpus.await_stream = waits.append
    gpus.bytes_at = _bytes_at  # type: ignore[assignment]
    return driver


def tensor_of(values: torch.Tensor, freed: Callable[[], None] | None = None) -> torch.Tensor:
    """These values in new GPU memory, which torch frees, and reports as freed, when no tensor uses
    it any more."""
    size = max(values.nbytes, 1)
    make = replaced_driver.expand if is_expandable else replaced_driver.allocate
    base = make(size, os.environ["REPLACED_DRIVER_FOLDER"])

    def free() -> None:
        replaced_driver.free(base, size)
        if freed is not None:
            freed()

    storage = _bytes_at(base, values.nbytes, values.device, free)
    made = torch.empty(0, dtype=values.dtype)
    made.set_(storage, 0, values.shape, values.stride())  # type: ignore[call-overload]
    return made.copy_(values)


def _gpu_of(tensors: Iterable[torch.Tensor]) -> str:
    lies_there = [replaced_driver.is_known(tensor.data_ptr()) for tensor in tensors]
    return name if lies_there and all(lies_there) else ""


def _bytes_at(address: int, size: int, device: Any, let_go: Callable[[], None]) -> Any:
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, let_go).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
