"""What a group over many hosts costs: its start, its memory, a small call and that call's packets.

    sudo python benchmarks/many_hosts.py                       8, 16 and 32 hosts of one rank
    sudo python benchmarks/many_hosts.py --hosts 48 --turns 1 --json many.json

Hosts are network namespaces of this machine, with cables of 1 Gbit/s; unisono and gloo take turns.
Ranks wait at a gate after their imports. `start` is from there to the end of the last rank's first
all_reduce; `cpu` and `memory` (the growth of Private_Dirty) are a rank's until then, `later memory`
its growth after calls of 4 MB (without the tensor). An all_reduce is the median of five loops, on
the slowest rank. `packets` is how many a host's interface sends for one of 8 B. Over ranks or hosts
medians are taken, and then over turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

BACKENDS = ("unisono", "gloo")
LOOPS = 5
GATE_S, RANK_S = 300.0, 300.0


def main() -> None:
    summary, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--calls", type=int, default=40, help="of a loop")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_a_rank(options.rank_of, options.folder, options.calls)
        return
    rows = [
        {"hosts": hosts, "turn": turn, "backend": backend, **measure(hosts, backend, options.calls)}
        for hosts in options.hosts
        for turn in range(options.turns)
        for backend in BACKENDS[:: -1 if turn % 2 else 1]
    ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    names = list(rows[0])[3:]
    print(f"\n| hosts | | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
    for hosts in options.hosts:
        for backend in BACKENDS:
            same = [row for row in rows if (row["hosts"], row["backend"]) == (hosts, backend)]
            cells = [f"{statistics.median(row[name] for row in same):.4g}" for name in names]
            print(f"| {hosts} | {backend} | {' | '.join(cells)} |")


def measure(hosts: int, backend: str, calls: int) -> dict[str, float]:
    """Make the hosts and one job on them."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    from namespaces import Link, network, start_ranks, why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    with tempfile.TemporaryDirectory() as name, network(hosts, Link(10**9)) as made:
        folder = Path(name)
        command = [sys.executable, __file__, "--rank-of", backend, "--folder", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = start_ranks(
            made.hosts, range(hosts), [*command, "--calls", str(calls)], folder, environment
        )
        late = time.monotonic() + GATE_S
        while len(list(folder.glob("ready*"))) < hosts:
            ended = [rank for rank in ranks if rank.process.poll() is not None]
            if ended or time.monotonic() > late:
                sys.exit("".join(rank.text() for rank in ended) or "ranks do not get ready")
            time.sleep(0.1)
        (folder / "gate").touch()
        for rank in ranks:
            if rank.wait(RANK_S, ranks):
                sys.exit(f"{rank.output.name} failed:\n{rank.text()}")
        told = [json.loads((folder / f"told{rank}").read_text()) for rank in range(hosts)]
    began = max(rank.pop("began") for rank in told)
    first = {"start s": max(rank.pop("ended") for rank in told) - began}
    return first | {key: statistics.median(rank[key] for rank in told) for key in told[0]}


def be_a_rank(backend: str, folder: Path, calls: int) -> None:
    import torch
    import torch.distributed as dist

    import unisono.torch_backend  # noqa: F401

    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    at_first = private_dirty_mb()
    (folder / f"ready{rank}").touch()
    while not (folder / "gate").exists():
        time.sleep(0.005)
    began, cpu = time.monotonic(), time.process_time()
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(2))
    told = {
        "began": began,
        "ended": time.monotonic(),
        "cpu ms": 1e3 * (time.process_time() - cpu),
        "memory MB": private_dirty_mb() - at_first,
    }
    packets = -packets_sent()
    told["8 B ms"] = time_calls(torch.ones(2), calls)
    packets += packets_sent()
    told["1 KiB ms"] = time_calls(torch.ones(256), calls)
    told["packets"] = packets / ((LOOPS + 1) * (calls + 1))
    large = torch.ones(10**6)
    for _ in range(3):
        dist.all_reduce(large)
    told["later memory MB"] = private_dirty_mb() - at_first - 4e6 / 2**20
    (folder / f"told{rank}").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def time_calls(tensor, calls: int) -> float:
    """Milliseconds of one call. Every loop ends with one call more: the slowest rank's time."""
    import torch
    import torch.distributed as dist

    found = []
    for loop in range(-1, LOOPS):
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor.fill_(1.0))
        passed = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(passed, dist.ReduceOp.MAX)
        if loop >= 0:
            found.append(1e3 * float(passed) / calls)
    return statistics.median(found)


def packets_sent() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[9])
    raise AssertionError("no eth0")


def private_dirty_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Private_Dirty")


if __name__ == "__main__":
    main()
