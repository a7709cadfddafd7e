"""What happens at `import torch`: torch calls `autoload` (entry point `torch.backends`)."""

from __future__ import annotations

import os

BACKEND_VARIABLE = "UNISONO_BACKEND"


def autoload() -> None:
    """Make the backend that UNISONO_BACKEND names the default of `init_process_group()`.

    A name that torch does not know stays without effect: `unisono run --backend` has checked it,
    and `import torch` is no place to fail.
    """
    name = os.environ.get(BACKEND_VARIABLE, "").lower()
    if name:
        set_default_backend(name)


def set_default_backend(name: str) -> None:
    """Let `init_process_group()` without a name take this backend, on every device it serves."""
    from torch.distributed import Backend

    for device in Backend.backend_capability.get(name, ()):
        Backend.default_device_backend_map[device] = name


def known_backends() -> list[str]:
    """The backends that this torch can make."""
    import torch.distributed as dist

    built_in = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return sorted(
        name
        for name in dist.Backend.backend_list
        if built_in.get(name, name not in ("undefined", "fake"))
    )
