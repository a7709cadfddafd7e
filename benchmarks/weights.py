"""How long a weight update takes, and what memory it needs.

    python benchmarks/weights.py                    2 GB in 400 tensors; needs 12 GB of memory
    python benchmarks/weights.py --bytes 200MB --turns 3

One sender, one receiver, in the same processes and by turns: a transactional update without and
with checksums, an update straight into place, the same tensors one by one through
torch.distributed.broadcast on gloo, and, on the sender while the receiver waits, two copies of all
of them in memory. Medians over turns; the first update, which takes its second copy from the
system, is shown beside. Then four senders hold a quarter of the model each: the most memory that
each rank had above what it had before it made its weights, in models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
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
    """Seconds of every way, on one of two ranks."""
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


def _most_memory_since() -> int:
    """Begin to look for the most memory; KiB that there are now."""
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="save everything measured")
    options = parser.parse_args(arguments)
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
    floor = seconds["update"] / seconds["two copies in memory"]
    goals = [
        (f"{faster:.2f} times faster than one by one on gloo, at least 5", faster >= 5),
        (f"{floor:.2f} times two copies in memory, at most 1.5", floor <= 1.5),
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
