"""How long a weight update takes, and what memory it needs.

    python benchmarks/weights.py                    2 GB in 400 tensors; needs 12 GB of memory
    python benchmarks/weights.py --bytes 200MB --turns 3
    sudo python benchmarks/weights.py --hosts       what has changed, between hosts at 1 Gbit/s

One sender, one receiver, in the same processes and in turns: a transactional update without and
with checksums, an update in place, the same tensors one by one through
torch.distributed.broadcast on gloo, and, on the sender while the receiver waits, two copies of all
of them in memory. Medians over turns; the first update, which allocates its second copy, is shown
separately. Then four senders hold a quarter of the model each, and two workers a half, which they
receive by a LoadPlan: the most memory that each rank had above what it had before it created its
weights, in its own shards. Pages of files are apart: they are torch's code, once for all processes,
which a rank that has loaded a model has anyway. --memory measures this alone.

With --hosts, which are network namespaces, one engine, then an engine of two ranks, gets
everything, and then what has changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import unisono

TENSORS = 400
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    """ "2GB" -> 2000000000."""
    unit = text.strip()[-2:].upper()
    return int(float(text.strip()[:-2]) * UNITS[unit]) if unit in UNITS else int(text)


def measure(nbytes: int, turns: int) -> dict[str, Any]:
    """Seconds of every variant, on one of two ranks."""
    import torch
    import torch.distributed as dist

    from unisono.training import WeightReceiver, WeightSender

    torch.set_num_threads(1)
    comm = unisono.init()
    gloo = dist.new_group(backend="gloo")
    count = nbytes // 4 // TENSORS
    mine = {f"layer.{i}": torch.full((count,), float(comm.rank)) for i in range(TENSORS)}
    copies = [torch.ones(count) for _ in range(TENSORS)] if comm.rank == 0 else []

    def party(**options: bool) -> Any:
        return WeightReceiver(comm, mine) if comm.rank else WeightSender(comm, mine, **options)

    few = {f"norm.{i}": torch.zeros(16) for i in range(TENSORS)}
    small = WeightReceiver(comm, few) if comm.rank else WeightSender(comm, few)
    quick, checked = party(checksum=False), party(checksum=True)
    in_place = party(checksum=False, transactional=False)

    def one_by_one() -> None:
        for tensor in mine.values():
            dist.broadcast(tensor, 0, group=gloo)

    def copy_twice() -> None:
        for _ in range(2):
            for to, tensor in zip(copies, mine.values(), strict=False):
                to.copy_(tensor)

    ways: dict[str, Callable[[], Any]] = {
        "update": quick.update,
        "update, checksums": checked.update,
        "update, into place": in_place.update,
        "gloo, one by one": one_by_one,
        "two copies in memory": copy_twice,
        "400 small tensors": small.update,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        for name, way in ways.items():
            gc.collect()
            comm.barrier()
            begin_s = time.perf_counter()
            way()
            comm.barrier()
            times[name].append(time.perf_counter() - begin_s)
    assert all(bool(tensor.eq(0).all()) for tensor in mine.values()), "the receiver has the weights"
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return medians | {"first update": times["update"][0]}


WORKERS = 2
BUCKET_BYTES = 32 << 20


def measure_memory(nbytes: int) -> tuple[float, float]:
    """The most memory that this one of four senders and two workers had, and pages of files, in its
    shards."""
    import torch

    from unisono.training import LoadPlan, WeightReceiver, WeightSender, WeightShard

    torch.set_num_threads(1)
    comm = unisono.init()
    senders = comm.size - WORKERS
    rows = 4 * senders
    columns = nbytes // 4 // TENSORS // rows
    names = [f"layer.{i}" for i in range(TENSORS)]
    comm.barrier()
    before, files_before = _most_memory_since(), int(_status("RssFile"))
    if comm.rank < senders:
        part = (rows // senders, columns)
        offset = (comm.rank * part[0], 0)
        weights: dict[str, Any] = {
            name: WeightShard(torch.ones(part), (rows, columns), offset) for name in names
        }
        WeightSender(comm, weights).update()
    else:
        worker, part = comm.rank - senders, (rows // WORKERS, columns)
        served = {name: torch.zeros(part) for name in names}

        def load(pairs: Any) -> None:
            for name, tensor in pairs:
                served[name].copy_(tensor.chunk(WORKERS)[worker])

        checkpoint = {name: torch.empty(rows, columns, device="meta") for name in names}
        WeightReceiver(comm, LoadPlan(load, checkpoint)).update()
        assert all(bool(tensor.eq(1).all()) for tensor in served.values())
    most, files = int(_status("VmHWM")) - before, int(_status("RssFile")) - files_before
    comm.barrier()
    shard = part[0] * columns * 4 * TENSORS / 1024
    return (most - files) / shard, files / shard


# -- hosts -----------------------------------------------------------------------------------------

ON_HOSTS = "import weights, sys; weights.update_over_hosts(int(sys.argv[1]), int(sys.argv[2]))"


def update_over_hosts(nbytes: int, turns: int) -> None:
    """Rank 0 sends to the others, an engine split by rows: everything, then 1% each time."""
    import torch

    from unisono.training import WeightReceiver, WeightSender, WeightShard

    torch.set_num_threads(1)
    comm = unisono.init()
    parts, rows, columns = comm.size - 1, 16, nbytes // 2 // TENSORS // 16
    whole, part = (rows, columns), (rows // parts, columns)
    made = torch.Generator().manual_seed(0)
    if comm.rank == 0:
        full = {f"layer.{i}": torch.zeros(whole, dtype=torch.bfloat16) for i in range(TENSORS)}
        party: Any = WeightSender(comm, full)
    else:
        offset = ((comm.rank - 1) * part[0], 0)
        held = {
            f"layer.{i}": WeightShard(torch.zeros(part, dtype=torch.bfloat16), whole, offset)
            for i in range(TENSORS)
        }
        party = WeightReceiver(comm, held)
    for _ in range(turns + 1):
        total = 0.0
        if comm.rank == 0:
            for tensor in full.values():
                where = torch.randint(0, tensor.numel(), (tensor.numel() // 100,), generator=made)
                tensor.view(-1)[where] += 1
            total = sum(float(tensor.float().sum()) for tensor in full.values())
        comm.barrier()
        begin_s = time.perf_counter()
        update = party.update()
        comm.barrier()
        took_s = time.perf_counter() - begin_s
        if comm.rank:
            total = -sum(float(each.tensor.float().sum()) for each in held.values())
        left = torch.tensor(total, dtype=torch.float64)
        comm.all_reduce(left)
        assert left == 0, left
        if comm.rank == 0:
            how = "delta" if update.delta_bytes else "full"
            print(f"{how} {took_s:.3f} {update.delta_bytes} {update.snapshot_bytes}", flush=True)


def measure_hosts(nbytes: int, turns: int) -> dict[str, list[str]]:
    """What rank 0 prints, for an engine of one rank and of two."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hosts"))
    from namespaces import Link, network, start_ranks

    found = {}
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    command = [sys.executable, "-c", ON_HOSTS, str(nbytes), str(turns)]
    for engine in (1, 2):
        with (
            tempfile.TemporaryDirectory() as folder,
            network(2, Link(rate_bits_per_s=10**9)) as made,
        ):
            placement = (0, *[1] * engine)
            ranks = start_ranks(made.hosts, placement, command, Path(folder), environment)
            for rank in ranks:
                assert rank.wait(600) == 0, rank.text()
            found[f"an engine of {engine}"] = ranks[0].text().splitlines()
    return found


