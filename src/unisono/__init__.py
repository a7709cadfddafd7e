"""unisono: collective communication for PyTorch.

errors.py         every exception that a user can catch; how texts name ranks
processes.py      processes as /proc shows them, and how they end
variables.py      every UNISONO_ variable, and how its text is read
torch_support.py  is torch installed, which version, has it been imported
torch_habits.py   names of torch.distributed's, and what to call here instead
failures.py       tracebacks without our own frames; modules that failures need, imported ahead
plan/             schedules, proofs, topologies, predictions: nothing moves (docs/schedules.md)
comm/             the Communicator, which moves data, and its transports
watch/            which rank, which call, which line (docs/diagnosis.md)
torch_backend/    a Communicator as a torch.distributed backend (docs/torch.md)
world/            init, shutdown, and who this process is
groups/           ProcessGroupManager: every rank's groups along tp, cp, pp, dp (docs/groups.md)
collectives/      the primitives as plain functions (docs/collectives.md)
math.py           means, norms and softmax of tensors that are cut over ranks
training/         what training programs do with them (docs/training.md, docs/weights.md)
launcher/         starts ranks (docs/launching.md)
testing/          tests on several ranks; pytest_plugin.py is what pytest loads (docs/testing.md)
bench/            how fast the collectives are (docs/bench.md)
doctor/           what is wrong with a machine or a program (docs/doctor.md)
demo/             unisono demo
cli.py            the command `unisono`

Public names are imported from their modules on first use: pytest imports this package in every run
because of the plugin, so the import must cost almost nothing. `_HOMES` lists each name once;
`tools/write_stub.py` writes `__init__.pyi`, the same list for type checkers.
"""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "unisono": ("bench", "math", "watch"),
    "unisono.collectives": ("differentiable",),
    "unisono.collectives.messages": ("batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "unisono.collectives.objects": ("all_gather_object", "broadcast_object", "gather_object"),
    "unisono.collectives.primitives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "broadcast_tensor",
        "gather",
        "gather_tensor",
        "reduce",
        "reduce_scatter",
        "reduce_tensor",
        "scatter",
    ),
    "unisono.collectives.shared": ("share_module", "share_tensor"),
    "unisono.comm.communicator": ("Communicator",),
    "unisono.comm.reductions": ("PremulSum",),
    "unisono.comm.schedules.execute": ("run_schedule",),
    "unisono.comm.work": ("Message", "Work"),
    "unisono.doctor.self_test": ("SelfTest", "self_test"),
    "unisono.errors": (
        "CollectiveMismatch",
        "CollectiveTimeout",
        "DeadlockError",
        "EngineUnavailable",
        "GroupAborted",
        "GroupClosed",
        "GroupError",
        "MessageMismatch",
        "NoQuorum",
        "PeerLost",
        "RanksFailed",
        "RanksTimedOut",
        "RendezvousError",
        "SegmentError",
        "TorchMissing",
        "UnisonoError",
        "WeightMismatch",
        "WeightUpdateError",
    ),
    "unisono.groups.manager": (
        "ProcessGroupManager",
        "get_process_group_manager",
        "setup_process_group_manager",
    ),
    "unisono.launcher.functions": ("launch",),
    "unisono.launcher.outcomes": ("RankEnding",),
    "unisono.plan.mesh": ("Mesh",),
    "unisono.watch.debug": ("debug",),
    "unisono.world.world": (
        "barrier",
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
        "set_world",
        "shutdown",
    ),
}
"""Each module, and its public names."""

_NOTES = {
    "unisono.doctor.self_test": ("debug_communication",),
    "unisono.world.world": ("cleanup", "setup"),
}
"""Other names of the same, which course notes use (docs/notes.md). They stay."""

_HOME_OF = {
    name: home for homes in (_HOMES, _NOTES) for home, names in homes.items() for name in names
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name, "")
    if not home:
        from unisono.torch_habits import INSTEAD

        instead = f": use {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"module 'unisono' has no attribute {name!r}{instead}")
    try:
        if home == "unisono":
            return importlib.import_module(f"unisono.{name}")
        value = getattr(importlib.import_module(home), name)
    except ImportError as error:
        from unisono.errors import TorchMissing  # every `import torch` would pay for it above

        if isinstance(error, TorchMissing):
            raise TorchMissing(f"unisono.{name}") from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "importlib", "sys"})


if "torch" in sys.modules:  # else torch calls unisono.torch_backend.autoload when it is imported
    importlib.import_module("unisono.torch_backend.autoload").register()
