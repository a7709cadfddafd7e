"""torch's and NCCL's own debug settings, set together and explained."""

from __future__ import annotations

import os
import sys
from typing import Literal

Level = Literal["off", "info", "detail"]

_INFO = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
_SETTINGS: dict[str, dict[str, str]] = {
    "off": {"TORCH_DISTRIBUTED_DEBUG": "OFF", "TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_DEBUG": "WARN"},
    "info": _INFO,
    "detail": _INFO
    | {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,COLL,P2P",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    },
}

MEANINGS = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO: what DDP does at start; DETAIL: gloo and nccl compare the "
    "calls of all ranks before each one, which is slow; read when torch.distributed is imported",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ code logs; the above shows nothing without INFO",
    "NCCL_DEBUG": "WARN: errors; INFO: what NCCL chose; read when the first communicator is made",
    "NCCL_DEBUG_SUBSYS": "which parts of NCCL speak: INIT, ENV, GRAPH (topology), COLL, P2P",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1: a failed or timed out collective ends the process",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many calls of each rank the flight recorder remembers",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: it writes them to a file when a collective times out",
}


def debug(level: Level = "info") -> dict[str, str]:
    """Set torch's and NCCL's debug variables in this process, for it and its children, and return
    them. `level` is "off", "info" or "detail"; `unisono.watch.debug.MEANINGS` explains each.

    Call it before the process group is made. Where torch is imported already, its own level is
    changed too. Raises ValueError for another level.
    """
    if level not in _SETTINGS:
        raise ValueError(f'level is "off", "info" or "detail", not {level!r}')
    for names in _SETTINGS.values():
        for name in names:
            os.environ.pop(name, None)
    os.environ.update(_SETTINGS[level])
    torch = sys.modules.get("torch.distributed")
    if torch is not None:
        torch.set_debug_level_from_env()
    return dict(_SETTINGS[level])