def _most_memory_since() -> int:
    """Start tracking the peak memory; returns the KiB used now."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(_status("VmRSS"))


def _status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def goals_of_times(seconds: dict[str, float], nbytes: int) -> list[tuple[str, bool]]:
    for name, took_s in seconds.items():
        print(f"{name:<24}{took_s:9.3f} s{nbytes / took_s / 1e9:9.2f} GB/s")
    faster = seconds["gloo, one by one"] / seconds["update"]
    small = seconds["400 small tensors"]
    floor = seconds["update"] / seconds["two copies in memory"]
    return [
        (f"{faster:.2f} times faster than one by one on gloo, at least 5", faster >= 5),
        (f"{2 * floor:.2f} times one copy in memory, at most 1.15", 2 * floor <= 1.15),
        (f"{1e3 * small:.2f} ms for 400 small tensors, at most 3", small <= 0.003),
    ]


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("2GB"), metavar="SIZE")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args(arguments)
    if options.hosts:
        for engine, lines in measure_hosts(options.bytes, options.turns).items():
            print("\n".join([engine, *(f"  {line}" for line in lines)]))
        return 0
    nbytes = options.bytes
    print(
        f"{nbytes / 1e9:g} GB in {TENSORS} tensors, {os.cpu_count()} cores ({platform.machine()})",
        flush=True,
    )
    seconds = {}
    goals: list[tuple[str, bool]] = []
    if not options.memory:
        ranks = unisono.launch(measure, 2, (nbytes, options.turns), threads=1)
        seconds = {name: max(seconds_of[name] for seconds_of in ranks) for name in ranks[0]}
        goals += goals_of_times(seconds, nbytes)
    peaks = unisono.launch(measure_memory, 4 + WORKERS, (nbytes,), threads=1)
    sender, worker = max(peaks[:4]), max(peaks[4:])
    buckets = 2 * BUCKET_BYTES / (nbytes / 4)
    goals += [
        (
            f"a sender of a quarter has at most {sender[0]:.2f} of it (and {sender[1]:.2f} in "
            f"pages of files), with {buckets:.2f} for buckets",
            sender[0] <= 1.1 + buckets,
        ),
        (
            f"a worker has {worker[0] - 1:.2f} of its half (and {worker[1]:.2f} in pages of files)"
            " beside what it serves, at most 1.15",
            worker[0] - 1 <= 1.15,
        ),
    ]
    for text, met in goals:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    if options.json:
        measured = {"bytes": nbytes, "seconds": seconds, "most_memory_shards": peaks}
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
