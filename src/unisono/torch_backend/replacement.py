"""UNISONO_REPLACE=gloo: programs that ask torch for gloo by name get our groups.

torch's `init_process_group` and `new_group` are wrapped at `import torch`, before a program can
import them by name, and so is the helper that trainers use to make groups outside the world. Calls
from unisono itself (`unisono.init("gloo")`, benchmarks) are not replaced. torch's functions call
the group what they would call gloo's, because libraries decide by that name.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.torch_backend.autoload import NAME

_HELPER = "_new_process_group_helper"
_torch: Any = c10d  # its stubs have none of these names
_log = logging.getLogger("unisono")


def replace_backend(replaced: str) -> None:
    """Make `init_process_group` and `new_group` create a group of ours if the backend is
    `replaced`, by name or by default. Rank 0 logs it once."""
    for name in ("init_process_group", "new_group", "_new_group_with_tag", _HELPER):
        function = getattr(c10d, name)
        wrapped = _wrap(function, replaced)
        for module in list(sys.modules.values()):  # torch's own modules import it by name, too
            if getattr(module, "__dict__", {}).get(name) is function:
                setattr(module, name, wrapped)


@functools.cache
def _say_once(text: str) -> None:
    """On rank 0 of the program, if the rank is known."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("unisono: %s", text)


def _wrap(function: Callable[..., Any], replaced: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    makes_default = function.__name__ == "init_process_group"
    is_helper = function.__name__ == _HELPER
    inside = function.__name__.startswith("_")  # torch's functions have replaced the name already
    meaning_it = ("unisono.", "torch.") if inside else ("unisono.",)

    @functools.wraps(function, updated=())
    def wrapped(*args: Any, **keywords: Any) -> Any:
        frame = sys._getframe(1)
        while (caller := frame.f_globals.get("__name__", "")) == "unisono.watch.attach":
            frame = frame.f_back  # type: ignore[assignment]  # which passes on what others ask for
        call = signature.bind(*args, **keywords)
        asked = call.arguments.get("backend")
        if asked is None and not makes_default:
            asked = _inherited_backend()
        elif caller.startswith(meaning_it):
            return function(*args, **keywords)
        elif asked in (None, "undefined"):
            asked = _default_backend(call.arguments.get("device_id"))
        instead = _instead_of(asked or "", replaced)
        if not instead:
            return function(*args, **keywords)
        call.arguments["backend"] = instead
        if is_helper and not call.arguments["global_ranks_in_group"]:
            _say_once(  # the others would wait forever
                f"group {call.arguments['group_name']}, outside torch's world, is made with "
                f"unisono, not {replaced}: every process in it needs UNISONO_REPLACE={replaced}"
            )
        result = function(*call.args, **call.kwargs)
        group = dist.group.WORLD if makes_default else result[0] if is_helper else result
        if group in _torch._world.pg_map:  # this process is a member
            _show_as(group, _torch.Backend(asked), replaced)
        _say_once(f"this program asks for {replaced} and gets unisono (UNISONO_REPLACE={replaced})")
        return result

    return wrapped


def _show_as(group: Any, name: str, replaced: str) -> None:
    """Let torch say of a group of ours what it says of the one that was asked for."""
    from unisono.torch_backend.process_group import our_group

    ours = our_group(group)
    assert ours is not None
    ours.shown_name = replaced
    world = _torch._world
    world.pg_map[group] = name, world.pg_map[group][1]
    world.pg_backend_config[group] = str(_torch.BackendConfig(name))
    if group is dist.group.WORLD:
        _torch._backend = name


def _inherited_backend() -> str | None:
    """What `new_group()` asks for if torch's default group replaces another: that one's name."""
    from unisono.torch_backend.process_group import our_group  # too slow for every `import torch`

    world = dist.group.WORLD
    ours = our_group(world)
    return _torch._world.pg_map[world][0] if ours and ours.shown_name != NAME else None


def _default_backend(device: Any) -> str | None:
    """torch's default backend."""
    if device is None:
        kind = torch._C._get_accelerator().type
    else:
        kind = "cuda" if isinstance(device, int) else device.type
    return dist.Backend.default_device_backend_map.get(kind)


def _instead_of(asked: str, replaced: str) -> str:
    """The backend that is made instead of the requested one; "" if that is not replaced."""
    parts = [part.strip().rpartition(":")[::2] for part in asked.lower().split(",")]
    if replaced not in (name for _, name in parts):
        return ""
    if all(name == replaced and device in ("", "cpu") for device, name in parts):
        return NAME
    from unisono.torch_backend.process_group import HAS_PYTHON_BACKENDS

    if HAS_PYTHON_BACKENDS and all(d == "cpu" for d, name in parts if name == replaced):
        return ",".join(f"{d}:{NAME if name == replaced else name}" for d, name in parts)
    _say_once(
        f'UNISONO_REPLACE={replaced} does not replace "{asked}", which names another backend '
        "or device, too" + ("" if HAS_PYTHON_BACKENDS else "; from torch 2.15 on CPUs can be ours")
    )
    return ""
