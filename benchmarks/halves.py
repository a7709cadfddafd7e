"""all_reduce of half types against float32 of as many bytes, in turns in the same processes.

    python benchmarks/halves.py                   2 ranks, ten seconds
    python benchmarks/halves.py --ranks 8 --turns 50
    python benchmarks/halves.py --gradients       float32 gradients, as they are or sent in bfloat16
    python benchmarks/halves.py --ranks 4 --reproducible

A turn is as many calls as take about half a millisecond; figures are medians of the slowest rank,
those of half types relative to float32.

With --gradients a call reduces a bucket of float32: as it is, or cast to bfloat16 into a second
buffer, reduced there and cast back, as a hook that sends fewer bytes would.

With --reproducible: ordinary calls of each dtype, from 8 bytes on, and the times of reproducible
ones relative to them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import unisono

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB)
DTYPES = ("float32", "float16", "bfloat16")


def turn_us(comm: Any, tensor: Any, calls: int, reproducible: bool | None = None) -> float:
    import torch

    comm.barrier()
    begin_s = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(tensor, reproducible=reproducible)
    took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    comm.all_reduce(took, "max")
    return float(took) / calls * 1e6


def measure(turns: int) -> list[str]:
    import torch

    torch.set_num_threads(1)
    comm = unisono.init()
    lines = []
    for size in SIZES:
        calls = max(1, 2**22 // size)
        tensors = [torch.zeros(size, dtype=torch.uint8).view(getattr(torch, n)) for n in DTYPES]
        times: list[list[float]] = [[] for _ in DTYPES]
        for turn in range(turns + 2):
            for number, tensor in enumerate(tensors):
                us = turn_us(comm, tensor, calls)
                if turn > 1:
                    times[number].append(us)
        single, *halves = map(statistics.median, times)
        ratios = "".join(f"{us / single:10.2f}" for us in halves)
        lines.append(f"  {size // KIB:6} KiB{single:10.1f}{ratios}")
    return lines


def reproducible(turns: int) -> list[str]:
    """For each size and dtype, the median us of ordinary calls; reproducible ones over it."""
    import torch

    torch.set_num_threads(1)
    comm = unisono.init()
    lines = []
    for size in (8, *SIZES):
        cells = ""
        for name in DTYPES:
            tensor = torch.zeros(size, dtype=torch.uint8).view(getattr(torch, name))
            taken: dict[bool | None, list[float]] = {None: [], True: []}
            for turn in range(turns + 2):
                for form, times in taken.items():
                    us = turn_us(comm, tensor, max(1, min(500, 2**22 // size)), form)
                    if turn > 1:
                        times.append(us)
            plain, tree = map(statistics.median, taken.values())
            cells += f"{plain:10.1f} x{tree / plain:5.2f}"
        lines.append(f"  {size:9} B{cells}")
    return lines


def gradients(turns: int) -> list[str]:
    """For each size, the median us in float32, and of casting, reducing and casting back."""
    import torch

    torch.set_num_threads(1)
    comm = unisono.init()
    lines = []
    for size in SIZES:
        bucket = torch.ones(size // 4)
        fewer = torch.empty_like(bucket, dtype=torch.bfloat16)
        taken: dict[str, list[float]] = {"float32": [], "bfloat16": []}
        for _ in range(turns):
            for way, times in taken.items():
                comm.barrier()
                begin_s = time.perf_counter()
                if way == "float32":
                    comm.all_reduce(bucket, "avg")
                else:
                    fewer.copy_(bucket)
                    comm.all_reduce(fewer, "avg")
                    bucket.copy_(fewer)
                took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
                comm.all_reduce(took, "max")
                times.append(float(took) * 1e6)
        plain, cast = (statistics.median(times) for times in taken.values())
        lines.append(f"{size // KIB:8} KiB {plain:10.1f}  bfloat16 x {cast / plain:.2f}")
    unisono.shutdown()
    return lines


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--gradients", action="store_true", help="float32, sent in bfloat16")
    parser.add_argument("--reproducible", action="store_true", help="against ordinary calls")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    shown = "float32 us, half types over it"
    if options.reproducible:
        shown = f"{', '.join(DTYPES)}: us, reproducible over it"
    print(f"{options.ranks} ranks, {cores} cores: {shown}", flush=True)
    work = gradients if options.gradients else reproducible if options.reproducible else measure
    print(*unisono.launch(work, options.ranks, (options.turns,), threads=1)[0], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
