"""vLLM's plug-in: with UNISONO_VLLM=1 the CPU workers of vLLM talk to each other by unisono, and
with UNISONO_REPLACE=gloo so do its data-parallel engines.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""

import logging
import os
from datetime import timedelta
from typing import Any

from unisono import variables

TRIED = ("0.32.",)
COMMUNICATOR = "unisono.serving.vllm_communicator.UnisonoCpuCommunicator"
_log = logging.getLogger("unisono")
_SPIN_US = "2000"
"""vLLM's engine core takes a core whenever a worker sleeps, and does not give it back at once."""
_is_registered = False


def register() -> None:
    """Do what UNISONO_VLLM and UNISONO_REPLACE ask for. Does nothing without them, and only says
    why with another vLLM or on another platform."""
    global _is_registered
    asked = {
        "UNISONO_VLLM=1": variables.VLLM.read_or_warn(),
        "UNISONO_REPLACE=gloo": variables.REPLACE.read_or_warn() == "gloo",
    }
    if _is_registered or not any(asked.values()):
        return
    _is_registered = True
    from vllm.version import __version__

    if not __version__.startswith(TRIED):
        what = " and ".join(name for name, is_set in asked.items() if is_set)
        why = f"it was tried with {', '.join(version + 'x' for version in TRIED)}"
        _log.warning("%s: vLLM %s is left as it is: %s", what, __version__, why)
        return
    if asked["UNISONO_REPLACE=gloo"]:
        from vllm.distributed import utils

        utils.init_gloo_process_group = group_outside_the_world
    if asked["UNISONO_VLLM=1"]:
        os.environ.setdefault(variables.SPIN.name, _SPIN_US)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            chosen = classmethod(lambda cls: COMMUNICATOR)
            type(current_platform).get_device_communicator_cls = chosen
        else:
            _log.warning("UNISONO_VLLM=1 leaves vLLM as it is: it does not run on CPUs here")


def group_outside_the_world(
    prefix_store: Any, group_rank: int, group_size: int, timeout: timedelta
) -> Any:
    """What vLLM makes of torch's ProcessGroupGloo for engines that are not in one torch world."""
    from unisono.comm.communicator import Communicator
    from unisono.torch_backend.creation import group_over

    comm = Communicator.join(
        "vllm engines", group_rank, group_size, prefix_store, timeout_s=timeout.total_seconds()
    )
    group = group_over(comm, prefix_store)
    group.shown_name = "gloo"
    return group
