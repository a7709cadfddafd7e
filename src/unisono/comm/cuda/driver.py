"""The CUDA driver as we use it: the only module that imports cuda-bindings.

torch's CUDA wheels include cuda-bindings. Addresses, streams, events and functions are plain
numbers here. Errors of the driver are raised as DriverError.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

COPY_ENGINE_BYTES = 32 << 10
"""From this many bytes on the driver itself uses the copy engine for a copy to the device.
Below, it uses a kernel, and a process that runs kernels must wait for its turn on a shared GPU
(140 us for each process), unless the copy has several rows with a gap between them."""

_SPIN_S = 0.001
"""How long we ask a stream without a pause whether it has finished."""


class DriverError(RuntimeError):
    """The driver refused something; `code` is its name for that."""

    def __init__(self, function: str, code: str) -> None:
        super().__init__(f"{function}: {code}")
        self.code = code


class DriverMissing(RuntimeError):
    """cuda-bindings cannot be used here; the text says why."""


@dataclass(frozen=True)
class Allocation:
    """A piece of GPU memory as the driver allocated it, or several contiguous ones, as in
    torch's expandable segments. `number` is unique in this process, even after it was freed."""

    base: int
    size: int
    number: int


class Driver:
    """The driver, for the context that is current in the calling thread."""

    def __init__(self) -> None:
        try:
            self._cu: Any = importlib.import_module("cuda.bindings.driver")
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        except (ImportError, RuntimeError) as error:
            raise DriverMissing(str(error)) from error
        cu = self._cu
        self._success = cu.CUresult.CUDA_SUCCESS
        self._number_of = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        self._host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
        self._device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._not_ready = cu.CUresult.CUDA_ERROR_NOT_READY
        self._synchronize = cu.cuStreamSynchronize
        self._query = cu.cuStreamQuery
        self._to_host = cu.cuMemcpyDtoHAsync
        self._to_device = cu.cuMemcpyHtoDAsync
        self._write = cu.cuStreamWriteValue32
        self._await = cu.cuStreamWaitValue32
        self._attribute_of = cu.cuPointerGetAttribute
        self._reserved: dict[int, int] = {}  # sizes of memory opened by `open_pieces`

    def _call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver returns besides its status."""
        status, *results = getattr(self._cu, name)(*arguments)
        if status != self._success:
            raise DriverError(name, getattr(status, "name", str(status)))
        return results[0] if len(results) == 1 else results

    def _check(self, name: str, answer: tuple[Any, ...]) -> None:
        """The same for a function that is called often."""
        if answer[0] != self._success:
            raise DriverError(name, answer[0].name)

    def has_mps(self, index: int) -> bool:
        """Whether this process computes on a GPU through the Multi-Process Service."""
        kind = getattr(self._cu.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
        if kind is None:
            return False
        device = self._call("cuDeviceGet", index)
        return bool(self._call("cuDeviceGetAttribute", kind, device))

    # -- memory ----------------------------------------------------------------------------------

    def allocation_of(self, address: int, size: int = 1) -> Allocation:
        """The allocation that contains these bytes. Raises DriverError if there is none."""
        pieces = self.pieces_of(address, size)
        if len(pieces) == 1:
            return pieces[0]
        begin, end = pieces[0].base, pieces[-1].base + pieces[-1].size
        number = hash(tuple(piece.number for piece in pieces)) % (1 << 63)
        return Allocation(begin, end - begin, number)

    def pieces_of(self, address: int, size: int) -> list[Allocation]:
        """The same, as the driver allocated it."""
        pieces: list[Allocation] = []
        at = address
        while at < address + size:
            answer = self._attribute_of(self._number_of, at)
            self._check("cuPointerGetAttribute", answer)
            piece = self._piece(int(answer[1]), at)
            pieces.append(piece)
            at = piece.base + piece.size
        return pieces

    @functools.lru_cache(maxsize=1 << 14)  # noqa: B019 - there is one driver per process
    def _piece(self, number: int, address: int) -> Allocation:
        base, size = self._call("cuMemGetAddressRange", address)
        return Allocation(int(base), int(size), number)

    def export_memory(self, base: int) -> bytes:
        """A handle of an allocation for other processes, unless it is in an expandable segment."""
        return bytes(self._call("cuIpcGetMemHandle", base).reserved)

    def open_memory(self, handle: bytes) -> int:
        """The address of another process's allocation in this one."""
        given = self._cu.CUipcMemHandle()
        given.reserved = handle
        lazily = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", given, lazily))

    def close_memory(self, base: int) -> None:
        """Close another process's allocation."""
        size = self._reserved.pop(base, 0)
        if not size:
            self._call("cuIpcCloseMemHandle", base)
            return
        self._call("cuMemUnmap", base, size)
        self._call("cuMemAddressFree", base, size)

    def has_descriptors(self, base: int) -> bool:
        """Whether memory there needs `export_piece` instead of `export_memory`."""
        kinds = self._cu.CUpointer_attribute
        whole, allowed = (
            int(self._call("cuPointerGetAttribute", kind, base))
            for kind in (
                kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            )
        )
        return not whole and bool(allowed & int(self._descriptor()))

    def export_piece(self, base: int) -> int:
        """A descriptor by which another process can open one piece of an expandable segment."""
        piece = self._call("cuMemRetainAllocationHandle", base)
        try:
            return int(self._call("cuMemExportToShareableHandle", piece, self._descriptor(), 0))
        finally:
            self._call("cuMemRelease", piece)

    def open_pieces(self, size: int, pieces: Iterable[tuple[int, int]]) -> int:
        """Map another process's pieces into this one, one after the other; returns the address.
        Each is a descriptor and its size, `size` in total."""
        cu = self._cu
        base = at = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        try:
            for descriptor, extent in pieces:
                piece = self._call("cuMemImportFromShareableHandle", descriptor, self._descriptor())
                try:
                    self._call("cuMemMap", at, extent, 0, piece, 0)
                finally:
                    self._call("cuMemRelease", piece)  # the mapping stays
                at += extent
            access = cu.CUmemAccessDesc()
            access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = int(self._call("cuCtxGetDevice"))
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._call("cuMemSetAccess", base, size, [access], 1)
        except BaseException:
            if at > base:
                self._call("cuMemUnmap", base, at - base)
            self._call("cuMemAddressFree", base, size)
            raise
        self._reserved[base] = size
        return base

    def _descriptor(self) -> Any:
        return self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def context(self) -> Any:
        """The context of the calling thread."""
        return self._call("cuCtxGetCurrent")

    def use_context(self, context: Any) -> None:
        """Use another thread's context in the calling one."""
        self._call("cuCtxSetCurrent", context)

    def open_host_memory(self, address: int, size: int) -> int:
        """Where whole pages of this process's memory lie for the GPU, until `close_host_memory`."""
        flags = int(self._cu.CU_MEMHOSTREGISTER_DEVICEMAP)
        self._call("cuMemHostRegister", address, size, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def close_host_memory(self, address: int) -> None:
        """The GPU does not need it any more."""
        self._call("cuMemHostUnregister", address)

    # -- streams ---------------------------------------------------------------------------------

    def synchronize(self, stream: int) -> None:
        """Return once a stream has done all its work."""
        self._check("cuStreamSynchronize", self._synchronize(stream))

    def finish(self, stream: int, check: Callable[[], None]) -> None:
        """Return once a stream has done all its work. `check` is called from time to time, and may
        raise: a program can queue seconds of its own work, and its peers may die meanwhile."""
        begin_s = time.monotonic()
        while (answer := self._query(stream))[0] == self._not_ready:
            waited_s = time.monotonic() - begin_s
            if waited_s > _SPIN_S:
                check()
                time.sleep(min(waited_s / 16, 0.01))
        self._check("cuStreamQuery", answer)

    def write_flag(self, stream: int, flag: int, value: int) -> None:
        """Write a 32-bit number once the stream has done all its work so far, visible to all."""
        self._check("cuStreamWriteValue32", self._write(stream, flag, value, 0))

    def await_flag(self, stream: int, flag: int, value: int) -> None:
        """Let the stream continue once a number has reached `value`; it wraps around at 32 bits."""
        self._check("cuStreamWaitValue32", self._await(stream, flag, value, 0))

    # -- copies ----------------------------------------------------------------------------------

    def copy_to_host(self, host: int, device: int, size: int, stream: int) -> None:
        """From the GPU to pinned memory: always by the copy engine."""
        self._check("cuMemcpyDtoHAsync", self._to_host(host, device, size, stream))

    def copy_to_device(self, device: int, host: int, size: int, stream: int) -> None:
        """From pinned memory to the GPU."""
        self._check("cuMemcpyHtoDAsync", self._to_device(device, host, size, stream))

    def copy_rows_to_device(
        self, device: int, host: int, width: int, height: int, stream: int
    ) -> None:
        """From rows in pinned memory, with a gap of their width after each, to contiguous memory
        on the GPU. The copy engine handles two rows or more, however short."""
        copy = self._rows(width, height)
        copy.srcHost = host
        copy.dstDevice = device
        self._check("cuMemcpy2DAsync", self._cu.cuMemcpy2DAsync(copy, stream))

    @functools.lru_cache(maxsize=256)  # noqa: B019 - there is one driver per process
    def _rows(self, width: int, height: int) -> Any:
        copy = self._cu.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.dstMemoryType = self._host, self._device
        copy.WidthInBytes, copy.Height = width, height
        copy.srcPitch, copy.dstPitch = 2 * width, width
        return copy

    def copy_within(self, to: int, source: int, size: int, stream: int) -> None:
        """From one place of the GPU to another."""
        self._call("cuMemcpyDtoDAsync", to, source, size, stream)

    # -- kernels ---------------------------------------------------------------------------------

    def compile(self, source: str, name: str) -> Any:
        """The function `name` of a program in CUDA C, for the current GPU. Numbers are rounded
        as in IEEE 754, without fused operations."""
        device = self._call("cuCtxGetDevice")
        kinds = self._cu.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", kind, device)
            for kind in (
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        nvrtc = self._nvrtc
        options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false"]
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"unisono.cu", 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status):
            length = nvrtc.nvrtcGetProgramLogSize(program)[1]
            log = b" " * length
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DriverError("nvrtcCompileProgram", log.decode(errors="replace"))
        image = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, image)
        nvrtc.nvrtcDestroyProgram(program)
        module = self._call("cuModuleLoadData", image)
        return self._call("cuModuleGetFunction", module, name.encode())

    def launch(self, function: Any, blocks: int, threads: int, stream: int, *given: Any) -> None:
        """Launch a function; its arguments are ctypes objects."""
        addresses = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        grid = (blocks, 1, 1, threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, 0, stream, ctypes.addressof(addresses), 0)


@functools.cache
def load_driver() -> Driver:
    """The driver of this process. Raises DriverMissing if there is none."""
    return Driver()
