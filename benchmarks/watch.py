"""What the watch costs: a record of a call, and a call of another backend that is watched.

    python benchmarks/watch.py

A record is measured in C (`make latency` builds that). The watch's own work in a call is measured
in one process, where a call that returns at once replaces gloo: between processes, gloo's own time
would hide it. What a program sees is shown, too: 8 bytes all-reduced by two ranks on gloo, and on a
GPU by one rank on nccl, in turns in a watched group and in one that is not watched.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
import unisono.watch
from unisono.comm.engine import create_segment, open_group
from unisono.comm.rendezvous.membership import Member, Membership
from unisono.comm.shared_memory.group_parts import BACKEND_MARK
from unisono.comm.shared_memory.ledger import Ledger
from unisono.watch.equality import fingerprint, replicated
from unisono.watch.torch_group import WatchedProcessGroup

ROUNDS, CALLS = 30, 2000
TURNS, CALLS_A_TURN = 100, 50


def best_us(work: Callable[[], Any], calls: int = CALLS) -> float:
    """How long one call takes in the best of many rounds: others had to share their core."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return min(rounds)


def ledger_of_one() -> Ledger:
    """A ledger with one rank."""
    nonce = 1
    group = open_group(create_segment(1, 1, nonce), 0, 1, nonce, 60.0)
    membership = Membership("bench", 0, 1, group, (Member("0" * 32, 0),))
    return Ledger(membership, "bench", f"bench{BACKEND_MARK}gloo", 0)


def record_ns() -> str:
    """A record in C: what every native call pays."""
    root = Path(__file__).parents[1]
    subprocess.run(["make", "latency"], cwd=root, check=True, stdout=subprocess.DEVNULL)
    command = root / "build/native/native_latency"
    return subprocess.check_output([command, "records"], text=True).strip()


class Finished:
    """Instead of gloo: every call returns at once."""

    group_name = group_desc = "bench"
    _device_types = ()

    def __init__(self, work: Any) -> None:
        self._work = work

    def rank(self) -> int:
        return 0

    size = rank

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._work


def watched_us(ledger: Ledger, async_op: bool) -> float:
    """What the watch adds to one all_reduce of 8 bytes: its own work."""
    tensors = [torch.ones(2)]
    options = dist.AllreduceOptions()
    options.asyncOp = async_op
    gloo: Any = dist.group.WORLD
    work = gloo.allreduce(tensors, options)
    work.wait()
    plain = Finished(work)
    watched = WatchedProcessGroup(plain, ledger, [0], False, lambda group: None, lambda: None)

    def call_watched() -> None:
        work = watched.allreduce(tensors, options)
        if work is not None:
            work.wait()

    return best_us(call_watched) - best_us(lambda: plain.allreduce(tensors, options).wait())


def medians_us(groups: tuple[Any, Any], tensor: torch.Tensor) -> tuple[float, float]:
    """How long an all_reduce takes in each group, in turns."""
    took: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS):
        for which in (0, 1) if turn % 2 else (1, 0):
            if tensor.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS_A_TURN):
                dist.all_reduce(tensor, group=groups[which])
            took[which].append((time.perf_counter() - start) / CALLS_A_TURN * 1e6)
    return statistics.median(took[0]), statistics.median(took[1])


def as_seen(folder: str, device: str) -> tuple[float, float]:
    """One rank: what a program sees of the watch, before and after it starts."""
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    store = dist.FileStore(os.path.join(folder, device), size)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    plain: Any = dist.group.WORLD
    unisono.watch.start()
    watched = dist.new_group(list(range(size)))
    found = medians_us((plain, watched), torch.zeros(2, device=device))
    dist.destroy_process_group()
    return found


def check_ms() -> tuple[float, float, int]:
    """A training step of a small transformer on one core, and a check of its numbers: fingerprints
    of parameters, buffers and the state of Adam."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(8, 64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    step()
    tensors = replicated(model, (), [optimizer])[0]

    def check() -> None:
        torch.stack([fingerprint(tensor) for tensor in tensors.values()]).tolist()

    took = []
    for work in (step, check):
        rounds = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            rounds.append((time.perf_counter() - start) * 1e3)
        took.append(min(rounds))
    return took[0], took[1], len(tensors)


def main() -> None:
    """Print the figures and their limits."""
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        ledger = ledger_of_one()
        print(f"record of a call       {record_ns():>6} ns   (limit 100)")
        for async_op in (False, True):
            kind = "async" if async_op else "blocking"
            print(f"watched call, {kind:<8} {watched_us(ledger, async_op):6.2f} us   (limit 4)")
        dist.destroy_process_group()
    step_ms, took_ms, count = check_ms()
    share = took_ms / (100 * step_ms)
    print(f"check of {count} tensors   {took_ms:6.1f} ms, step {step_ms:.1f} ms:", end=" ")
    print(f"{share:.2%} of a step at every=100   (limit 1%)")
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = unisono.launch(as_seen, 2, (folder, "cpu"), threads=1)[0]
        print(f"gloo, two ranks, 8 B   {plain:6.1f} us, watched {watched:.1f} us")
        if torch.cuda.is_available():
            plain, watched = unisono.launch(as_seen, 1, (folder, "cuda"))[0]
            print(f"nccl, one rank, 8 B    {plain:6.1f} us, watched {watched:.1f} us")


if __name__ == "__main__":
    main()
