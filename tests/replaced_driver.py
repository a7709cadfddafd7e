"""A CUDA driver for machines without one: what `unisono.comm.cuda.driver` imports, replaced.

A GPU's memory is shared memory of this machine, so that processes really open each other's: an
allocation is a file in /dev/shm, its handle that file's name. A stream has done what it was given
when the call returns; where one would wait for a number in memory, the call fails at once. The one
kernel is carried out by NumPy.

`install()` puts it in the place of cuda-bindings; `allocate` and `free` are what torch would do.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import tempfile
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_NOT_READY = 600


class _Handle:
    """What the driver's handles look like: 64 bytes."""

    def __init__(self) -> None:
        self.reserved = bytes(64)


class _Memory:
    """An allocation of this process, or one of another's that is open here."""

    def __init__(self, path: Path, size: int, number: int) -> None:
        self.path = path
        self.number = number
        descriptor = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.size = size
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


OK = CUresult.CUDA_SUCCESS
_numbers = itertools.count(1000)
_own: dict[int, _Memory] = {}
_opened: dict[int, _Memory] = {}
refuses_export = False
"""As expandable segments do."""
refuses_host_memory = False
"""As a limit on locked memory does."""
log: list[str] = []
"""What this process has opened and closed, in order."""


# -- what torch would do ---------------------------------------------------------------------------


