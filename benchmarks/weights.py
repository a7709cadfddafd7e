"""How long a weight update takes, and what memory it needs.

    python benchmarks/weights.py                    2 GB in 400 tensors; needs 12 GB of memory
    python benchmarks/weights.py --bytes 200MB --turns 3
    python benchmarks/weights.py --kills 100        a worker is killed in the middle of an update
    sudo python benchmarks/weights.py --hosts       what has changed, between hosts at 1 Gbit/s

One sender, one receiver, in the same processes and in turns: a transactional update without and
with checksums, an update in place, the same tensors one by one through
torch.distributed.broadcast on gloo, and, on the sender while the receiver waits, two copies of all
of them in memory. Medians over turns; the first update, which allocates its second copy, is shown
separately. Then four senders hold a quarter of the model each: the most memory that each rank had
above what it had before it created its weights, in models.

--kills runs a trainer and two workers on one host. A worker is killed while it receives, before the
vote or after it, and the others' exceptions are timed from there. With --hosts, which are network
namespaces, one engine, then an engine of two ranks, gets everything, and then what has changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import signal
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


def measure_memory(nbytes: int) -> float:
    """The most memory that this one of five ranks had, in models."""
    import torch

    from unisono.training import WeightReceiver, WeightSender, WeightShard

    torch.set_num_threads(1)
    comm = unisono.init()
    senders = comm.size - 1
    rows = 4 * senders
    columns = nbytes // 4 // TENSORS // rows
    comm.barrier()
    before = _most_memory_since()
    if comm.rank < senders:
        part = (rows // senders, columns)
        offset = (comm.rank * part[0], 0)
        weights: dict[str, Any] = {
            f"layer.{i}": WeightShard(torch.ones(part), (rows, columns), offset)
            for i in range(TENSORS)
        }
        WeightSender(comm, weights).update()
    else:
        weights = {f"layer.{i}": torch.zeros(rows, columns) for i in range(TENSORS)}
        WeightReceiver(comm, weights).update()
        assert all(bool(tensor.eq(1).all()) for tensor in weights.values())
    most = int(_status("VmHWM"))
    comm.barrier()
    return (most - before) * 1024 / (rows * columns * 4 * TENSORS)


# -- kills -----------------------------------------------------------------------------------------

KILLED_BYTES = 64 << 20


def be_killed_or_survive(number: int, rank: int, stage: float, pipe: Any) -> None:
    """One of three ranks. Rank 2 dies when this share of version 2 has arrived, or from 1 on in its
    `prepare`, or from 1.2 on in its `commit`; the others report it."""
    import torch

    from unisono import Communicator, WeightUpdateError
    from unisono.training import WeightReceiver, WeightSender

    torch.set_num_threads(1)
    comm = Communicator.join(f"kills-{os.getppid()}-{number}", rank, 3)
    weights = {f"layer.{i}": torch.ones(KILLED_BYTES // 160) for i in range(40)}

    def die() -> None:
        if engine.version == 1:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    def look(done: int, total: int) -> None:
        if done >= stage * total:
            die()

    def swap(new: dict[str, torch.Tensor]) -> None:
        if rank == 2 and stage > 1.2:
            die()
        weights.update(new)

    engine: Any
    if rank == 0:
        engine = WeightSender(comm, weights, bucket_bytes=1 << 20)
    else:
        prepare = (lambda new: die()) if rank == 2 and 1 < stage <= 1.2 else None
        progress = look if rank == 2 and stage <= 1 else None
        engine = WeightReceiver(comm, weights, prepare=prepare, commit=swap, progress=progress)
    engine.update()
    comm.barrier()
    if rank == 0:
        weights |= {name: tensor + 1 for name, tensor in weights.items()}
    try:
        engine.update()
        told_s, committed = time.monotonic(), True
    except WeightUpdateError as error:
        told_s, committed = time.monotonic(), error.committed
    held = {float(each) for tensor in weights.values() for each in (tensor.min(), tensor.max())}
    served = held if rank else {2.0 if committed else 1.0}
    pipe.send((told_s, committed, sorted(served)))


def measure_kills(count: int) -> list[float]:
    """For each kill the seconds until the last survivor had its exception."""
    import unisono.training  # noqa: F401  before the processes are forked

    made, chance, took = multiprocessing.get_context("fork"), random.Random(0), []
    for number in range(count):
        stage = chance.uniform(0, 1.4)
        ends = [made.Pipe() for _ in range(3)]
        ranks = [
            made.Process(target=be_killed_or_survive, args=(number, rank, stage, ends[rank][1]))
            for rank in range(3)
        ]
        for process in ranks:
            process.start()
        died_s = ends[2][0].recv()
        stories = [end.recv() for end, _ in ends[:2]]
        for process in ranks:
            process.join()
        served = {tuple(versions) for _, _, versions in stories}
        assert [len(versions) for versions in served] == [1], (stage, stories)
        took.append(max(told_s for told_s, _, _ in stories) - died_s)
    return took


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


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("2GB"), metavar="SIZE")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    parser.add_argument("--kills", type=int, default=0, metavar="COUNT")
    parser.add_argument("--hosts", action="store_true")
    options = parser.parse_args(arguments)
    if options.kills:
        took = sorted(measure_kills(options.kills))
        print(
            f"{options.kills} kills, all survivors of one version: exceptions after a median of "
            f"{1e3 * statistics.median(took):.1f} ms, at most {1e3 * took[-1]:.1f} ms"
        )
        return 0
    if options.hosts:
        for engine, lines in measure_hosts(options.bytes, options.turns).items():
            print("\n".join([engine, *(f"  {line}" for line in lines)]))
        return 0
    nbytes = options.bytes
    print(
        f"{nbytes / 1e9:g} GB in {TENSORS} tensors, {os.cpu_count()} cores ({platform.machine()})",
        flush=True,
    )
    ranks = unisono.launch(measure, 2, (nbytes, options.turns), threads=1)
    seconds = {name: max(seconds_of[name] for seconds_of in ranks) for name in ranks[0]}
    for name, took_s in seconds.items():
        print(f"{name:<24}{took_s:9.3f} s{nbytes / took_s / 1e9:9.2f} GB/s")
    faster = seconds["gloo, one by one"] / seconds["update"]
    small = seconds["400 small tensors"]
    floor = seconds["update"] / seconds["two copies in memory"]
    goals = [
        (f"{faster:.2f} times faster than one by one on gloo, at least 5", faster >= 5),
        (f"{2 * floor:.2f} times one copy in memory, at most 1.15", 2 * floor <= 1.15),
        (f"{1e3 * small:.2f} ms for 400 small tensors, at most 3", small <= 0.003),
    ]
    peaks = unisono.launch(measure_memory, 5, (nbytes,), threads=1)
    shown = ", ".join(f"{peak:.2f}" for peak in peaks[:-1])
    print(f"most memory of 4 sharded senders: {shown} models; of the receiver: {peaks[-1]:.2f}")
    goals.append(
        (f"a sender has at most {max(peaks[:-1]):.2f} of a model, less than 1", max(peaks[:-1]) < 1)
    )
    for text, met in goals:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    if options.json:
        measured = {"bytes": nbytes, "seconds": seconds, "most_memory_models": peaks}
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
