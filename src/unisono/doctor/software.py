"""Installed software: Python, torch, unisono, its engine, UCX; and GPUs."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import unisono
from unisono import variables
from unisono.comm import engine
from unisono.comm.hosts import ucx
from unisono.doctor.machine import Finding, fail, ok, warn
from unisono.errors import EngineUnavailable, UnisonoError
from unisono.torch_support import NEWEST_TRIED_TORCH, OLDEST_TORCH, is_newer

_SHARED_GPU = "shared gpu"


def findings() -> Iterator[Finding]:
    version = platform.python_version()
    yield ok("python", f"Python {version} on {platform.system()} {platform.machine()}")
    yield from _torch()
    yield _unisono()
    yield _ucx()
    yield from _gpus()


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield fail("torch", f"torch cannot be imported: {error}", "Run `pip install torch`.")
        return
    version = torch.__version__
    if is_newer(OLDEST_TORCH, than=version):
        yield fail("torch", f"torch {version}", f"Install torch {OLDEST_TORCH} or later.")
        return
    if not dist.is_available():
        yield fail("torch", f"torch {version} without torch.distributed", "Install another build.")
        return
    from unisono.torch_backend.autoload import known_backends

    backends = known_backends()
    text = f"torch {version}, torch.distributed with {', '.join(backends)}"
    if is_newer(version, than=NEWEST_TRIED_TORCH):
        text += f"; unisono was tested with versions up to {NEWEST_TRIED_TORCH}"
        advice = f"If something fails, install a newer unisono or torch {NEWEST_TRIED_TORCH}."
        yield warn("torch", text, advice)
    else:
        yield ok("torch", text)
    if "unisono" not in backends:
        advice = "Run `pip install` on unisono: its entry point torch.backends is missing."
        yield fail("backend", "torch does not know the backend unisono", advice)


def _unisono() -> Finding:
    try:
        layout = engine.native.LAYOUT_VERSION
    except EngineUnavailable as error:
        return fail("engine", str(error), "Install a wheel for this machine, or run `make native`.")
    return ok("engine", f"unisono {unisono.__version__}, native engine, memory layout {layout}")


def _ucx() -> Finding:
    """The library for ranks on several hosts; one host needs none."""
    try:
        found = ucx.find()
        version = ucx.format_version(found.version)
    except UnisonoError as error:
        if variables.UCX.read_or_warn():
            return warn("ucx", str(error), "Correct or unset UNISONO_UCX.")
        return ok("ucx", f"no UCX, which several hosts need: `{ucx.INSTALL}` on each of them")
    rdma = f"TCP and RDMA ({', '.join(found.adapters)})" if found.adapters else "TCP"
    unused = found.is_built_with_rdma and not found.adapters
    idle = "; it supports RDMA, but this host has no adapter" if unused else ""
    return ok("ucx", f"UCX {version} between hosts, by {rdma}{idle}: {found.origin}, {found.path}")


# -- GPUs ------------------------------------------------------------------------------------------


def has_gpu() -> bool:
    """Whether there is a GPU, even one that this torch cannot use."""
    return _usable_gpus() > 0 or _nvidia_gpus() > 0


def _usable_gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@functools.cache
def _nvidia_gpus() -> int:
    return sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*"))


def _gpus() -> Iterator[Finding]:
    if not _usable_gpus():
        if _nvidia_gpus():
            text = f"{_nvidia_gpus()} GPU(s), which this torch cannot use"
            advice = "Install a CUDA build of torch that fits the driver; CPU tensors work."
            yield warn("gpu", text, advice)
        else:
            yield ok("gpu", "no GPU: unisono or gloo moves CPU tensors")
        return
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(_usable_gpus())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield ok("gpu", f"{counted}; NCCL {nccl}")
    except (AttributeError, RuntimeError, ImportError):
        yield warn("gpu", f"{counted}, no NCCL", "Install a torch build that includes NCCL.")
    try:
        memory = torch.empty(4 << 20, dtype=torch.uint8, device="cuda:0")
    except RuntimeError as error:  # it is full, or has failed
        reason = str(error).partition("\n")[0]
        yield fail(_SHARED_GPU, f"the first GPU cannot be used: {reason}", "Look at nvidia-smi.")
    else:
        yield find_sharing(memory.data_ptr())


def find_sharing(address: int) -> Finding:
    """What ranks can do that share the GPU of this address."""
    from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver
    from unisono.comm.cuda.passing import export_memory

    slow = "large CUDA tensors of ranks that share a GPU go through the CPU's memory"
    try:
        driver = load_driver()
        export_memory(driver, driver.allocation_of(address))
        mps = driver.has_mps(0)
    except DriverMissing as error:
        text = f"no cuda-bindings: {slow} ({error})"
        return warn(_SHARED_GPU, text, "Run `pip install cuda-bindings`.")
    except DriverError as error:
        advice = "MIG and sandboxes are known reasons: see docs/cuda.md."
        return warn(_SHARED_GPU, f"{slow}: the driver exports no memory ({error})", advice)
    turns = "take turns (`nvidia-cuda-mps-control -d` lets them compute side by side)"
    if mps:
        turns = "compute side by side by MPS"
    text = f"ranks that share a GPU open each other's memory (CUDA IPC), and {turns}"
    return ok(_SHARED_GPU, text)
