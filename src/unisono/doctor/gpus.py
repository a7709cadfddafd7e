"""GPUs: which there are, what NCCL is there for them, and who shares one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from unisono.doctor.findings import Finding, fail, ok, warn

_SHARED_GPU = "shared gpu"


def findings() -> Iterator[Finding]:
    """Which GPUs there are, NCCL's version, and what ranks find that share one."""
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        try:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            yield ok("gpu", f"{counted}; NCCL {nccl}")
        except (AttributeError, RuntimeError, ImportError):
            yield warn("gpu", f"{counted}, no NCCL", "Install a torch build that brings NCCL.")
        yield _shared_gpu()
        return
    seen = _nvidia_smi()
    if seen:
        yield warn(
            "gpu",
            f"{seen}, which this torch cannot use",
            "Install a CUDA build of torch that fits the driver; until then CPU tensors work.",
        )
    else:
        yield ok("gpu", "no GPU: CPU tensors travel by unisono or gloo")


def _shared_gpu() -> Finding:
    """What ranks find that share the first GPU."""
    import torch

    try:
        memory = torch.empty(4 << 20, dtype=torch.uint8, device="cuda:0")
    except RuntimeError as error:  # it is full, or has failed
        reason = str(error).partition("\n")[0]
        return fail(_SHARED_GPU, f"the first GPU cannot be used: {reason}", "Look at nvidia-smi.")
    return find_sharing(memory.data_ptr())


def find_sharing(address: int) -> Finding:
    """What ranks find that share the GPU in whose memory this process has an address."""
    from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver

    slow = "large CUDA tensors of ranks that share a GPU go through the CPU's memory"
    try:
        driver = load_driver()
        driver.export_memory(driver.allocation_of(address).base)
        mps = driver.has_mps(0)
    except DriverMissing as error:
        why = f"no cuda-bindings: {slow} ({error})"
        return warn(_SHARED_GPU, why, "Run `pip install cuda-bindings`.")
    except DriverError as error:
        hint = "Leave expandable segments out of PYTORCH_CUDA_ALLOC_CONF; see docs/cuda.md."
        return warn(_SHARED_GPU, f"{slow}: the driver exports no memory ({error})", hint)
    text = "ranks that share a GPU open each other's memory (CUDA IPC)"
    text += ", and compute side by side by MPS" if mps else "; they take turns, for there is no MPS"
    sharing = _processes_on_gpus()
    if not sharing:
        return ok(_SHARED_GPU, text)
    text += "; now " + "; ".join(
        f"{', '.join(processes)} on GPU {gpu}" for gpu, processes in sharing.items()
    )
    if mps or all(len(processes) < 2 for processes in sharing.values()):
        return ok(_SHARED_GPU, text)
    return ok(_SHARED_GPU, f"{text} (`nvidia-cuda-mps-control -d` lets them compute side by side)")


def _processes_on_gpus() -> dict[str, list[str]]:
    """The processes that the driver's tool sees on each GPU, this one aside. (In a container it
    often sees none.)"""
    found: dict[str, list[str]] = {}
    asked = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
    for line in _ask_nvidia_smi(asked, "--format=csv,noheader").splitlines():
        gpu, pid, memory, name = [*(part.strip() for part in line.split(",", 3)), "", "", ""][:4]
        if pid.isdigit() and int(pid) != os.getpid():
            found.setdefault(gpu, []).append(f"pid {pid} {Path(name).name} ({memory})")
    return found


def has_gpu() -> bool:
    """Whether there is a GPU, also one that this torch cannot use."""
    try:
        import torch
    except ImportError:
        return bool(_nvidia_smi())
    return torch.cuda.is_available() or bool(_nvidia_smi())


@functools.cache
def _nvidia_smi() -> str:
    """What the driver's tool says about GPUs; nothing where there is none."""
    count = sum(line.startswith("GPU ") for line in _ask_nvidia_smi("-L").splitlines())
    return f"{count} GPU(s)" if count else ""


def _ask_nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
