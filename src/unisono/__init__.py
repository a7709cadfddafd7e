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
    TorchMissing,
    UnisonoError,
    WeightMismatch,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from unisono import watch
    from unisono.collectives import differentiable
    from unisono.collectives.moments import (
        mean,
        variance,
        weighted_sum,
    )
    from unisono.collectives.norms import (
        clip_grad_norm,
        l2_norm,
        normalize,
    )
    from unisono.collectives.objects import (
        all_gather_object,
        broadcast_object,
        gather_object,
    )
    from unisono.collectives.primitives import (
        all_gather,
        all_reduce,
        all_to_all,
        batch_isend_irecv,
        broadcast,
        gather,
        irecv,
        isend,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from unisono.collectives.softmax import (
        log_softmax,
        logsumexp,
        softmax,
    )
    from unisono.collectives.tensors import (
        broadcast_tensor,
        gather_tensor,
        reduce_tensor,
    )
    from unisono.comm.base import Communicator, Message, PremulSum, Work
    from unisono.comm.execute import execute
    from unisono.doctor.selftest.results import SelfTest
    from unisono.doctor.selftest.run import debug_communication
    from unisono.groups import ProcessGroupManager
    from unisono.launcher import launch
    from unisono.plan.mesh import Mesh
    from unisono.watch.debug import debug
    from unisono.world.world import (
        barrier,
        cleanup,
        get_backend,
        get_backend_reason,
        get_device,
        get_local_rank,
        get_rank,
        get_world,
        get_world_size,
        init,
        is_distributed,
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
    "SelfTest",
    "TorchMissing",
    "UnisonoError",
    "WeightMismatch",
    "WeightUpdateError",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object",
    "broadcast_tensor",
    "cleanup",
    "clip_grad_norm",
    "debug",
    "debug_communication",
    "differentiable",
    "execute",
    "gather",
    "gather_object",
    "gather_tensor",
    "get_backend",
    "get_backend_reason",
    "get_device",
    "get_local_rank",
    "get_rank",
    "get_world",
    "get_world_size",
    "init",
    "irecv",
    "is_distributed",
    "is_main_process",
    "isend",
    "l2_norm",
    "launch",
    "log_softmax",
    "logsumexp",
    "mean",
    "monitored_barrier",
    "normalize",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_tensor",
    "scatter",
    "send",
    "setup",
    "shutdown",
    "softmax",
    "variance",
    "watch",
    "weighted_sum",
]

_HOMES = {
    "unisono.collectives": ("differentiable",),
    "unisono.collectives.moments": ("mean", "variance", "weighted_sum"),
    "unisono.collectives.norms": ("clip_grad_norm", "l2_norm", "normalize"),
    "unisono.collectives.objects": ("all_gather_object", "broadcast_object", "gather_object"),
    "unisono.collectives.primitives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "batch_isend_irecv",
        "broadcast",
        "gather",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "scatter",
        "send",
    ),
    "unisono.collectives.softmax": ("log_softmax", "logsumexp", "softmax"),
    "unisono.collectives.tensors": ("broadcast_tensor", "gather_tensor", "reduce_tensor"),
    "unisono.comm.base": ("Communicator", "Message", "PremulSum", "Work"),
    "unisono.comm.execute": ("execute",),
    "unisono.groups": ("ProcessGroupManager",),
    "unisono.launcher": ("launch",),
    "unisono.plan.mesh": ("Mesh",),
    "unisono.doctor.selftest.results": ("SelfTest",),
    "unisono.doctor.selftest.run": ("debug_communication",),
    "unisono.watch.debug": ("debug",),
    "unisono.world.world": (
        "barrier",
        "cleanup",
        "get_backend",
        "get_backend_reason",
        "get_device",
        "get_local_rank",
        "get_rank",
        "get_world",
        "get_world_size",
        "init",
        "is_distributed",
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
            try:
                value = getattr(importlib.import_module(home), name)
            except TorchMissing:
                raise TorchMissing(f"unisono.{name}") from None
            globals()[name] = value
            return value
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # else torch calls unisono.torch_backend.autoload when it is imported
    importlib.import_module("unisono.torch_backend.autoload").register()
