"""What the watch costs: a record of a call, a call of ours, a call of another backend, a DDP step.

    python benchmarks/watch.py

A record is measured in C (`make latency` builds that). The watch's own work in a call is measured
in one process, where a call that returns at once replaces gloo: between processes, gloo's own time
would hide it. What a program sees is shown, too: 8 bytes all-reduced by two ranks on gloo, and on a
GPU by one rank on nccl, in turns in a watched group and in one that is not watched. Our own calls,
of one rank and of two, and steps of DDP on gloo take turns with and without the watch; it counts
steps, so that every call keeps its line.
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
from unisono.comm.communicator import Communicator
from unisono.comm.engine import create_segment, native, open_group
from unisono.comm.meeting.membership import Member, Membership
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.shared_memory.group_parts import BACKEND_MARK
from unisono.comm.shared_memory.ledger import Ledger
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.watch.torch_group import WatchedProcessGroup

ROUNDS, CALLS = 30, 2000
TURNS, CALLS_A_TURN = 100, 50
OWN_TURNS, STEP_TURNS = 12, 20


def best_us(work: Callable[[], Any], calls: int = CALLS) -> float:
    """How long one call takes in the best of many rounds: others had to share their core."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return min(rounds)


def group_of_one() -> Membership:
    """A native group of one rank."""
    nonce = 1
    group = open_group(create_segment(1, 1, nonce), 0, 1, nonce, 60.0)
    return Membership("bench", 0, 1, group, (Member("0" * 32, 0),))


def ledger_of_one() -> Ledger:
    """A ledger with one rank."""
    return Ledger(group_of_one(), "bench", f"bench{BACKEND_MARK}gloo", 0)


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


def switch_watch(on: bool) -> None:
    """Start the watch, with steps counted, or stop it."""
    if on:
        unisono.watch.start()
        unisono.watch.step()
    else:
        unisono.watch.stop()
    native.keep_sites(on)


def own_us(comm: Communicator) -> list[tuple[str, float, float]]:
    """Our own blocking calls, without and with the watch: in a loop, and each in a function of its
    own, whose frame Python makes an object of for each look at its line."""
    tensor = torch.ones(2)

    def barriers() -> None:
        for _ in range(CALLS):
            comm.barrier()

    def all_reduces() -> None:
        for _ in range(CALLS):
            comm.all_reduce(tensor)

    def all_reduce() -> None:
        comm.all_reduce(tensor)

    def functions() -> None:
        for _ in range(CALLS):
            all_reduce()

    found = []
    for name, calls in (
        ("barrier", barriers),
        ("all_reduce", all_reduces),
        ("all_reduce in a def", functions),
    ):
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * OWN_TURNS):
            switch_watch(bool(turn % 2))
            for _ in range(5):
                comm.barrier()
                start = time.perf_counter()
                calls()
                took[bool(turn % 2)].append((time.perf_counter() - start) / CALLS * 1e6)
        switch_watch(False)
        found.append((name, min(took[False]), min(took[True])))
    return found


def own_of_one() -> list[tuple[str, float, float]]:
    """The calls of a rank that is alone, in shared memory."""
    server = RendezvousServer()
    comm = Communicator(SharedMemory(group_of_one(), server, "bench", (0,), 60.0))
    try:
        return own_us(comm)
    finally:
        comm.close()
        server.close()


def own_of_two() -> list[tuple[str, float, float]]:
    """One of two ranks."""
    with unisono.init() as comm:
        return own_us(comm)


def ddp_ms(folder: str) -> tuple[float, float]:
    """One of two ranks: a step of DDP on gloo without and with the watch."""
    rank, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])
    store = dist.FileStore(os.path.join(folder, "ddp"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    steps = []
    for on in (False, True):
        switch_watch(on)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2)
        ddp = torch.nn.parallel.DistributedDataParallel(
            model, process_group=dist.new_group(list(range(size)))
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
        batch = torch.randn(4, 64, 256)

        def step(ddp: Any = ddp, optimizer: Any = optimizer, batch: Any = batch) -> None:
            optimizer.zero_grad()
            ddp(batch).sum().backward()
            optimizer.step()

        for _ in range(3):  # buckets are made again after the first
            step()
        steps.append(step)
    took: tuple[list[float], list[float]] = ([], [])
    for turn in range(STEP_TURNS):
        for which in (0, 1) if turn % 2 else (1, 0):
            switch_watch(bool(which))
            steps[which]()  # while the watch starts
            for _ in range(4):
                start = time.perf_counter()
                steps[which]()
                took[which].append((time.perf_counter() - start) * 1e3)
    switch_watch(False)
    dist.destroy_process_group()
    return statistics.median(took[0]), statistics.median(took[1])


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
    for ranks, rows in ((1, own_of_one()), (2, unisono.launch(own_of_two, 2, threads=1)[0])):
        for name, plain, watched in rows:
            label = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
            print(f"{label:<29} {watched - plain:7.2f} us   (limit 0.2; {plain:.2f} without)")
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = unisono.launch(as_seen, 2, (folder, "cpu"), threads=1)[0]
        print(f"gloo, two ranks, 8 B   {plain:6.1f} us, watched {watched:.1f} us")
        plain, watched = unisono.launch(ddp_ms, 2, (folder,), threads=1)[0]
        print(f"DDP, two ranks, a step {plain:6.1f} ms, watched {watched:.1f} ms:", end=" ")
        print(f"{watched / plain - 1:.2%} more   (limit 1%)")
        if torch.cuda.is_available():
            plain, watched = unisono.launch(as_seen, 1, (folder, "cuda"))[0]
            print(f"nccl, one rank, 8 B    {plain:6.1f} us, watched {watched:.1f} us")


if __name__ == "__main__":
    main()
