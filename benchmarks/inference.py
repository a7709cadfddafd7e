"""Steps of tensor-parallel inference: an all_reduce after each piece of computing.

    python benchmarks/inference.py                       2 ranks, half a minute
    python benchmarks/inference.py --ranks 8 --late-us 0 500 --json inference.json
    python benchmarks/inference.py --deepspeed           with DeepSpeed's kernel, built on first use

A step has 64 pieces, as 32 layers of a transformer do: each multiplies a few rows by a matrix of
512 x 512, and adds up the ranks' results, 8 to 64 KiB. "late" is how much longer one rank, another
in each piece, computes than the rest, which wait for it. All variants run in the same processes and
take turns, in an order that is shuffled each time.

"us" is what an all_reduce adds to a piece: the median step, minus the same step without
communication, / 64. If a rank is late, this includes the wait for it. "CPU" is the processor time
of all ranks for it, per rank: what waiting costs others on the same cores. gloo and unisono are
called through torch.distributed, comm is unisono's own call, operator is torch.ops.unisono, vllm
vLLM's operator for CPUs, if it is installed. "compiled" is a step that torch.compile has made one
program of, with the operator in it, less the same without.

With --yielding so many other processes look for work all the time and yield their core each time,
as vLLM's engine core does beside its workers. With --bind each rank stays on one core.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
from two_backends import TwoBackends

import unisono

PIECES, WIDTH = 64, 512
SIZES = (8 << 10, 16 << 10, 64 << 10)
NOTHING, NOTHING_COMPILED = "nothing", "nothing compiled"

Reduce = Callable[[Any], object]


def vllm_operator(world: TwoBackends, name: str) -> Reduce | None:
    """The all_reduce of vLLM's CPU workers, if it is here."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import torch

    importlib.import_module("vllm._C")
    threads = torch.get_num_threads()
    handle = torch.ops._C.init_shm_manager(name, world.size, world.rank, threads)
    world.comm.barrier()
    torch.ops._C.join_shm_manager(handle, name)
    world.comm.barrier()
    return lambda tensor: torch.ops._C.shm_allreduce(handle, tensor)


def ways_of(world: TwoBackends, folder: str, deepspeed_in: str) -> dict[str, Reduce]:
    """Each variant of adding up the ranks' results, in place."""
    import torch
    import torch.distributed as dist

    importlib.import_module("unisono.operators")  # on each rank
    ways: dict[str, Reduce] = {NOTHING: lambda tensor: None}
    for name, group in world.groups.items():
        ways[name] = lambda tensor, group=group: dist.all_reduce(tensor, group=group)
    ways["comm"] = world.comm.all_reduce
    ways["operator"] = lambda tensor: torch.ops.unisono.all_reduce_(tensor, world.comm.name)
    if deepspeed_in:
        deepspeed.load(deepspeed_in, world.comm, Path(folder).name)
        ways["deepspeed"] = torch.ops.deepspeed.inference_all_reduce_
    operator = vllm_operator(world, Path(folder).name)
    if operator is not None:
        ways["vllm"] = operator
    return ways


