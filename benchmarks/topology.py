"""This machine as a topology for `unisono plan`: two ranks measure a hop and a bandwidth.

    python benchmarks/topology.py here.toml
    unisono plan all_reduce -n 8 --topology here.toml

Latency is half of a ping-pong of 8 bytes; bandwidth comes from one of 64 MiB; the speed of
reduction from NumPy's addition in place, on both ranks at once. Medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

import numpy

import unisono
from unisono.plan import Topology
from unisono.plan.sizes import format_seconds

MANY, FEW = 2000, 12
LARGE = 64 << 20


def ping_pong_s(comm: unisono.Communicator, size: int, times: int) -> float:
    """The median time of one direction."""
    tensor = numpy.zeros(size, numpy.uint8)
    laps = []
    for _ in range(times):
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        else:
            comm.recv(tensor, 0)
            comm.send(tensor, 0)
        laps.append((time.perf_counter() - begin) / 2)
    return statistics.median(laps)


def measure() -> tuple[float, float, float]:
    """On each of two ranks: seconds for 8 bytes, for LARGE bytes, and for adding LARGE bytes."""
    comm = unisono.get_world() if unisono.get_world_size() > 1 else unisono.init()
    small, large = ping_pong_s(comm, 8, MANY), ping_pong_s(comm, LARGE, FEW)
    mine, other = numpy.ones(LARGE // 4, numpy.float32), numpy.ones(LARGE // 4, numpy.float32)
    laps = []
    for _ in range(FEW):
        comm.barrier()
        begin = time.perf_counter()
        numpy.add(mine, other, out=mine)
        laps.append(time.perf_counter() - begin)
    return small, large, statistics.median(laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write the topology")
    path = parser.parse_args().file
    small_s, large_s, adding_s = unisono.launch(measure, 2)[0]
    topology = Topology(
        path.stem,
        node_size=os.cpu_count() or 1,
        inside_latency_s=small_s,
        inside_bytes_per_s=LARGE / (large_s - small_s),
        reduce_bytes_per_s=LARGE / adding_s,
        card_bytes_per_s=1e12,
        source=f"measured between two ranks: {platform.machine()}, {os.cpu_count()} cores",
    )
    path.write_text(topology.to_toml())
    print(
        f"wrote {path}: {format_seconds(small_s)} a hop, "
        f"{topology.inside_bytes_per_s / 1e9:.1f} GB/s, adds {LARGE / adding_s / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
