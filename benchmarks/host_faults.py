"""Random faults over hosts: what every survivor raises, and how soon.

    sudo python benchmarks/host_faults.py                    200 faults, about 25 minutes
    sudo python benchmarks/host_faults.py --count 20 --seed 3 --kinds kill cut

Each time 2 to 4 ranks on 2 or 3 hosts (network namespaces; that needs root) run random collectives
and messages of up to 8 MB, and check every number. Then something happens to one rank or host:

    kill     a rank is killed
    stop     a rank is stopped; its call has a timeout of 4 s
    cut      a host loses its cable; the patience with a link is 4 s
    down     a host disappears with all of its ranks
    outage   a cable is out for up to 2.2 s, which must end nothing; then a rank is killed

A run passes if no number is wrong and every survivor raises PeerLost or CollectiveTimeout within
the limit of the table. Otherwise the command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1), (0, 1, 2), (0, 0, 1, 2))
STOPPED_S = 4.0
LIMIT_S = {"kill": 1.0, "stop": STOPPED_S + 3.0, "cut": 6.0, "down": 6.0, "outage": 1.0}
COUNTS = (1, 100, 5_000, 40_000, 300_000, 2_000_000)
READY_S = 90.0


# -- a rank -------------------------------------------------------------------------------------


def say(**words: object) -> None:
    """A line for the parent."""
    print(json.dumps(words), flush=True)


def be_a_rank(seed: int, timeout_s: float) -> None:
    """Collectives in an order that the seed decides, until one fails."""
    import torch.distributed as dist

    import unisono  # noqa: F401  registers the backend

    try:
        dist.init_process_group("unisono", timeout=timedelta(seconds=60))
        dist.group.WORLD.comm.timeout_s = timeout_s
        say(ready=os.getpid())
        chance = random.Random(seed)
        for step in range(1 << 30):
            name, count = chance.choice(list(CALLS)), chance.choice(COUNTS)
            root = chance.randrange(dist.get_world_size())
            if not CALLS[name](step, count, root):
                say(wrong=f"{name} of {count} elements in step {step}")
                os._exit(3)
    except Exception as error:
        say(error=type(error).__name__, text=str(error)[:300], at=time.monotonic())
        os._exit(0)


def _filled(count: int, number: int) -> Any:
    import torch

    return torch.full((count,), float(number))


def _is_all(tensor: Any, number: int) -> bool:
    return bool((tensor == number).all())


def _are_rows(tensor: Any, step: int) -> bool:
    rows = tensor.view(size(), -1)
    return all(_is_all(row, rank + step) for rank, row in enumerate(rows))


def rank() -> int:
    """Of this process."""
    return int(os.environ["RANK"])


def size() -> int:
    """How many ranks there are."""
    return int(os.environ["WORLD_SIZE"])


def _sum(step: int) -> int:
    return sum(other + step for other in range(size()))


def all_reduce(step: int, count: int, root: int) -> bool:
    """One of the calls, and whether its numbers are right; so are the others."""
    import torch.distributed as dist

    tensor = _filled(count, rank() + step)
    dist.all_reduce(tensor)
    return _is_all(tensor, _sum(step))


def works(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    tensors = [_filled(count // 4 + 1, rank() + step + i) for i in range(4)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    return all(_is_all(tensor, _sum(step + i)) for i, tensor in enumerate(tensors))


def broadcast(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    tensor = _filled(count, rank() + step)
    dist.broadcast(tensor, root)
    return _is_all(tensor, root + step)


def all_gather(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    gathered = [_filled(count, 0) for _ in range(size())]
    dist.all_gather(gathered, _filled(count, rank() + step))
    return all(_is_all(row, other + step) for other, row in enumerate(gathered))


def reduce_scatter(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    tensor = _filled(count, 0)
    dist.reduce_scatter(tensor, [_filled(count, rank() + step)] * size())
    return _is_all(tensor, _sum(step))


def all_to_all(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    tensor = _filled(count * size(), 0)
    dist.all_to_all_single(tensor, _filled(count * size(), rank() + step))
    return _are_rows(tensor, step)


def messages(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    before, after = (rank() - 1) % size(), (rank() + 1) % size()
    sent, tensor = dist.isend(_filled(count, rank() + step), after), _filled(count, 0)
    dist.recv(tensor, before)
    sent.wait()
    return _is_all(tensor, before + step)


def barrier(step: int, count: int, root: int) -> bool:
    import torch.distributed as dist

    dist.barrier()
    return True


CALLS: dict[str, Callable[[int, int, int], bool]] = {
    call.__name__: call
    for call in (
        all_reduce,
        works,
        broadcast,
        all_gather,
        reduce_scatter,
        all_to_all,
        messages,
        barrier,
    )
}


# -- one fault ----------------------------------------------------------------------------------


@dataclass
class Rank:
    """A process on a host, and its messages."""

    host: Any
    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        """Keep its messages until it ends."""
        for line in self.process.stdout or ():
            words = json.loads(line) if line.startswith("{") else {"text": line.strip()}
            self.said.append(words)

    def has(self, key: str) -> Any:
        """Its message under this key; None if there is none yet."""
        return next((words[key] for words in self.said if key in words), None)

    def is_done(self) -> bool:
        """It has failed, or has seen a wrong number."""
        return self.has("error") is not None or self.has("wrong") is not None


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def start(host: Any, rank: int, size: int, master: str, seed: int, timeout_s: float) -> Rank:
    """Start a rank on its host."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": master,
        "MASTER_PORT": "29400",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = ["env", *(f"{key}={value}" for key, value in environment.items()), sys.executable]
    command += [str(Path(__file__).resolve()), "--be", str(seed), str(timeout_s)]
    process = subprocess.Popen(
        host.command(*command, folder=Path.cwd()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started = Rank(host, process)
    threading.Thread(target=started.listen, daemon=True).start()
    return started


def strike(kind: str, ranks: list[Rank], victim: int) -> set[int]:
    """Cause the fault; returns the ranks that cannot report it."""
    host, pid = ranks[victim].host, ranks[victim].has("ready")
    if kind == "cut":
        host.cut()
        return set()
    if kind == "down":
        host.kill()
        return {number for number, rank in enumerate(ranks) if rank.host is host}
    host.send_signal(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    return {victim}


def outage(host: Any, seconds: float) -> None:
    """A cable is out for a while."""
    host.cut()
    time.sleep(seconds)
    host.mend()
    time.sleep(1.0)


def try_one(kind: str, seed: int) -> tuple[float, list[str]]:
    """How long the slowest survivor took, and what was wrong."""
    from namespaces import Link, network

    chance = random.Random(seed)
    placement = chance.choice(PLACEMENTS)
    victim = chance.randrange(len(placement))
    timeout_s = STOPPED_S if kind == "stop" else 30.0
    with network(max(placement) + 1, Link(chance.choice((0, 10**9)))) as made:
        master = made.hosts[0].ipv4
        ranks = [
            start(made.hosts[host], rank, len(placement), master, seed, timeout_s)
            for rank, host in enumerate(placement)
        ]
        try:
            if not wait_for(lambda: all(rank.has("ready") for rank in ranks), READY_S):
                return 0.0, [f"not ready: {[rank.said[-1:] for rank in ranks]}"]
            time.sleep(chance.uniform(0.05, 1.2))
            if kind == "outage":
                outage(ranks[victim].host, chance.uniform(0.3, 2.2))
            if any(rank.is_done() for rank in ranks):
                return 0.0, [f"ended early: {[rank.said[-1:] for rank in ranks]}"]
            began = time.monotonic()
            gone = strike(kind, ranks, victim)
            left = [rank for number, rank in enumerate(ranks) if number not in gone]
            wait_for(lambda: all(rank.is_done() for rank in left), LIMIT_S[kind] + 8.0)
            return judge(kind, placement, left, began)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()


def judge(
    kind: str, placement: tuple[int, ...], left: list[Rank], began: float
) -> tuple[float, list[str]]:
    """Compare what the survivors raised with what they should have."""
    slowest, wrong = 0.0, []
    for rank in left:
        error, took_s = rank.has("error"), (rank.has("at") or began) - began
        slowest = max(slowest, took_s)
        if not rank.is_done():
            wrong.append("a survivor is silent")
        elif rank.has("wrong"):
            wrong.append(f"a wrong number: {rank.has('wrong')}")
        elif error not in ("PeerLost", "CollectiveTimeout"):
            wrong.append(f"{error}: {rank.said[-1]['text']}")
        elif took_s > LIMIT_S[kind]:
            wrong.append(f"a survivor took {took_s:.2f} s")
    return slowest, [f"{placement}: {problem}" for problem in wrong]


def main() -> None:
    """Read the command line, and run the faults."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=LIMIT_S, default=list(LIMIT_S))
    parser.add_argument("--be", nargs=2, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be_a_rank(int(options.be[0]), options.be[1])
        return
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "hosts"))
    from namespaces import why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    times: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    bad = 0
    for number in range(options.count):
        kind = options.kinds[number % len(options.kinds)]
        took_s, wrong = try_one(kind, options.seed * 100_000 + number)
        times[kind].append(took_s)
        bad += bool(wrong)
        for problem in wrong:
            print(f"{number} {kind} {problem}", flush=True)
        if number % 10 == 9:
            print(f"{number + 1} of {options.count}, {bad} bad", flush=True)
    print("| fault | times | median | slowest | limit |\n|---|---|---|---|---|")
    for kind, took in times.items():
        if took:
            middle, most = 1000 * statistics.median(took), 1000 * max(took)
            limit = 1000 * LIMIT_S[kind]
            print(f"| {kind} | {len(took)} | {middle:.0f} ms | {most:.0f} ms | {limit:.0f} ms |")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
