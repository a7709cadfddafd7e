"""What is installed: Python, torch, our engine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import unisono
from unisono.comm import engine
from unisono.doctor import gpus
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
    yield from gpus.findings()


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
