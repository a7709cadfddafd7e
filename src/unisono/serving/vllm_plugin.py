"""vLLM's plug-in: with UNISONO_VLLM=1 the CPU workers of vLLM talk to each other by unisono.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import logging

from unisono import variables

TRIED = ("0.32.",)
COMMUNICATOR = "unisono.serving.vllm_communicator.UnisonoCpuCommunicator"
_log = logging.getLogger("unisono")
_is_registered = False


def register() -> None:
    """Have vLLM's CPU platform make our communicator. Does nothing unless UNISONO_VLLM=1, and only
    says why with another vLLM or on another platform."""
    global _is_registered
    if _is_registered or not variables.VLLM.read_or_warn():
        return
    _is_registered = True
    from vllm.platforms import current_platform
    from vllm.version import __version__

    platform = type(current_platform)
    if not __version__.startswith(TRIED):
        why = f"it was tried with {', '.join(version + 'x' for version in TRIED)}"
        _log.warning("UNISONO_VLLM=1 leaves vLLM %s as it is: %s", __version__, why)
    elif not current_platform.is_cpu():
        _log.warning("UNISONO_VLLM=1 leaves vLLM as it is: it does not run on CPUs here")
    else:
        platform.get_device_communicator_cls = classmethod(lambda cls: COMMUNICATOR)
