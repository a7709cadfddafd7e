"""torch's and NCCL's own debug settings, set together and explained."""

from __future__ import annotations

import os
import sys
from typing import Literal

Level = Literal["off", "info", "detail", "OFF", "INFO", "DETAIL"]

_INFO = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
}
_SETTINGS: dict[str, dict[str, str]] = {
    "off": {},
    "info": _INFO,
    "detail": _INFO | {"NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,GRAPH,TUNING,COLL,P2P"},
}
# Not torch's DETAIL: with it torch 2.13 crashes when DDP is made on gloo, and what it adds, a
# comparison of all ranks' calls on gloo and nccl, is also in `watch.start(check=True)`.
# Variables that are not set here have good defaults: NCCL's choice of subsystems at INFO, an end of
# the process after an error (TORCH_NCCL_ASYNC_ERROR_HANDLING=3), the flight recorder's 2000 calls.

_set_here: dict[str, str] = {}
"""What `debug` has set in this process: everything else in the environment is the user's."""


def debug(level: Level = "info") -> dict[str, str]:
    """Set torch's and NCCL's debug variables in this process, for it and its children, and return
    what they are now.

    `level` is "off", "info" or "detail", in lower or upper case; docs/diagnosis.md explains each
    variable. Variables that the user has set keep their values, at every level; "off" undoes an
    earlier call. Each rank calls it, before it makes the process group. If torch is already
    imported, its level is changed, too.

    Raises ValueError for another level.
    See also `watch`.

    >>> import os
    >>> os.environ["NCCL_DEBUG"] = "WARN"
    >>> unisono.debug("detail")["NCCL_DEBUG"]  # what the user has set stays
    'WARN'
    >>> unisono.debug("off")
    {'NCCL_DEBUG': 'WARN'}
    """
    wanted = level.lower() if isinstance(level, str) else level
    if wanted not in _SETTINGS:
        raise ValueError(f'level is "off", "info" or "detail", not {level!r}')
    for name, value in _set_here.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _set_here.clear()
    for name, value in _SETTINGS[wanted].items():
        if name not in os.environ:
            os.environ[name] = _set_here[name] = value
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available():
        torch.set_debug_level_from_env()
    return {name: os.environ[name] for name in _SETTINGS["detail"] if name in os.environ}
