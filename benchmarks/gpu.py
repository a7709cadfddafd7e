"""Ranks that share one GPU: how long calls on CUDA tensors take, compared with gloo's.

    python benchmarks/gpu.py [--what all_reduce weights ddp] [--ranks 2 4 8] [--quick]

Prints a table for each number of ranks; docs/cuda.md has one. Times are per call, of many calls in
a row with one wait for the GPU at the end: the median of several such series, on the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import unisono
from unisono.training import WeightReceiver, WeightSender

KIB = 1 << 10
SIZES = (4, *(n * KIB for n in (4, 64, 128, 256, 512, 1024, 4096, 16_384, 262_144)))
GLOO_UP_TO = 256 << 20
WAYS_OF_WEIGHTS = (
    # transactional, checksum, alias
    ("into place", False, False, False),
    ("into place, with checksums", False, True, False),
    ("a second copy", True, False, False),
    ("a second copy, with checksums", True, True, False),
    ("the trainer's memory (alias)", True, False, True),
)


def time_calls(call: Callable[[], object], repeats: int, rows: int = 5) -> float:
    """Microseconds per call, on the slowest rank."""
    comm = unisono.get_world()
    for _ in range(min(repeats, 3)):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(rows):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / repeats * 1e6)
    mine = torch.tensor([statistics.median(found)])
    comm.all_reduce(mine, "max")
    return mine.item()


def measure_all_reduce(quick: bool) -> list[tuple[int, float, float]]:
    """(bytes, ours, gloo's) for each size."""
    comm = unisono.init("unisono", with_torch=True)
    gloo = dist.new_group(backend="gloo")
    tensors = {size: torch.zeros(size // 4, device="cuda") for size in SIZES}
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(6):  # by turns: a GPU's clock changes while it works
        for size, tensor in sorted(tensors.items(), reverse=bool(turn % 2)):
            repeats = 50 if size <= 16 << 20 else 10
            call = partial(comm.all_reduce, tensor)
            found[size].append(time_calls(call, repeats, rows=3))
    table = []
    for size, tensor in tensors.items():
        theirs = float("nan")
        if size <= GLOO_UP_TO and not (quick and size > 1 << 20):
            few = 5 if size <= 1 << 20 else 1
            theirs = time_calls(partial(dist.all_reduce, tensor, group=gloo), few, rows=3)
        table.append((size, statistics.median(found[size]), theirs))
    return table


def leave_gradients(state, bucket):  # DDP does not accept annotations as strings
    """A hook of DDP that communicates nothing."""
    done = torch.futures.Future(devices=["cuda:0"])
    done.set_result(bucket.buffer())
    return done


def measure_ddp(group_backend: str) -> float:
    """Milliseconds of a step of a transformer of 100 million parameters, batch 1."""
    comm = unisono.init("unisono", with_torch=True)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, 8).cuda()
    group = dist.new_group(backend="gloo") if group_backend == "gloo" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0], process_group=group)
    if group_backend == "nothing":
        wrapped.register_comm_hook(None, leave_gradients)
    model = wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(1, 128, 1024, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    assert comm.size > 1
    return time_calls(step, 3 if group_backend == "gloo" else 10, rows=3) / 1e3


def measure_weights(
    gigabytes: float, transactional: bool, checksum: bool, alias: bool
) -> tuple[float, float]:
    """Milliseconds of the first update and of later ones, trainer to engine."""
    comm = unisono.init("unisono", with_torch=True)
    count = max(1, round(gigabytes * 1e9 / (64 << 20)))
    weights = {
        f"layer{index}": torch.full((32 << 20,), float(comm.rank), device="cuda").bfloat16()
        for index in range(count)
    }
    if comm.rank == 0:
        end = WeightSender(comm, weights, transactional=transactional, checksum=checksum)
    else:
        end = WeightReceiver(comm, weights, alias=alias)
    torch.cuda.synchronize()
    found = []
    for _ in range(20 if alias else 8):
        comm.barrier()
        begin = time.perf_counter()
        end.update()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    assert all(tensor[-1].item() == 0 for tensor in weights.values())
    return found[0], statistics.median(found[2:])


def show_all_reduce(ranks: int, quick: bool) -> None:
    print(f"\n{ranks} ranks share {torch.cuda.get_device_name()}: all_reduce, us per call")
    print(f"{'bytes':>12} {'unisono':>10} {'gloo':>12} {'faster':>8}")
    for size, ours, theirs in unisono.launch(measure_all_reduce, ranks, [quick])[0]:
        print(f"{size:>12} {ours:>10.0f} {theirs:>12.0f} {theirs / ours:>8.1f}", flush=True)


def show_weights(gigabytes: float) -> None:
    print(f"\n{gigabytes:g} GB of weights, trainer to engine, ms: the first time, later")
    for how, *options in WAYS_OF_WEIGHTS:
        first, later = unisono.launch(measure_weights, 2, [gigabytes, *options])[1]
        print(f"{how:>32} {first:>10.1f} {later:>10.1f}", flush=True)


def show_ddp() -> None:
    print("\nDDP step of a transformer of 100 million parameters, batch 1, 4 ranks, ms")
    for backend in ("nothing", "unisono", "gloo"):
        print(f"{backend:>12} {unisono.launch(measure_ddp, 4, [backend])[0]:>10.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ("all_reduce", "weights", "ddp")
    parser.add_argument("--what", nargs="+", choices=kinds, default=kinds, help="all of these")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="of all_reduce")
    parser.add_argument("--quick", action="store_true", help="gloo up to 1 MiB only")
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of weights")
    asked = parser.parse_args()
    if "all_reduce" in asked.what:
        for ranks in asked.ranks:
            show_all_reduce(ranks, asked.quick)
    if "weights" in asked.what:
        show_weights(asked.gigabytes)
    if "ddp" in asked.what:
        show_ddp()


if __name__ == "__main__":
    main()
