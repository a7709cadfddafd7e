"""What is installed: Python, torch, our engine, GPUs and NCCL."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import unisono
from unisono.comm import engine
from unisono.doctor.findings import Finding, fail, ok, warn
from unisono.errors import EngineUnavailable
from unisono.requirements import (
    NEWEST_TRIED_TORCH,
    OLDEST_TORCH,
    format_version,
    is_too_old,
    is_untried,
)

OLDEST_PYTHON = (3, 11)


def findings() -> Iterator[Finding]:
    """Versions, the engine, what torch can do, GPUs."""
    yield _python()
    yield from _torch()
    yield _unisono()
    yield _engine()
    yield from _gpus()


def _python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return fail("python", text, "Install Python 3.11 or later.")
    return ok("python", text)


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield fail("torch", f"torch cannot be imported: {error}", "Run `pip install torch`.")
        return
    version = torch.__version__
    if is_too_old(version):
        yield fail(
            "torch", f"torch {version}", f"Install torch {format_version(OLDEST_TORCH)} or later."
        )
    elif not dist.is_available():
        yield fail("torch", f"torch {version} without torch.distributed", "Install another build.")
    else:
        from unisono.torch_backend.autoload import known_backends

        names = ", ".join(known_backends())
        text = f"torch {version}, torch.distributed with {names}"
        if is_untried(version):
            newest = format_version(NEWEST_TRIED_TORCH)
            yield warn(
                "torch",
                f"{text}; newer than any that unisono was tried with (up to {newest})",
                f"If something fails: look for a newer unisono, or install torch {newest}.",
            )
        else:
            yield ok("torch", text)
        if "unisono" not in known_backends():
            yield fail(
                "backend",
                "torch does not know the backend unisono",
                "Reinstall the package: its entry point torch.backends is missing.",
            )


def _unisono() -> Finding:
    try:
        installed = importlib.metadata.version("unisono")
    except importlib.metadata.PackageNotFoundError:
        return warn(
            "unisono",
            f"unisono {unisono.__version__}, not installed",
            "Run `pip install` on it, so that `import torch` finds the backend.",
        )
    if installed != unisono.__version__:
        return warn(
            "unisono",
            f"unisono {unisono.__version__}, installed as {installed}",
            "Reinstall the package: sources and installation are of different versions.",
        )
    return ok("unisono", f"unisono {installed}")


def _engine() -> Finding:
    try:
        layout = engine.layout_version()
    except EngineUnavailable as error:
        return fail("engine", str(error), "Install a wheel for this machine, or run `make native`.")
    return ok("engine", f"native engine, memory layout {layout}; no compiler is needed to run it")


def _gpus() -> Iterator[Finding]:
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

    from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver

    name = "shared gpu"
    slow = "large CUDA tensors of ranks that share a GPU go through the CPU's memory"
    try:
        driver = load_driver()
        memory = torch.empty(4 << 20, dtype=torch.uint8, device="cuda:0")
        driver.export_memory(driver.allocation_of(memory.data_ptr()).base)
        mps = driver.has_mps(0)
    except DriverMissing as error:
        return warn(name, f"no cuda-bindings: {slow} ({error})", "Run `pip install cuda-bindings`.")
    except (DriverError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        hint = "Leave expandable segments out of PYTORCH_CUDA_ALLOC_CONF; see docs/cuda.md."
        return warn(name, f"{slow}: the driver exports no memory ({reason})", hint)
    others = _processes_on_gpus()
    text = "ranks that share a GPU open each other's memory"
    text += ", through MPS" if mps else "; without MPS they take turns"
    return ok(name, f"{text}; {others} process(es) of others use GPUs now" if others else text)


def _processes_on_gpus() -> int:
    """How many processes the driver's tool sees on GPUs, this one aside."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    asked = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    pids = {line.strip() for line in done.stdout.splitlines() if line.strip().isdigit()}
    return len(pids - {str(os.getpid())})


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
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return f"{count} GPU(s)" if count else ""
