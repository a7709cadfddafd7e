"""All-reduce by different algorithms: the engine's own, schedules inside it, schedules by messages.

    python benchmarks/algorithms.py                       2 and 4 ranks, about a minute
    python benchmarks/algorithms.py --ranks 8 --sizes 8 65536 --json algorithms.json

Every size is measured in rounds; in each round every variant has its turn, after a barrier, so that
a busy moment affects all alike. A figure is the median over the rounds of the slowest
rank's time, in microseconds. The tensor is float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import unisono
from unisono.plan import find

ALGORITHMS = ("ring", "binomial", "double_tree")
SIZES = (8, 4096, 65_536, 1 << 20, 16 << 20)
BUDGET_BYTES = 64 << 20  # that one variant moves for one size, so that small sizes have more rounds


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce by different algorithms.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    results = {}
    for ranks in options.ranks:
        medians = unisono.launch(measure, ranks, [options.sizes, options.algorithms])[0]
        results[str(ranks)] = medians
        show(ranks, options.sizes, medians)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(sizes: list[int], algorithms: list[str]) -> dict[str, list[float]]:
    """On each rank: medians in microseconds for each variant and size."""
    comm = unisono.init()
    schedules = {name: find("all_reduce", name).schedule(comm.size) for name in algorithms}
    ways: dict[str, Callable[[torch.Tensor], object]] = {"own": comm.all_reduce}
    for name in schedules:
        ways[name] = lambda tensor, name=name: comm.all_reduce(tensor, algorithm=name)
    for name, schedule in schedules.items():
        ways[f"{name}, messages"] = lambda tensor, plan=schedule: unisono.run_schedule(
            plan, comm, tensor
        )
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for size_bytes in sizes:
        tensor = torch.zeros(max(1, size_bytes // 4))
        rounds = max(5, min(200, BUDGET_BYTES // size_bytes))
        seconds = torch.zeros(len(ways), rounds)
        for number in range(-2, rounds):
            for way, run in enumerate(ways.values()):
                comm.barrier()
                start = time.perf_counter()
                run(tensor)
                if number >= 0:
                    seconds[way, number] = time.perf_counter() - start
        comm.all_reduce(seconds, "max")
        for name, row in zip(ways, seconds.tolist(), strict=True):
            medians[name].append(statistics.median(row) * 1e6)
    return medians


def show(ranks: int, sizes: list[int], medians: dict[str, list[float]]) -> None:
    sys.stdout.write(f"\nall_reduce on {ranks} ranks, float32, median of the slowest rank, us\n")
    sys.stdout.write("| bytes |" + "".join(f" {name} |" for name in medians) + "\n")
    sys.stdout.write("|---:|" + "---:|" * len(medians) + "\n")
    for number, size in enumerate(sizes):
        row = "".join(f" {column[number]:,.1f} |" for column in medians.values())
        sys.stdout.write(f"| {size:,} |{row}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
