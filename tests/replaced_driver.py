"""A CUDA driver for machines without one: what `unisono.comm.cuda.driver` imports, replaced.

A GPU's memory is shared memory of this machine, so processes really open each other's: an
allocation is a file in /dev/shm, and its handle is the file's name. An expandable segment is
several files, mapped one after another, whose handles are descriptors. A stream has finished its
work when the call returns; if it would wait for a number in memory, the call fails at once. NumPy
runs the one kernel.

`install()` replaces cuda-bindings with it; `allocate` and `free` do what torch would do.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import tempfile
import threading
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class _Handle:
    """What the driver's handles look like: 64 bytes."""

    def __init__(self) -> None:
        self.reserved = bytes(64)


class _Memory:
    """An allocation of this process, or one of another process that is open here."""

    def __init__(self, path: Path, size: int, number: int) -> None:
        self.path = path
        self.number = number
        descriptor = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.size = size
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class _Piece:
    """One piece of an expandable segment of this process."""

    def __init__(self, path: Path, base: int, number: int) -> None:
        self.path, self.base, self.number = path, base, number
        self.size = PIECE_BYTES
        with path.open("r+b") as file:
            _map(base, PIECE_BYTES, file.fileno(), mmap.PROT_READ | mmap.PROT_WRITE)


PIECE_BYTES = mmap.PAGESIZE
_MAP_FIXED = 0x10
_NO_ACCESS = 0
_ALLOWED_HANDLE_TYPES, _IS_LEGACY = 14, 10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, size: int, descriptor: int, access: int) -> int:
    """Map a file, or reserve addresses (-1)."""
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if address is not None:
        kind |= _MAP_FIXED
    found: int = _libc.mmap(address, size, access, kind, descriptor, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found


OK = CUresult.CUDA_SUCCESS
_numbers = itertools.count(1000)
_own: dict[int, _Memory | _Piece] = {}
_opened: dict[int, _Memory] = {}
_thread = threading.local()
refuses_export = False
"""Like MIG."""
refuses_host_memory = False
"""Like a limit on locked memory."""
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


def expand(size: int, folder: str, segment: int | None = None) -> int:
    """The address of new memory in an expandable segment, which may have been used before."""
    count = -(-size // PIECE_BYTES)
    base = segment or _map(None, count * PIECE_BYTES, -1, _NO_ACCESS)
    for piece in range(base, base + count * PIECE_BYTES, PIECE_BYTES):
        if piece not in _own:
            descriptor, name = tempfile.mkstemp(dir=folder)
            os.truncate(descriptor, PIECE_BYTES)
            os.close(descriptor)
            _own[piece] = _Piece(Path(name), piece, next(_numbers))
    return base


def free(base: int, size: int = 1) -> None:
    """Free memory: processes that have it open keep it, but this one no longer has it."""
    for piece in [each for each in _own if base <= each < base + size]:
        _own.pop(piece).path.unlink()


def is_known(address: int) -> bool:
    """Whether an address is in GPU memory, this process's own or another's."""
    memories = itertools.chain(_own.values(), _opened.values())
    return any(memory.base <= address < memory.base + memory.size for memory in memories)


def view(address: int, count: int, dtype: Any) -> Any:
    """Memory as an array."""
    size = numpy.dtype(dtype).itemsize * count
    return numpy.frombuffer((ctypes.c_char * size).from_address(address), dtype)


# -- the driver ------------------------------------------------------------------------------------


def _allocation(address: int) -> _Memory | _Piece | None:
    for memory in _own.values():
        if memory.base <= address < memory.base + memory.size:
            return memory
    return None


def cuCtxGetCurrent() -> tuple[Any, ...]:
    return OK, "the context"


def cuCtxSetCurrent(context: Any) -> tuple[Any]:
    assert context == "the context"
    _thread.has_context = True
    return (OK,)


def cuMemGetAddressRange(address: int) -> tuple[Any, ...]:
    if threading.current_thread().name == "unisono-gpu-memory" and not hasattr(
        _thread, "has_context"
    ):
        return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0, 0
    memory = _allocation(address)
    if memory is None:
        return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
    return OK, memory.base, memory.size


def cuPointerGetAttribute(kind: int, address: int) -> tuple[Any, ...]:
    memory = _allocation(address)
    if memory is None:
        return CUresult.CUDA_ERROR_INVALID_VALUE, 0
    if kind == _ALLOWED_HANDLE_TYPES:
        return OK, int(isinstance(memory, _Piece) and not refuses_export)
    if kind == _IS_LEGACY:
        return OK, isinstance(memory, _Memory)
    return OK, memory.number


def cuIpcGetMemHandle(base: int) -> tuple[Any, ...]:
    if refuses_export or not isinstance(_own.get(base), _Memory):
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


def cuMemRetainAllocationHandle(base: int) -> tuple[Any, ...]:
    piece = _allocation(base)
    if not isinstance(piece, _Piece):
        return CUresult.CUDA_ERROR_INVALID_VALUE, None
    return OK, piece


def cuMemExportToShareableHandle(piece: _Piece, kind: int, flags: int) -> tuple[Any, ...]:
    assert kind == 1
    if refuses_export or not piece.path.exists():
        return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
    return OK, os.open(piece.path, os.O_RDWR)


def cuMemImportFromShareableHandle(descriptor: int, kind: int) -> tuple[Any, ...]:
    assert kind == 1
    return OK, os.dup(descriptor)


def cuMemRelease(handle: _Piece | int) -> tuple[Any]:
    if isinstance(handle, int):
        os.close(handle)
    return (OK,)


def cuMemAddressReserve(size: int, *rest: int) -> tuple[Any, ...]:
    log.append("open a segment")
    return OK, _map(None, size, -1, _NO_ACCESS)


def cuMemMap(address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any]:
    if offset or size != os.fstat(handle).st_size:
        return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    _map(address, size, handle, _NO_ACCESS)
    return (OK,)


def cuMemSetAccess(address: int, size: int, access: list[Any], count: int) -> tuple[Any]:
    assert (access[0].location.type, access[0].location.id, access[0].flags) == (1, 0, 3)
    assert not _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
    return (OK,)


def cuMemUnmap(address: int, size: int) -> tuple[Any]:
    _map(address, size, -1, _NO_ACCESS)
    return (OK,)


def cuMemAddressFree(address: int, size: int) -> tuple[Any]:
    log.append("close a segment")
    assert not _libc.munmap(address, size)
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


cuStreamSynchronize = cuStreamQuery = cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = _no_errors


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
    """Replace cuda-bindings in this process."""
    driver = sys.modules[__name__]
    constants = types.SimpleNamespace
    values: dict[str, Any] = {
        "CUpointer_attribute": constants(
            CU_POINTER_ATTRIBUTE_BUFFER_ID=7,
            CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES=_ALLOWED_HANDLE_TYPES,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE=_IS_LEGACY,
        ),
        "CUmemorytype": constants(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2),
        "CUipcMem_flags": constants(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        "CU_MEMHOSTREGISTER_DEVICEMAP": 2,
        "CUdevice_attribute": constants(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        ),
        "CUipcMemHandle": _Handle,
        "CUmemAllocationHandleType": constants(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1),
        "CUmemLocationType": constants(CU_MEM_LOCATION_TYPE_DEVICE=1),
        "CUmemAccess_flags": constants(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
        "CUmemAccessDesc": lambda: constants(location=constants()),
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
        ctypes.memmove(image, programs[program], len(image))  # like the real one: into the bytes
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
