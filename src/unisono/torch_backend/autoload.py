"""What happens at `import torch`: torch calls `autoload` (entry point `torch.backends`)."""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import unisono.torch_support  # not from unisono: that would ask its __getattr__ first
from unisono.torch_support import require_torch
from unisono.variables import BACKEND, REPLACE, watch_is_wanted

NAME = "unisono"

_log = logging.getLogger("unisono")


def autoload() -> None:
    """Register our backend, make the one that UNISONO_BACKEND names the default of
    `init_process_group()`, take the place of the one that UNISONO_REPLACE names, and start the
    watch if it is asked for.

    `import torch` must not fail: an invalid variable is only a warning. Ranks of several hosts
    import what makes their groups now: later all of them would do so at once, in each other's way.
    """
    register()
    size = os.environ.get("WORLD_SIZE")
    if os.environ.get("LOCAL_WORLD_SIZE", size) != size:
        from unisono.failures import load_soon

        load_soon("unisono.torch_backend.creation", "unisono.comm.hosts.making")
    name = BACKEND.read_or_warn()
    if name and name != "auto":
        problem = backend_problem(name)
        if problem:
            _log.warning("UNISONO_BACKEND=%s has no effect: %s", name, problem)
        else:
            set_default_backend(name)
    replaced = REPLACE.read_or_warn()
    if replaced:
        _replace_backend(replaced)
    watch_groups = unisono.torch_support.listener
    if watch_groups is None and watch_is_wanted():
        from unisono.watch import start_if_asked as watch_groups
    if watch_groups is not None:
        try:
            watch_groups()
        except Exception as error:
            _log.warning("unisono.watch does not watch torch's groups: %s", error)
            _log.debug("unisono.watch: at import torch", exc_info=True)


def _replace_backend(name: str) -> None:
    import torch.distributed as dist

    if dist.is_available():
        from unisono.torch_backend.replacement import replace_backend

        replace_backend(name)


def register() -> None:
    """Register the name "unisono" with torch.distributed. Doing it twice does nothing."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        if _inherited_file is not None:
            from unisono.comm.over_torch.stores import meet_in_file

            meet_in_file(_inherited_file)


_inherited_file: int | None = None


def inherit_store(descriptor: int) -> None:
    """Make `init_process_group()` without an address meet in this file, which all ranks of a launch
    inherit."""
    global _inherited_file
    _inherited_file = descriptor


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group; the modules for it are imported with the first one. The garbage collector is
    off meanwhile: it would look through all of torch and find almost nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        from unisono.torch_backend.creation import create
    finally:
        if collects:
            gc.enable()
    return create(options, backend_options)


def set_default_backend(name: str) -> None:
    """Make this backend the default of `init_process_group()`, on every device it serves."""
    from torch.distributed import Backend

    devices = Backend.backend_capability.get(name, ())
    if name == NAME:  # only for the devices that we serve
        Backend.default_device_backend_map.clear()
    for device in devices:
        Backend.default_device_backend_map[device] = name


def known_backends() -> list[str]:
    """The backends that this torch can make. Raises TorchMissing without torch."""
    require_torch("a backend of torch.distributed")
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


def backend_problem(name: str) -> str:
    """Why this torch cannot make a group of the backend `name`; "" if it can."""
    known = known_backends()
    if name in known or name == "fake":  # torch's fake backend moves no data, so it is not offered
        return ""
    from unisono.errors import name_closest

    likely = name_closest(name, known)
    guess = f"; did you mean {likely}?" if likely else ""
    return f"torch has no backend {name} here, only {', '.join(known)}{guess}"
