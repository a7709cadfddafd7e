"""Shared tensors against ordinary ones, gloo, Open MPI and the floor, in the same processes.

    python benchmarks/shared.py                    2 ranks, a minute or two
    python benchmarks/shared.py --ranks 8 --goals
    python benchmarks/shared.py --sizes 1M 64M --only all_reduce all_gather --json shared.json
    mpirun -n 2 python benchmarks/shared.py        with Open MPI too, where mpi4py is installed

The size is that of the whole: of the tensor, or of the wide side. staged is unisono on ordinary
tensors, shared the same call on tensors of `comm.empty`; the floor is the same copy, or the same
add, on all ranks at once. All variants take turns, in an order that is shuffled each time. A turn
takes as long as its slowest rank. Figures are medians in microseconds.

gradient step: forward and backward of 25 million parameters with GradientSync, and with DDP; the
floor is the step without any communication.
allocate: a shared tensor, created and dropped; the floor is torch.empty, filled once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from two_backends import TwoBackends

import unisono

CALLS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather in place",
    "all_to_all",
    "reduce_scatter",
    "read a peer",
)
OTHERS = ("allocate", "gradient step")
SIZES = ("4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
Way: TypeAlias = Callable[[], Any]
Row: TypeAlias = dict[str, Any]
WIDTH, LAYERS = 1250, 16


def bytes_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


class Rank(TwoBackends):
    """One rank, its memory of each kind, and what is measured on it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.mpi: Any = None
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            from mpi4py import MPI

            self.mpi = MPI

    def ways(self, call: str, size_bytes: int) -> dict[str, Way]:
        """The same call in each variant."""
        import torch
        import torch.distributed as dist

        count = size_bytes // 4 // self.size * self.size
        part = count // self.size
        mine = slice(self.rank * part, (self.rank + 1) * part)
        x, out, other = (torch.zeros(count) for _ in range(3))
        shared, shared_out = self.comm.zeros(count), self.comm.zeros(count)
        gloo = self.groups["gloo"]

        def ours(x: torch.Tensor, out: torch.Tensor) -> Way:
            comm = self.comm
            return {
                "all_reduce": lambda: comm.all_reduce(x),
                "broadcast": lambda: comm.broadcast(x),
                "all_gather": lambda: comm.all_gather(out, x[mine]),
                "all_gather in place": lambda: comm.all_gather(x, x[mine]),
                "all_to_all": lambda: comm.all_to_all(out, x),
                "reduce_scatter": lambda: comm.reduce_scatter(out[:part], x),
            }[call]

        if call == "read a peer":
            theirs = self.comm.get_peer_tensor(shared, self.comm.next)
            return {
                "floor": lambda: other.copy_(x),
                "own": lambda: other.copy_(shared),
                "shared": lambda: other.copy_(theirs),
            }
        adds = call in ("all_reduce", "reduce_scatter")
        moved = x[:part] if call in ("reduce_scatter", "all_gather in place") else x
        target = other[: len(moved)]
        found = {
            "staged": ours(x, out),
            "shared": ours(shared, shared_out),
            "floor": (lambda: target.add_(moved)) if adds else (lambda: target.copy_(moved)),
        }
        in_gloo: dict[str, Way] = {
            "all_reduce": lambda: dist.all_reduce(x, group=gloo),
            "broadcast": lambda: dist.broadcast(x, 0, group=gloo),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x[mine], group=gloo),
            "all_gather in place": lambda: dist.all_gather_into_tensor(x, x[mine], group=gloo),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=gloo),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out[:part], x, group=gloo),
        }
        found["gloo"] = in_gloo[call]
        if self.mpi is not None:
            world, here = self.mpi.COMM_WORLD, self.mpi.IN_PLACE
            a, b = x.numpy(), out.numpy()
            found["mpi"] = {
                "all_reduce": lambda: world.Allreduce(here, a),
                "broadcast": lambda: world.Bcast(a),
                "all_gather": lambda: world.Allgather(a[mine], b),
                "all_gather in place": lambda: world.Allgather(here, a),
                "all_to_all": lambda: world.Alltoall(a, b),
                "reduce_scatter": lambda: world.Reduce_scatter_block(a, b[:part]),
            }[call]
        return found

    def allocation_ways(self, size_bytes: int) -> dict[str, Way]:
        """Creating a tensor and touching its pages."""
        import torch

        return {
            "shared": lambda: self.comm.empty(size_bytes, torch.uint8),
            "floor": lambda: torch.empty(size_bytes, dtype=torch.uint8).fill_(0),
        }

    def step_ways(self) -> dict[str, Way]:
        """A step of training whose time is mostly communication."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from unisono.training import GradientSync, share_ddp_buckets

        inputs = torch.ones(1, WIDTH)

        def model_of() -> Any:
            torch.manual_seed(0)
            return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def step_of(model: Any, finish: Way = lambda: None) -> Way:
            def step() -> None:
                model(inputs).sum().backward()
                finish()
                for parameter in model.parameters():
                    parameter.grad = None

            return step

        models = [model_of() for _ in range(3)]
        group: Any = self.groups["unisono"]
        with mock.patch.object(
            type(self.comm), "zeros", lambda comm, shape, dtype: torch.zeros(shape, dtype=dtype)
        ):
            ordinary = GradientSync(models[0], group)
            staged = step_of(models[0], ordinary.finish)
            staged()  # buckets are created with the first gradients
            staged()
        found = {
            "staged": staged,
            "shared": step_of(models[1], GradientSync(models[1], group).finish),
            "floor": step_of(models[2]),
        }
        for name in ("unisono", "shared", "gloo"):
            wrapped = DistributedDataParallel(
                model_of(), process_group=self.groups["gloo" if name == "gloo" else "unisono"]
            )
            if name == "shared":
                share_ddp_buckets(wrapped)
            found["gloo" if name == "gloo" else f"DDP, {name}"] = step_of(wrapped)
        return found

    def measure(self, call: str, size: str, seconds: float) -> Row:
        """Each variant's median; every rank returns the same figures."""
        if call == "gradient step":
            ways = self.step_ways()
        elif call == "allocate":
            ways = self.allocation_ways(bytes_of(size))
        else:
            ways = self.ways(call, bytes_of(size))
        for way in ways.values():
            for _ in range(3):  # DDP creates its buckets again after the first step
                way()
        times_us: dict[str, list[float]] = {name: [] for name in ways}
        order, shuffler = list(ways), random.Random(1)
        turns = max(5, min(200, int(self.slowest(seconds / self._turn_s(ways)))))
        gc.disable()
        for _ in range(turns):
            shuffler.shuffle(order)
            for name in order:
                self.comm.barrier()
                begin_s = time.perf_counter()
                ways[name]()
                times_us[name].append(self.slowest(time.perf_counter() - begin_s) * 1e6)
        gc.enable()
        medians = {name: statistics.median(times) for name, times in times_us.items()}
        return {"call": call, "size": size, "turns": turns, "median_us": medians}

    def _turn_s(self, ways: dict[str, Way]) -> float:
        self.comm.barrier()
        begin_s = time.perf_counter()
        for way in ways.values():
            way()
        return time.perf_counter() - begin_s


