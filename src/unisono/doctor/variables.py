"""The environment variables that change how ranks communicate: what they mean, how they stand."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from unisono import variables
from unisono.doctor.findings import Finding, warn
from unisono.plan.catalog import find_to_run
from unisono.torch_backend.autoload import backend_problem
from unisono.variables import Variable


def _theirs(
    name: str, meaning: str, values: tuple[str, ...] = (), *, worth_knowing: bool = False
) -> Variable[str]:
    """A variable of others: what it means, and all that it may be, where that is known."""
    return Variable(name, meaning, str, values, worth_knowing)


_notable = functools.partial(_theirs, worth_knowing=True)
_SWITCH = ("0", "1")

RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
"""Old names, and those that took their places."""

STARTING = (
    _theirs("RANK", "this process's rank, as torchrun sets it"),
    _theirs("WORLD_SIZE", "how many ranks there are, on all machines"),
    _theirs("LOCAL_RANK", "the rank among those of this machine: which GPU to take"),
    _theirs("LOCAL_WORLD_SIZE", "how many ranks this machine has"),
    _theirs("MASTER_ADDR", "where rank 0 hosts torch's store"),
    _theirs("MASTER_PORT", "its port"),
    _notable("OMP_NUM_THREADS", "threads per rank; times ranks it should not exceed the cores"),
    _theirs("MKL_NUM_THREADS", "the same for MKL alone"),
    _theirs("OPENBLAS_NUM_THREADS", "the same for OpenBLAS alone"),
    _theirs("CUDA_VISIBLE_DEVICES", "the GPUs that a process sees, in this order"),
    _theirs(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "hardware queues per GPU; 1 keeps kernels in the order of their launch, for overlap",
    ),
    _theirs("CUDA_LAUNCH_BLOCKING", "1: every kernel is waited for; for debugging only", _SWITCH),
)

TORCH = (
    _notable(
        "TORCH_DISTRIBUTED_DEBUG",
        "INFO: more is logged; DETAIL: every collective is compared between ranks, slowly "
        "(on unisono that is always on)",
        ("OFF", "INFO", "DETAIL"),
    ),
    _theirs("TORCH_CPP_LOG_LEVEL", "INFO shows what torch's C++ side says"),
    _theirs("TORCH_SHOW_CPP_STACKTRACES", "1: errors show the C++ stack as well", _SWITCH),
    _theirs(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "what happens after an NCCL error or timeout; 3, the default, ends the process",
        ("0", "1", "2", "3"),
    ),
    _theirs("TORCH_NCCL_BLOCKING_WAIT", "1: wait() blocks until the collective is over"),
    _notable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "how many calls the flight recorder keeps; 0 turns it off"
    ),
    _theirs(
        "TORCH_FR_BUFFER_SIZE",
        "the same, by its newer name; from torch 2.15 on it records groups of unisono, too",
    ),
    _notable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1: the flight recorder is written to files when a collective times out",
    ),
    _theirs("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "where those files go; the rank is appended"),
    _theirs("TORCH_NCCL_DESYNC_DEBUG", "1: a timeout says which ranks were out of step"),
    _theirs("TORCH_NCCL_ENABLE_MONITORING", "0: no thread looks after the watchdog"),
    _theirs("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "how long the watchdog may be stuck"),
    _theirs("TORCH_NCCL_ENABLE_TIMING", "1: the flight recorder has durations"),
    _theirs(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "1: tensors in flight are kept by reference; torch 2.15 no longer knows it",
    ),
    _theirs("TORCH_NCCL_HIGH_PRIORITY", "1: NCCL's streams have high priority"),
    _theirs("TORCH_NCCL_NAN_CHECK", "1: NaN in what is sent is an error; slow"),
    *(_theirs(old, f"use {new}") for old, new in RENAMED.items()),
)

GLOO = (
    _notable("GLOO_SOCKET_IFNAME", "the network interface of gloo; lo on one machine"),
    _theirs("TP_SOCKET_IFNAME", "the same for torch's RPC"),
    _theirs("TORCH_GLOO_LAZY_INIT", "1: gloo connects two ranks when they first talk"),
)

NCCL = (
    _notable(
        "NCCL_DEBUG",
        "how much NCCL says: INFO shows version, topology and transports",
        ("VERSION", "WARN", "INFO", "TRACE"),
    ),
    _notable(
        "NCCL_DEBUG_SUBSYS",
        "what INFO is about: INIT,ENV,TUNING shows a table of latency and bandwidth by algorithm",
    ),
    _theirs("NCCL_DEBUG_FILE", "where that goes; %h is the host, %p the process"),
    _notable(
        "NCCL_ALGO",
        "the algorithms that NCCL may choose from: Ring, Tree, CollnetDirect, CollnetChain, NVLS, "
        "NVLSTree, PAT",
    ),
    _notable("NCCL_PROTO", "the protocols that it may choose from: LL, LL128, Simple"),
    _notable(
        "NCCL_MAX_NCHANNELS",
        "the most channels, a CUDA block each; 1 leaves the GPU to computation",
    ),
    _theirs("NCCL_MIN_NCHANNELS", "the fewest channels"),
    _theirs("NCCL_MAX_CTAS", "the newer name of that bound, from NCCL 2.17"),
    _theirs("NCCL_MIN_CTAS", "the newer name of that bound, from NCCL 2.17"),
    _theirs("NCCL_NTHREADS", "threads per CUDA block"),
    _theirs("NCCL_BUFFSIZE", "bytes of buffer between two GPUs"),
    _notable(
        "NCCL_SOCKET_IFNAME", "the network interfaces of NCCL, by prefix; ^ excludes, = is exact"
    ),
    _theirs("NCCL_IB_HCA", "the InfiniBand adapters to use, as mlx5_0:1"),
    _theirs("NCCL_IB_DISABLE", "1: TCP instead of InfiniBand or RoCE", _SWITCH),
    _theirs("NCCL_IB_TIMEOUT", "the InfiniBand timeout, as a power of two"),
    _theirs("NCCL_NET_GDR_LEVEL", "how far a network card may be from a GPU it writes to"),
    _theirs("NCCL_P2P_DISABLE", "1: GPUs do not write to each other directly; slow", _SWITCH),
    _theirs("NCCL_P2P_LEVEL", "how far apart GPUs may be that do"),
    _theirs("NCCL_SHM_DISABLE", "1: no shared memory between GPUs of one machine; slow", _SWITCH),
    _theirs("NCCL_NVLS_ENABLE", "0: no reductions inside NVSwitch"),
    _theirs("NCCL_CROSS_NIC", "whether a ring may use different cards on different machines"),
    _theirs("NCCL_TOPO_FILE", "a topology to assume instead of the detected one"),
    _theirs("NCCL_TOPO_DUMP_FILE", "where to write the detected topology"),
    _theirs("NCCL_TUNER_PLUGIN", "a library that chooses algorithms instead of NCCL"),
    _theirs("NCCL_CONF_FILE", "a file with more of these settings; /etc/nccl.conf is another"),
)

SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING")
KNOWN: dict[str, Variable[Any]] = {
    variable.name: variable for variable in (*variables.ALL, *STARTING, *TORCH, *GLOO, *NCCL)
}


def relevant(
    environment: Mapping[str, str], every: bool = False, gpus: bool = True
) -> list[tuple[Variable[Any], str | None]]:
    """The variables that are set or worth knowing, or every known one, with their values. Without
    `gpus` those of NCCL and CUDA are not worth knowing."""
    return [
        (variable, environment.get(variable.name))
        for variable in KNOWN.values()
        if every
        or variable.name in environment
        or (variable.worth_knowing and (gpus or not _is_for_gpus(variable.name)))
    ]


def findings(environment: Mapping[str, str], gpus: bool = True) -> Iterator[Finding]:
    """Variables that do nothing, or not what was meant. Without `gpus` those of NCCL and CUDA do
    nothing anyway, and are passed over."""
    for name, value in sorted(environment.items()):
        variable = KNOWN.get(name)
        if variable is None:
            if name.startswith("UNISONO_"):
                names = [variable.name for variable in variables.ALL]
                likely = difflib.get_close_matches(name, names, 1)
                advice = f"Did you mean {likely[0]}?" if likely else "Unset it."
                yield warn(name, "no variable of that name has an effect", advice)
        elif variable in variables.ALL:
            if value:
                yield from _ours(variable, value)
        elif _is_for_gpus(name) and not gpus:
            continue
        elif name in RENAMED:
            yield warn(name, f"={value}: an old name", f"Set {RENAMED[name]} instead.")
        elif variable.values and value.upper() not in variable.values:
            may_be = ", ".join(variable.values)
            yield warn(name, f"={value} means nothing", f"Set it to one of {may_be}.")
        elif name in SLOW and value == "1":
            yield warn(name, "=1 makes communication slow", "Unset it after debugging.")


def _is_for_gpus(name: str) -> bool:
    """Whether a variable means nothing to a machine without a GPU."""
    return name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_"))


def _ours(variable: Variable[Any], value: str) -> Iterator[Finding]:
    """What is wrong with a variable that unisono itself reads."""
    problem = variable.problem(value)
    if problem:
        yield warn(variable.name, f"={value} means nothing", f"It {problem}.")
    elif variable.name == variables.BACKEND.name and value.lower() != "auto":
        with contextlib.suppress(ImportError):  # without torch there is no backend: a finding, too
            problem = backend_problem(value.lower())
        if problem:
            yield warn(variable.name, f"={value} means nothing: {problem}", "Correct or unset it.")
    elif variable.name == variables.ALGO.name:
        try:
            find_to_run("all_reduce", value)
        except ValueError as error:
            yield warn(
                variable.name,
                f"={value} means nothing, unless the program registers it: {error}",
                "Correct or unset it.",
            )


def markdown() -> str:
    """The table of every known variable, as docs/doctor.md has it."""
    lines = ["| variable | meaning |", "|---|---|"]
    for variable in KNOWN.values():
        values = f" ({', '.join(variable.values)})" if variable.values else ""
        lines.append(f"| `{variable.name}` | {variable.meaning}{values} |")
    return "\n".join(lines) + "\n"