def allocate(size: int, folder: str) -> int:
    """The address of new memory."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.truncate(descriptor, size)
    os.close(descriptor)
    memory = _Memory(Path(name), size, next(_numbers))
    _own[memory.base] = memory
    return memory.base


def free(base: int) -> None:
    """Give memory back: whoever has it open keeps it, and this process has it no more."""
    _own.pop(base).path.unlink()


def is_known(address: int) -> bool:
    """Whether memory of the GPU lies there, this process's own or another's."""
    memories = itertools.chain(_own.values(), _opened.values())
    return any(memory.base <= address < memory.base + memory.size for memory in memories)


def view(address: int, count: int, dtype: Any) -> Any:
    """Memory as an array."""
    size = numpy.dtype(dtype).itemsize * count
    return numpy.frombuffer((ctypes.c_char * size).from_address(address), dtype)


# -- the driver ------------------------------------------------------------------------------------


def _allocation(address: int) -> _Memory | None:
    for memory in _own.values():
        if memory.base <= address < memory.base + memory.size:
            return memory
    return None


def cuMemGetAddressRange(address: int) -> tuple[Any, ...]:
    memory = _allocation(address)
    if memory is None:
        return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
    return OK, memory.base, memory.size


def cuPointerGetAttribute(kind: int, address: int) -> tuple[Any, ...]:
    memory = _allocation(address)
    return (CUresult.CUDA_ERROR_INVALID_VALUE, 0) if memory is None else (OK, memory.number)


def cuIpcGetMemHandle(base: int) -> tuple[Any, ...]:
    if refuses_export or base not in _own:
        return CUresult.CUDA_ERROR_INVALID_VALUE, None
    handle = _Handle()
    handle.reserved = str(_own[base].path).encode().ljust(64, b"\0")
    return OK, handle


def cuIpcOpenMemHandle(handle: _Handle, flags: int) -> tuple[Any, ...]:
    path = Path(handle.reserved.rstrip(b"\0").decode())
    if any(memory.path == path for memory in _opened.values()):
        return CUresult.CUDA_ERROR_ALREADY_MAPPED, 0
    if not path.exists():
        return CUresult.CUDA_ERROR_MAP_FAILED, 0
    memory = _Memory(path, path.stat().st_size, 0)
    _opened[memory.base] = memory
    log.append(f"open {path.name}")
    return OK, memory.base


def cuIpcCloseMemHandle(base: int) -> tuple[Any]:
    log.append(f"close {_opened.pop(base).path.name}")
    return (OK,)


def cuMemHostRegister(address: int, size: int, flags: int) -> tuple[Any]:
    return (CUresult.CUDA_ERROR_INVALID_VALUE if refuses_host_memory else OK,)


def cuMemHostGetDevicePointer(address: int, flags: int) -> tuple[Any, ...]:
    return OK, address


def cuMemHostUnregister(address: int) -> tuple[Any]:
    return (OK,)


def cuStreamWriteValue32(stream: int, address: int, value: int, flags: int) -> tuple[Any]:
    ctypes.c_uint32.from_address(address).value = value
    return (OK,)


def cuStreamWaitValue32(stream: int, address: int, value: int, flags: int) -> tuple[Any]:
    ahead = ctypes.c_int32(ctypes.c_uint32.from_address(address).value - value).value
    return (OK if ahead >= 0 else CUresult.CUDA_ERROR_NOT_READY,)


def cuMemcpyDtoDAsync(to: int, source: int, size: int, stream: int) -> tuple[Any]:
    ctypes.memmove(to, source, size)
    return (OK,)


def _no_errors(*given: Any) -> tuple[Any]:
    return (OK,)


cuStreamSynchronize = cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = _no_errors


def cuCtxGetDevice() -> tuple[Any, ...]:
    return OK, 0


def cuDeviceGetAttribute(kind: int, device: int) -> tuple[Any, ...]:
    return OK, 9


def cuModuleLoadData(image: bytes) -> tuple[Any, ...]:
    return OK, image


def cuModuleGetFunction(module: bytes, name: bytes) -> tuple[Any, ...]:
    return OK, module


def cuLaunchKernel(function: bytes, *rest: Any) -> tuple[Any]:
    """A sum of float32 in the order of the rows: all that these tests need of arithmetic."""
    assert b"typedef float T;" in function
    assert b"return a + b;" in function
    *_, arguments, _ = rest
    pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
    ranks, outputs = (
        ctypes.cast(pointers[index], ctypes.POINTER(ctypes.c_int))[0] for index in (1, 2)
    )
    count = ctypes.cast(pointers[3], ctypes.POINTER(ctypes.c_longlong))[0]
    table = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_void_p))
    total = view(table[0], count, numpy.float32).copy()
    for rank in range(1, ranks):
        total += view(table[rank], count, numpy.float32)
    for output in range(outputs):
        view(table[64 + output], count, numpy.float32)[:] = total
    return (OK,)


def install() -> Any:
    """Take the place of cuda-bindings in this process."""
    driver = sys.modules[__name__]
    constants = types.SimpleNamespace
    values: dict[str, Any] = {
        "CUpointer_attribute": constants(CU_POINTER_ATTRIBUTE_BUFFER_ID=7),
        "CUmemorytype": constants(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2),
        "CUipcMem_flags": constants(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        "CU_MEMHOSTREGISTER_DEVICEMAP": 2,
        "CUdevice_attribute": constants(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        ),
        "CUipcMemHandle": _Handle,
    }
    for name, value in values.items():
        setattr(driver, name, value)
    programs: dict[int, bytes] = {}
    nvrtc = types.ModuleType("cuda.bindings.nvrtc")

    def create(source: bytes, *rest: Any) -> tuple[Any, ...]:
        programs[len(programs)] = source
        return 0, len(programs) - 1

    nvrtc.nvrtcCreateProgram = create  # type: ignore[attr-defined]
    nvrtc.nvrtcCompileProgram = lambda *given: (0,)  # type: ignore[attr-defined]
    nvrtc.nvrtcGetCUBINSize = lambda program: (0, len(programs[program]))  # type: ignore[attr-defined]

    def write_image(program: int, image: bytes) -> tuple[Any]:
        ctypes.memmove(image, programs[program], len(image))  # as the real one: into the bytes
        return (0,)

    nvrtc.nvrtcGetCUBIN = write_image  # type: ignore[attr-defined]
    nvrtc.nvrtcDestroyProgram = lambda program: (0,)  # type: ignore[attr-defined]
    bindings = types.ModuleType("cuda.bindings")
    sys.modules.update(
        {
            "cuda": types.ModuleType("cuda"),
            "cuda.bindings": bindings,
            "cuda.bindings.driver": driver,
            "cuda.bindings.nvrtc": nvrtc,
        }
    )
    return driver
