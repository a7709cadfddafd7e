"""Each rank's share of the machine: cores, threads, memory."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping

from unisono.comm import engine
from unisono.errors import EngineUnavailable, UnisonoError, name_number
from unisono.processes import boot_id

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_MEMORY_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}
"""glibc returns a buffer of some megabytes to the kernel as soon as it is freed, and the next one
costs a page fault for every 4 KiB. With these it keeps up to 512 MiB for buffers of up to 32 MiB,
the size of gradient buckets and of FSDP2's buffers."""

_LEAST_BYTES = 30 << 20
"""The least memory of a rank: Python, NumPy and unisono."""


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_count() -> int:
    """How many cores this process may use: its affinity, limited by the CPU quota."""
    try:
        return max(1, min(len(cores()), int(engine.native.cpu_quota())))
    except EngineUnavailable:
        return len(cores())


def check_room(ranks: int) -> None:
    """Raise if the ranks could not even start: too many, or (FileNotFoundError) no /proc."""
    boot_id()  # without /proc no rank could read its instructions
    try:
        room = engine.native.memory_room()
    except EngineUnavailable:
        return
    if ranks * _LEAST_BYTES > room:
        raise UnisonoError(
            f"{ranks} ranks need at least {_gib(ranks * _LEAST_BYTES)} of memory, but only "
            f"{_gib(room)} is free: start fewer"
        )


def thread_variables(
    ranks: int, threads: int | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that keep `ranks` ranks from using more threads than there are cores.

    An explicit number wins, then the user's environment.
    """
    if threads is not None:
        return dict.fromkeys(THREAD_VARIABLES, str(threads))
    if ranks == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    fitting = max(1, core_count() // ranks)
    if fitting < core_count():  # otherwise each rank would use all cores
        _say_once(ranks, fitting)
    return {name: str(fitting) for name in THREAD_VARIABLES if name not in environment}


def memory_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that let ranks reuse freed memory, unless the user has set any for malloc."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        return {}
    return dict(_MEMORY_VARIABLES)


def pins(ranks: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank: its own, or one core for several ranks if there are few."""
    available = cores()
    each = len(available) // ranks
    if each == 0:
        return tuple((available[rank % len(available)],) for rank in range(ranks))
    return tuple(tuple(available[rank * each : (rank + 1) * each]) for rank in range(ranks))


@functools.cache
def _say_once(ranks: int, threads: int) -> None:
    each = (
        f"{ranks} ranks share {core_count()} cores, so each gets {name_number(threads, 'thread')}"
    )
    print(f"unisono: {each}; set OMP_NUM_THREADS to change this", file=sys.stderr)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