def make_step(reduce: Reduce, size_bytes: int, late_s: float, world: TwoBackends) -> Reduce:
    """One step of this variant."""
    import torch

    x, weight = torch.ones(size_bytes // 4 // WIDTH, WIDTH), torch.eye(WIDTH)

    def step(_: Any = None) -> None:
        for piece in range(PIECES):
            y = x @ weight
            if late_s and piece % world.size == world.rank:
                end = time.perf_counter() + late_s
                while time.perf_counter() < end:
                    pass
            reduce(y)

    return step


def make_compiled_step(size_bytes: int, world: TwoBackends, reduces: bool) -> Reduce:
    """The same as one compiled program."""
    import torch

    x, weight, group = (
        torch.ones(size_bytes // 4 // WIDTH, WIDTH),
        torch.eye(WIDTH),
        world.comm.name,
    )

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(PIECES):
            x = x @ weight
            if reduces:
                torch.ops.unisono.all_reduce_(x, group, "avg")
        return x

    compiled = torch.compile(program, fullgraph=True)
    return lambda _: compiled(x, weight)


def measure(
    folder: str,
    sizes: Sequence[int],
    late_us: Sequence[int],
    turns: int,
    deepspeed_in: str,
    binds: bool,
) -> list[dict[str, Any]]:
    """On each rank: everything in turn. Rank 0 returns the result for all."""
    import torch

    torch.set_grad_enabled(False)
    world = TwoBackends(folder)
    if binds:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    ways = ways_of(world, folder, deepspeed_in)
    order, rows = random.Random(5), []  # the same on all ranks
    for size_bytes in sizes:
        for late in late_us:
            steps = {
                name: make_step(way, size_bytes, late / 1e6, world) for name, way in ways.items()
            }
            if not late:  # nothing in a compiled program can be late
                for name, reduces in ((NOTHING_COMPILED, False), ("compiled", True)):
                    steps[name] = make_compiled_step(size_bytes, world, reduces)
            taken: dict[str, list[float]] = {name: [] for name in steps}
            cpu: dict[str, list[float]] = {name: [] for name in steps}
            for turn in range(-1, turns):  # the first one does not count
                for name in order.sample(list(steps), len(steps)):
                    world.comm.barrier()
                    began, began_cpu = time.perf_counter(), time.process_time()
                    steps[name](None)
                    took = world.slowest(time.perf_counter() - began)
                    used = world.mean(time.process_time() - began_cpu)
                    if turn >= 0:
                        taken[name].append(took)
                        cpu[name].append(used)
            medians = {name: statistics.median(each) for name, each in taken.items()}
            used_s = {name: statistics.median(each) for name, each in cpu.items()}
            rows.append(
                {
                    "bytes": size_bytes,
                    "late_us": late,
                    "us": added(medians),
                    "cpu_us": added(used_s),
                    "piece_us": 1e6 * medians[NOTHING] / PIECES,
                }
            )
    return rows


def added(medians_s: dict[str, float]) -> dict[str, float]:
    """What each variant adds to a piece, in microseconds."""
    return {
        name: 1e6 * (s - medians_s[NOTHING_COMPILED if name == "compiled" else NOTHING]) / PIECES
        for name, s in medians_s.items()
        if name not in (NOTHING, NOTHING_COMPILED)
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of all variants."""
    names = list(rows[0]["us"])
    heads = " ".join(f"{name + ' us':>12} {'CPU':>6}" for name in names)
    print(f"{'bytes':>7} {'late us':>8} {'piece us':>9} {heads}")
    for row in rows:
        pairs = [(row["us"].get(n, math.nan), row["cpu_us"].get(n, math.nan)) for n in names]
        cells = " ".join(f"{us:12.1f} {cpu_us:6.1f}" for us, cpu_us in pairs)
        print(f"{row['bytes']:7} {row['late_us']:8} {row['piece_us']:9.1f} {cells}")


def main() -> None:
    summary, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--late-us", type=int, nargs="+", default=(0, 300))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--deepspeed", action="store_true", help="also measure DeepSpeed's kernel")
    parser.add_argument("--yielding", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--bind", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    built = deepspeed.build() if options.deepspeed else ""
    yielding = [
        subprocess.Popen([sys.executable, "-c", "import os\nwhile True: os.sched_yield()"])
        for _ in range(options.yielding)
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = (
                *(folder, options.sizes, options.late_us, options.turns),
                *(built, options.bind),
            )
            rows = unisono.launch(measure, options.ranks, arguments, threads=1)[0]
        finally:  # DeepSpeed leaves its buffers behind
            for buffer in Path("/dev/shm").glob(f"deepspeed_*_unisono_{Path(folder).name}_*"):
                buffer.unlink()
            for process in yielding:
                process.kill()
                process.wait()
    print(f"{options.ranks} ranks, {os.cpu_count()} cores")
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
