"""unisono: collective communication for PyTorch on one machine."""

from unisono.comm.base import Communicator, Message, PremulSum, Work
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
from unisono.launcher import launch
from unisono.world import (
    barrier,
    get_rank,
    get_world,
    get_world_size,
    init,
    is_main_process,
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
    "Message",
    "MessageMismatch",
    "PeerLost",
    "PremulSum",
    "RankEnding",
    "RanksFailed",
    "RanksTimedOut",
    "RendezvousError",
    "SegmentError",
    "UnisonoError",
    "Work",
    "barrier",
    "get_rank",
    "get_world",
    "get_world_size",
    "init",
    "is_main_process",
    "launch",
    "setup",
    "shutdown",
]
