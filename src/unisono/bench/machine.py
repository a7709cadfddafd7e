"""When and where a run was made: host, processor, cores, caches, versions. No environment
variables."""

import platform
import re
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from unisono.launcher import share
from unisono.plan.sizes import parse_size

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def caches_bytes() -> tuple[int, ...]:
    """The sizes of the first core's data caches, smallest first; empty if unknown."""
    sizes = set()
    for cache in sorted(_CACHES.glob("index*")):
        try:
            if (cache / "type").read_text().strip() != "Instruction":
                sizes.add(parse_size((cache / "size").read_text()))
        except (OSError, ValueError):
            continue
    return tuple(sorted(sizes))


def machine() -> dict[str, Any]:
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "host": platform.node(),
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": share.core_count(),
        "caches_bytes": list(caches_bytes()),
        "kernel": platform.release(),
        "system": platform.system(),
    }


def describe_gpu(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("unisono", "torch", "numpy", "mpi4py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """The model's name, from the kernel or the device tree of an Arm machine."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if match:
        return match[1].strip()
    part = re.search(r"^CPU part\s*:\s*(\S+)$", text, re.MULTILINE)
    return _ARM_PARTS.get(part[1], f"Arm {part[1]}") if part else platform.machine()


_ARM_PARTS = {
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
}
