"""What more threads gain in large calls: groups with 1, 2 and 4 threads, in turns.

    python benchmarks/copiers.py                  2 ranks, half a minute
    python benchmarks/copiers.py --ranks 4 --turns 30

"fresh": results go to memory that has never been touched, as FSDP2's do. "shared": to tensors that
all ranks have mapped. All groups have the same processes and take turns, in an order that is
shuffled each time. A turn takes as long as its slowest rank. Figures are medians in microseconds,
those of more threads relative to one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import unisono
from unisono import variables

THREADS = (1, 2, 4)
SIZES = (256 * 1024, 1024**2, 4 * 1024**2, 26 * 1024**2)
KINDS = ("kept", "fresh", "shared")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def groups_of(comm: Any) -> dict[int, Any]:
    groups = {}
    for threads in THREADS:
        os.environ[variables.COPY_THREADS.name] = str(threads)
        groups[threads] = comm.split(range(comm.size), f"threads-{threads}")
    return groups


def memory_of(comm: Any, kind: str, count: int) -> Any:
    import torch

    if kind == "shared":
        return comm.empty(count).fill_(1)
    if kind == "fresh":
        return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)
    return torch.ones(count)


def call_of(comm: Any, name: str, kind: str, size: int) -> Callable[[], Callable[[], Any]]:
    """A function that prepares a call of `size` bytes, and returns what is timed."""
    count = size // 4 // comm.size * comm.size
    wide, part = memory_of(comm, kind, count), memory_of(comm, kind, count // comm.size)

    def prepare() -> Callable[[], Any]:
        if name == "all_reduce":
            return lambda: comm.all_reduce(wide)
        if name == "all_gather":
            given = wide.chunk(comm.size)[comm.rank]
            out = memory_of(comm, kind, count) if kind == "fresh" else wide
            if kind == "fresh":
                given = out.chunk(comm.size)[comm.rank].fill_(1)  # in place, as FSDP2 does
            return lambda: comm.all_gather(out, given)
        out = memory_of(comm, kind, count // comm.size) if kind == "fresh" else part
        return lambda: comm.reduce_scatter(out, wide)

    return prepare


def measure(turns: int) -> list[str]:
    import torch

    torch.set_num_threads(1)
    comm = unisono.init()
    groups, shuffler, lines = groups_of(comm), random.Random(1), []
    for name in COLLECTIVES:
        for kind in KINDS:
            if (name, kind) == ("all_reduce", "fresh"):
                continue
            for size in SIZES:
                calls = {
                    threads: call_of(group, name, kind, size) for threads, group in groups.items()
                }
                times: dict[int, list[float]] = {threads: [] for threads in THREADS}
                order = list(THREADS)
                for turn in range(turns + 3):
                    shuffler.shuffle(order)
                    for threads in order:
                        call = calls[threads]()
                        comm.barrier()
                        begin_s = time.perf_counter()
                        call()
                        took = torch.tensor([time.perf_counter() - begin_s])
                        comm.all_reduce(took, "max")
                        if turn > 2:
                            times[threads].append(float(took) * 1e6)
                one, *more = (statistics.median(times[threads]) for threads in THREADS)
                ratios = "".join(f"{us / one:8.2f}" for us in more)
                lines.append(f"  {name:15}{kind:8}{size // 1024:7} KiB{one:10.0f}{ratios}")
    return lines


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks, {cores} cores; us with 1 thread, x with 2 and 4", flush=True)
    results = unisono.launch(measure, options.ranks, (options.turns,), threads=1)
    print(*results[0], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
