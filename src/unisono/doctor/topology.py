"""`unisono doctor --topology FILE`: this machine as a topology, measured between two ranks.

Latency is half of a ping-pong of 8 bytes, bandwidth comes from one of 64 MiB. Each of the two ranks
adds, copies and multiplies on one thread while the other does the same. Medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from unisono.launcher.functions import launch
from unisono.output_files import write_text
from unisono.plan.layouts.roofline import MATMUL_REACH, MEMORY_REACH
from unisono.plan.sizes import format_seconds
from unisono.plan.topology import Topology

_MANY, _FEW, _SIDE = 2000, 12, 1024
_LARGE = 64 << 20


def write_topology(path: Path) -> str:
    """Measure this machine, write the file, and return a sentence about it."""
    small_s, large_s, call_s, add_s, copy_s, product_s = launch(_measure, 2, threads=1)[0]
    # Peaks of which products and copies reach what layouts assume (docs/layouts.md).
    flops_per_s = 2 * _SIDE**3 / product_s / MATMUL_REACH
    memory_bytes_per_s = 2 * _LARGE / copy_s / MEMORY_REACH
    cores = len(os.sched_getaffinity(0))
    topology = Topology(
        path.stem,
        node_size=cores,
        inside_latency_s=small_s,
        inside_bytes_per_s=_LARGE / max(large_s - small_s, 1e-9),
        reduce_bytes_per_s=_LARGE / add_s,
        call_s=max(0.0, call_s - small_s),
        card_bytes_per_s=1e12,
        flops_per_s=flops_per_s,
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // cores),
        memory_bytes_per_s=memory_bytes_per_s,
        devices=cores,
        source=f"measured between two ranks: {platform.machine()}, {cores} cores, float32",
    )
    write_text(path, topology.to_toml())
    return (
        f"wrote {path}: {format_seconds(small_s)} a hop, "
        f"{topology.inside_bytes_per_s / 1e9:.1f} GB/s; a rank computes "
        f"{2e-9 * _SIDE**3 / product_s:.0f} GFLOP/s and copies at {2e-9 * _LARGE / copy_s:.1f} GB/s"
    )


def _measure() -> tuple[float, ...]:
    """On each of two ranks, seconds: of 8 bytes, of _LARGE bytes, of an all_reduce of 8 bytes, of
    adding _LARGE bytes, of copying them, and of a product."""
    import numpy
    import torch

    from unisono.world.world import init

    comm = init()

    def median_s(work: Callable[[], object], times: int) -> float:
        laps = []
        for _ in range(times):
            begin_s = time.perf_counter()
            work()
            laps.append(time.perf_counter() - begin_s)
        return statistics.median(laps)

    def ping_pong_s(size: int, times: int) -> float:
        tensor = numpy.zeros(size, numpy.uint8)

        def there_and_back() -> None:
            if comm.rank == 0:
                comm.send(tensor, 1)
            comm.recv(tensor, 1 - comm.rank)
            if comm.rank == 1:
                comm.send(tensor, 0)

        return median_s(there_and_back, times) / 2

    mine, other = torch.ones(_LARGE // 4), torch.ones(_LARGE // 4)
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    small = torch.ones(2)
    found = [ping_pong_s(8, _MANY), ping_pong_s(_LARGE, _FEW)]
    found.append(median_s(lambda: comm.all_reduce(small), _MANY))
    alone: list[Callable[[], object]] = [
        lambda: mine.add_(other),
        lambda: mine.copy_(other),
        lambda: torch.mm(left, right),
    ]
    for work in alone:
        comm.barrier()
        found.append(median_s(work, _FEW))
    return tuple(found)
