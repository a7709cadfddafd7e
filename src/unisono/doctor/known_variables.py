"""The environment variables that change how ranks communicate: their meaning, and invalid
values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from unisono import variables
from unisono.doctor.machine import Finding, warn
from unisono.errors import name_closest
from unisono.plan.catalog import find_to_run
from unisono.torch_backend.autoload import backend_problem
from unisono.variables import Variable

STARTING = {
    "RANK": "this process's rank, as torchrun sets it",
    "WORLD_SIZE": "how many ranks there are, on all machines",
    "LOCAL_RANK": "the rank among those of this machine, which chooses the GPU",
    "LOCAL_WORLD_SIZE": "how many ranks this machine has",
    "MASTER_ADDR": "where rank 0 hosts torch's store",
    "MASTER_PORT": "its port",
    "OMP_NUM_THREADS": "threads per rank; times ranks it should not exceed the cores",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a process sees, in this order",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues per GPU; 1 keeps kernels in launch order",
    "CUDA_LAUNCH_BLOCKING": "1: wait for every kernel; for debugging only",
}
TORCH = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO: more is logged; DETAIL: every collective is compared between "
    "ranks, slowly (on unisono that is always on)",
    "TORCH_CPP_LOG_LEVEL": "INFO shows the log of torch's C++ code",
    "TORCH_SHOW_CPP_STACKTRACES": "1: errors show the C++ stack as well",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what happens after an NCCL error or timeout; 3, the "
    "default, ends the process",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks until the collective has finished",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many calls the flight recorder keeps; 0 turns it off",
    "TORCH_FR_BUFFER_SIZE": "its newer name",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: the flight recorder is written to files after a timeout",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where those files go; the rank is appended",
    "TORCH_NCCL_DESYNC_DEBUG": "1: a timeout says which ranks were out of step",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "how long the watchdog may be stuck",
    "TORCH_NCCL_ENABLE_TIMING": "1: the flight recorder includes durations",
    "TORCH_NCCL_NAN_CHECK": "1: NaN in sent data is an error; slow",
}
GLOO = {"GLOO_SOCKET_IFNAME": "the network interface of gloo; lo on one machine"}
UCX = {
    "UCX_TLS": "the transports between hosts that UCX may choose from; tcp,self, and ib with RDMA",
    "UCX_NET_DEVICES": "the interfaces and adapters of UCX; by default unisono chooses one",
}
NCCL = {
    "NCCL_DEBUG": "how much NCCL logs (VERSION, WARN, INFO, TRACE): INFO shows version, topology "
    "and transports",
    "NCCL_DEBUG_SUBSYS": "the subsystems that INFO logs: INIT,ENV,TUNING shows latency and "
    "bandwidth by algorithm",
    "NCCL_DEBUG_FILE": "the log file; %h is the host, %p the process",
    "NCCL_ALGO": "the algorithms that NCCL may choose from: Ring, Tree, CollnetDirect, "
    "CollnetChain, NVLS, NVLSTree, PAT",
    "NCCL_PROTO": "the protocols that it may choose from: LL, LL128, Simple",
    "NCCL_MAX_NCHANNELS": "the most channels, a CUDA block each; 1 leaves the GPU to computation",
    "NCCL_MIN_NCHANNELS": "the fewest channels",
    "NCCL_SOCKET_IFNAME": "the network interfaces of NCCL, by prefix; ^ excludes, = is exact",
    "NCCL_IB_HCA": "the InfiniBand adapters to use, as mlx5_0:1",
    "NCCL_IB_DISABLE": "1: TCP instead of InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "1: GPUs do not write to each other directly; slow",
    "NCCL_SHM_DISABLE": "1: no shared memory between GPUs of one machine; slow",
}
OURS: dict[str, Variable[Any]] = {variable.name: variable for variable in variables.ALL}
KNOWN = {name: variable.meaning for name, variable in OURS.items()}
KNOWN |= STARTING | TORCH | GLOO | UCX | NCCL
"""The meaning of every variable, in the order of the table."""

VALUES = {
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "1", "2", "3"),
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "TRACE"),
} | dict.fromkeys(("NCCL_IB_DISABLE", "TORCH_SHOW_CPP_STACKTRACES"), ("0", "1"))
"""The valid values of a variable, if there are few."""
SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING")
RENAMED = {
    f"NCCL_{name}": f"TORCH_NCCL_{name}"
    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING")
}
FOR_DEBUGGING = (
    *("UNISONO_SITES", "UNISONO_WATCH", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"),
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "TORCH_NCCL_DESYNC_DEBUG"),
)
_OF_LIBRARIES = ("UNISONO_", "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")


def set_here(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, and are known or look like a library's."""
    names = [name for name in environment if name in KNOWN or name.startswith(_OF_LIBRARIES)]
    return {
        name: show(name, environment[name])
        for name in sorted(names, key=_place)
        if environment[name]
    }


def show(name: str, value: str) -> str:
    """A variable's value, unless it is a secret."""
    return "(secret)" if name in OURS and OURS[name].is_secret else value


def to_show(environment: Mapping[str, str], every: bool = False) -> Iterator[tuple[str, str]]:
    """Names and meanings of the variables that are set or help with debugging; or of `every` known
    one."""
    names = {*set_here(environment), *(KNOWN if every else FOR_DEBUGGING)}
    for name in sorted(names, key=_place):
        yield name, KNOWN.get(name, "")


def _place(name: str) -> tuple[int, str]:
    return (list(KNOWN).index(name) if name in KNOWN else len(KNOWN)), name


def findings(environment: Mapping[str, str], gpus: bool = True) -> Iterator[Finding]:
    """Variables without effect, or with an unintended one."""
    for name, value in sorted(environment.items()):
        if name.startswith("UNISONO_"):
            yield from _ours(name, value)
        elif name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and not gpus:
            continue
        elif name in RENAMED:
            yield warn(name, f"={value}: an old name", f"Set {RENAMED[name]} instead.")
        elif name in VALUES and value.upper() not in VALUES[name]:
            advice = f"Set it to one of {', '.join(VALUES[name])}."
            yield warn(name, f"={value} is not valid", advice)
        elif name in SLOW and value == "1":
            yield warn(name, "=1 makes communication slow", "Unset it after debugging.")


def _ours(name: str, value: str) -> Iterator[Finding]:
    """What is wrong with a variable of unisono's own."""
    if name not in OURS:
        likely = name_closest(name, OURS)
        advice = f"Did you mean {likely}?" if likely else "Unset it."
        yield warn(name, "unknown variable, without effect", advice)
    elif value:
        problem = OURS[name].problem(value)
        if problem:
            yield warn(name, f"={show(name, value)} is not valid", f"It {problem}.")
        elif unknown := _unknown_name(name, value):
            yield warn(name, f"={value} has no effect: {unknown}", "Correct or unset it.")


def _unknown_name(name: str, value: str) -> str:
    """What is wrong with the name of a backend or an algorithm; "" if nothing is."""
    if name == variables.BACKEND.name and value.lower() != "auto":
        with contextlib.suppress(ImportError):  # another check reports a missing torch
            return backend_problem(value.lower())
    elif name == variables.ALGO.name:
        try:
            find_to_run("all_reduce", value)
        except ValueError as error:
            return f"{error}, unless the program registers it"
    return ""
