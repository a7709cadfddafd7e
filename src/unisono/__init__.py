"""unisono: collective communication for PyTorch on one machine.

All names but the exceptions come from their modules when they are first asked for: the pytest
plugin makes every pytest run import this package, and it should cost next to nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    EngineUnavailable,
    GroupAborted,
    GroupClosed,
    GroupError,
    MessageMismatch,
    PeerLost,
    RankEnding,
    RanksFailed,
    RanksTimedOut,
    RendezvousError,
    SegmentError,
    UnisonoError,
)

if TYPE_CHECKING:
    from unisono import watch
    from unisono.comm.base import Communicator, Message, PremulSum, Work
    from unisono.groups import ProcessGroupManager
    from unisono.launcher import launch
    from unisono.plan.mesh import Mesh
    from unisono.watch.debug import debug
    from unisono.world import (
        barrier,
        get_rank,
        get_world,
        get_world_size,
        init,
        is_main_process,
        monitored_barrier,
        setup,
        shutdown,
    )

__version__ = "0.1.0"

__all__ = [
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "DeadlockError",
    "EngineUnavailable",
    "GroupAborted",
    "GroupClosed",
    "GroupError",
    "Mesh",
    "Message",
    "MessageMismatch",
    "PeerLost",
    "PremulSum",
    "ProcessGroupManager",
    "RankEnding",
    "RanksFailed",
    "RanksTimedOut",
    "RendezvousError",
    "SegmentError",
    "UnisonoError",
    "Work",
    "barrier",
    "debug",
    "get_rank",
    "get_world",
    "get_world_size",
    "init",
    "is_main_process",
    "launch",
    "monitored_barrier",
    "setup",
    "shutdown",
    "watch",
]

_HOMES = {
    "unisono.comm.base": ("Communicator", "Message", "PremulSum", "Work"),
    "unisono.groups": ("ProcessGroupManager",),
    "unisono.launcher": ("launch",),
    "unisono.plan.mesh": ("Mesh",),
    "unisono.watch.debug": ("debug",),
    "unisono.world": (
        "barrier",
        "get_rank",
        "get_world",
        "get_world_size",
        "init",
        "is_main_process",
        "monitored_barrier",
        "setup",
        "shutdown",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "watch":
        return importlib.import_module("unisono.watch")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # else torch calls unisono.autoload when it is imported
    importlib.import_module("unisono.autoload").register()
