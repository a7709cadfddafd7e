"""Small calls between emulated hosts by Communicator, without torch.distributed.

    sudo python benchmarks/hosts_by_communicator.py --ranks 1 --json ours.json
    sudo python benchmarks/hosts_mpi.py --ranks 1 --sizes 8 1024 4096 --against ours.json

The hosts are those of benchmarks/hosts.py, and so are the calls and their roots. No other backend
runs in these processes. A figure is the median of 15 loops of 200 calls, on the slowest rank; with
--repeats, which starts new processes, the median of those. The file of --json is what hosts_mpi.py
compares Open MPI with.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hosts import BARRIER, KIB, PING_PONG, SIZES, Setting, parser_of

LOOPS, CALLS_OF_A_LOOP = 15, 200
SMALL = [8, KIB, 4 * KIB]
Row = tuple[str, int, float]
"""A call, its bytes, and microseconds."""


def main() -> None:
    options = parser_of(__doc__).parse_args()
    sizes = SMALL if options.sizes == list(SIZES) else options.sizes
    setting = Setting(
        hosts=options.hosts,
        ranks=options.ranks,
        placement=options.placement,
        rate_bits_per_s=int(options.rate * 1e9),
        sizes=tuple(sizes),
        collectives=tuple(options.collectives),
    )
    repeats = [measure(setting) for _ in range(options.repeats)]
    rows = [
        (what, size, statistics.median(us for _, _, us in same))
        for same in zip(*repeats, strict=True)
        for what, size, _ in same[:1]
    ]
    print("\n| | bytes | us |\n|---|---|---|")
    for what, size, us in rows:
        print(f"| {what} | {size:,} | {us:.1f} |")
    if options.json:
        figures = [
            {"what": what, "size_bytes": size, "milliseconds": {"unisono": us / 1000}}
            for what, size, us in rows
        ]
        data = {"setting": asdict(setting), "figures": figures}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


def measure(setting: Setting) -> list[Row]:
    """Make the hosts, run the ranks, and return what rank 0 has measured."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    from namespaces import Link, network, start_ranks, why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    with (
        tempfile.TemporaryDirectory() as folder,
        network(len(setting.counts), Link(setting.rate_bits_per_s)) as made,
    ):
        results = Path(folder) / "rows"
        told = json.dumps(asdict(setting) | {"results": str(results)})
        command = [sys.executable, __file__, "--setting", told]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = start_ranks(made.hosts, setting.placed(), command, Path(folder), environment)
        for rank in ranks:
            if rank.wait(600.0):
                sys.exit(f"{rank.output.name} on {rank.host.name} failed:\n{rank.text()}")
        return [(what, size, us) for what, size, us in json.loads(results.read_text())]


def be_a_rank(setting: Setting, results: Path) -> None:
    import torch

    import unisono

    torch.set_num_threads(1)
    comm = unisono.init("unisono")
    rows: list[Row] = []
    for what in setting.collectives:
        for size in setting.sizes_of(what):
            us = time_calls(comm, make_call(comm, what, size, setting.mate))
            rows.append((what, size, us))
    if comm.rank == 0:
        results.write_text(json.dumps(rows))
    unisono.shutdown()


def time_calls(comm, call: Callable[[], object]) -> float:
    """Microseconds per call on the slowest rank: the median of the loops."""
    import torch

    seconds = torch.zeros(LOOPS, dtype=torch.float64)
    for loop in range(-2, LOOPS):
        comm.barrier()
        began = time.perf_counter()
        for _ in range(CALLS_OF_A_LOOP):
            call()
        if loop >= 0:
            seconds[loop] = (time.perf_counter() - began) / CALLS_OF_A_LOOP
    comm.all_reduce(seconds, "max")
    return 1e6 * float(seconds.median())


def make_call(comm, what: str, size_bytes: int, mate: int) -> Callable[[], object]:
    """One collective, or a message there and one back."""
    import torch

    part = torch.zeros(max(1, size_bytes // 4 // comm.size))
    whole, other = torch.zeros(2, part.numel() * comm.size)
    exact = torch.zeros(size_bytes // 4)
    roots = itertools.cycle((0, mate))

    def play() -> None:
        if comm.rank == 0:
            comm.send(exact, mate)
            comm.recv(exact, mate)
        elif comm.rank == mate:
            comm.recv(exact, 0)
            comm.send(exact, 0)

    def gather() -> None:
        root = next(roots)
        comm.gather(whole if comm.rank == root else None, part, root)

    def scatter() -> None:
        root = next(roots)
        comm.scatter(part, whole if comm.rank == root else None, root)

    return {
        "all_reduce": lambda: comm.all_reduce(exact),
        "broadcast": lambda: comm.broadcast(exact, next(roots)),
        "all_gather": lambda: comm.all_gather(whole, part),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
        "all_to_all": lambda: comm.all_to_all(other, whole),
        "reduce": lambda: comm.reduce(exact, next(roots)),
        "gather": gather,
        "scatter": scatter,
        PING_PONG: play,
        BARRIER: comm.barrier,
    }[what]


if __name__ == "__main__":
    if "--setting" in sys.argv:
        told = json.loads(sys.argv[sys.argv.index("--setting") + 1])
        path = Path(told.pop("results"))
        for key in ("sizes", "collectives", "backends"):
            told[key] = tuple(told[key])
        be_a_rank(Setting(**told), path)
    else:
        main()