def be_a_rank(folder: str, calls: Sequence[str], sizes: Sequence[str], seconds: float) -> list[Row]:
    rank = Rank(folder)
    rows = []
    for call in calls:
        own = {"gradient step": ["100M"], "allocate": ["64K", "64M"]}
        for size in own.get(call, sizes):
            rows.append(rank.measure(call, size, seconds))
            gc.collect()
    return rows


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """The goals of shared tensors, and what was measured."""
    for row in rows:
        call, size = row["call"], bytes_of(row["size"])
        times = row["median_us"]
        wanted = [("staged", 1.0)] if "staged" in times and call in CALLS else []
        if call in ("broadcast", "all_gather", "all_to_all") and size >= 1 << 20:
            wanted.append(("floor", 1.1))
        if call == "all_gather in place" and size >= 1 << 20:
            wanted.append(("staged", 1 / 1.5))
        if call == "all_reduce" and size >= 64 << 20:
            wanted.append(("floor", 0.9))
        if call == "read a peer":
            wanted.append(("own", 1.1))
        if call == "gradient step":
            wanted.append(("staged", 1 / 1.15))
        for other, most in wanted:
            ratio = times["shared"] / times[other]
            met = "met   " if ratio <= most else "MISSED"
            yield f"  {met} {call} {row['size']}: {ratio:.2f} of {other}, at most {most:.2f}"


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CALLS + OTHERS, default=CALLS + OTHERS)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help="4K, 1M, ...")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call and size")
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    options = parser.parse_args(arguments)
    told = (options.only, options.sizes, options.seconds)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        rows = be_a_rank(_folder_of_job(), *told)
        if os.environ["OMPI_COMM_WORLD_RANK"] != "0":
            return 0
    else:
        ranks = options.ranks
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            rows = unisono.launch(be_a_rank, ranks, (folder, *told), threads=1)[0]
    print(f"{ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), median us")
    for row in rows:
        figures = "  ".join(f"{name} {time:,.1f}" for name, time in row["median_us"].items())
        print(f"  {row['call']:20}{row['size']:>6}  {figures}")
    if options.goals:
        print("\n".join(["goals", *goals(rows)]))
    if options.json:
        facts = {"ranks": ranks, "cores": os.cpu_count(), "machine": platform.machine()}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0


def _folder_of_job() -> str:
    """A folder that all ranks of this mpirun know."""
    folder = Path(tempfile.gettempdir()) / f"unisono-bench-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    return str(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
