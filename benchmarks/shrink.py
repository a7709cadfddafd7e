"""How soon survivors of a death recover: from the kill to their first correct all_reduce.

    python benchmarks/shrink.py                 2, 4 and 8 ranks, 20 times each
    python benchmarks/shrink.py --ranks 4 --times 100
    sudo python benchmarks/shrink.py --hosts    2 hosts x 2 ranks, which are network namespaces
    python benchmarks/shrink.py --soak 200      random kills at random moments, 4 ranks
    python benchmarks/shrink.py --soak 200 --hosts

The ranks run all_reduces, and one kills itself in between. The others recover in several ways, in
turn: with `shrink`; as programs do without it, by closing the group and joining again under a new
name; with gloo's `reconfigure` (torch 2.15). For the last two they are told at no cost who is left.
The figure is that of the last survivor, by CLOCK_MONOTONIC, which all share. A soak kills one or
two of the ranks at any moment, also while the others shrink or grow; a new process takes each
place.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect, connect_on_host
from unisono.comm.rendezvous.announcements import FileAnnouncements
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.errors import GroupError, PeerLost, RendezvousError

for _module in (
    *NEEDED_LATER,
    "unisono.comm.solo",
):  # imported before a death
    importlib.import_module(_module)

WAYS = ("shrink", "meet again")
ON_GLOO = "gloo reconfigure"
VICTIM = 2  # not rank 0, which hosts the store


@dataclass(frozen=True)
class Place:
    """Where the ranks of one death are; `hosts` is empty if they are on this one."""

    size: int
    folder: Path
    hosts: Sequence[Any]
    port: int

    @property
    def victim(self) -> int:
        return min(VICTIM, self.size - 1)

    def enter(self, rank: int) -> Any:
        """Move this rank to its host; a store for all of them."""
        import torch.distributed as dist

        address = self.hosts[0].ipv4 if self.hosts else "127.0.0.1"
        if self.hosts:
            self.hosts[rank * len(self.hosts) // self.size].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if self.hosts else "lo"
        return dist.TCPStore(address, self.port, None, rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]

    def meet(self, rank: int, size: int, name: str, store: Any) -> Communicator:
        if not self.hosts:
            return connect_on_host(FileAnnouncements(self.folder / name), rank, size, timeout_s=30)
        import torch.distributed as dist

        part = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        return connect(part, rank, size, timeout_s=30)

    def die(self) -> None:
        (self.folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def live(rank: int, place: Place, way: str) -> float:
    """Run one rank; returns when its first all_reduce after the death was right."""
    store = place.enter(rank) if place.hosts or way == ON_GLOO else None
    if way == ON_GLOO:
        return live_on_gloo(rank, place, store)
    comm = place.meet(rank, place.size, "meeting", store)
    ones = np.ones(1024, dtype=np.float32)
    fatal = random.randint(50, 400)
    try:
        for step in range(1 << 20):
            if rank == place.victim and step == fatal:
                place.die()
            comm.all_reduce(ones.copy())
    except PeerLost:
        if way == "shrink":
            left = comm.shrink()
        else:
            comm.close()
            left = place.meet(rank - (rank > place.victim), place.size - 1, "again", store)
    left.all_reduce(ones)
    done = time.monotonic()
    assert (ones == place.size - 1).all()
    left.barrier()
    return done


def live_on_gloo(rank: int, place: Place, store: Any) -> float:
    import torch
    import torch.distributed as dist

    def reconfigure(uuid: int, ranks: Sequence[int]) -> None:
        store.set(f"{uuid}/{rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
        handles = [store.get(f"{uuid}/{other}").decode() for other in ranks]
        dist._reconfigure(uuid, handles).wait()  # type: ignore[attr-defined]

    limit = timedelta(seconds=30)
    ranks = range(place.size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=place.size,
        timeout=limit,
        enable_reconfigure=True,
    )  # type: ignore[call-arg]
    reconfigure(1, ranks)
    ones = torch.ones(1024)
    fatal = random.randint(50, 400)
    try:
        for step in range(1 << 20):
            if rank == place.victim and step == fatal:
                place.die()
            dist.all_reduce(ones.clone())
    except RuntimeError:
        reconfigure(2, [other for other in ranks if other != place.victim])
    dist.all_reduce(ones)
    done = time.monotonic()
    assert ones.eq(place.size - 1).all()
    dist.barrier()
    return done


_ports = itertools.count(29500)


def measure(size: int, way: str, hosts: Sequence[Any]) -> float:
    """Milliseconds of one death."""
    with tempfile.TemporaryDirectory() as name:
        place = Place(size, Path(name), hosts, next(_ports))
        children = [start(live, rank, place, way) for rank in range(size)]
        done = [finish(*child) for child in children]
        killed = float((place.folder / "killed").read_text())
    return 1000 * (max(time for time in done if time) - killed)


def start(function: object, *args: object) -> tuple[int, int]:
    """A forked child that runs a function; its pid, and the pipe on which it reports."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
    try:
        os.write(writer, pickle.dumps(function(*args)))  # type: ignore[operator]
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def finish(child: int, reader: int) -> float:
    """What a child has reported; 0 if it was killed."""
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a rank failed with {os.WEXITSTATUS(status)}")
    return pickle.loads(told) if told else 0.0


# -- the soak ------------------------------------------------------------------------------------


def live_long(folder: Path, rank: int, size: int | None, hosts: Sequence[Any]) -> float:
    """One rank of a soak: it counts ranks, shrinks, grows, and never ends by itself. After a while
    it holds as many descriptors and threads as any other. On hosts it uses a store that none of
    the ranks hosts."""
    name, full, store = str(folder), 4, None
    if hosts:
        hosts[rank // 2].enter()
        store = open_store(hosts, False)
    comm = Communicator.join(name, rank, size, store, timeout_s=60)
    steps, begin = 0, held()
    while not (folder / "end").exists() or comm.size < full or steps < 20:
        try:
            if comm.size < full:
                comm, steps = comm.grow(name, full - comm.size, store=store, timeout_s=60), 0
                continue
            count = np.ones((1, 1024, 200_000)[steps % 3], dtype=np.float32)
            comm.all_reduce(count)
            if not (count == comm.size).all():
                os._exit(3)
            steps += 1
            mark = folder / f"in-{os.getpid()}"
            if steps == 5 and not mark.exists():
                begin = held()
                mark.touch()
        except GroupError:
            comm, steps = comm.shrink(store=store, timeout_s=60), 0
        except RendezvousError:
            continue
    gc.collect()
    time.sleep(1)  # until dropped groups have disconnected
    (folder / f"held-{os.getpid()}").write_text(json.dumps([begin, held()]))
    os._exit(0)  # at any moment for the others, which no longer shrink


def held() -> list[int]:
    """How many descriptors, threads and pages of shared memory this process has."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in maps if line[1].endswith("s")]
    pages = sum(int(end, 16) - int(begin, 16) for begin, end in spans) >> 12
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages]


def open_store(hosts: Sequence[Any], is_here: bool) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(hosts[2].ipv4, 29499, None, is_here, wait_for_workers=False)  # type: ignore[attr-defined]


def host_store(hosts: Sequence[Any]) -> float:
    """A process on a third host, with the store."""
    hosts[2].enter()
    store = open_store(hosts, True)
    while True:
        store.set("lives", "")
        time.sleep(10)


def soak(kills: int, seed: int, hosts: Sequence[Any]) -> None:
    """Kill ranks of a group of four at random moments, one or two at once; each is replaced. With
    an odd seed rank 0 survives throughout, so leaks add up there."""
    chance, done, slowest_s = random.Random(seed), 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = start(host_store, hosts) if hosts else None
        ranks = [start(live_long, folder, rank, 4, hosts) for rank in range(4)]
        wait_until_in(ranks, folder)
        while done < kills:
            victims = chance.sample(range(seed % 2, 4), chance.choice((1, 1, 2)))
            for victim in victims:
                child, reader = ranks[victim]
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                if chance.random() < 0.5:  # the next dies while the others shrink or grow
                    time.sleep(chance.choice((0, 0.001, 0.01, 0.03, 0.1)))
            begin = time.monotonic()
            for victim in victims:
                ranks[victim] = start(live_long, folder, victim, None, hosts)
            done += len(victims)
            if chance.random() < 0.3 and done < kills:  # and a new process while it joins
                time.sleep(chance.choice((0, 0.01, 0.05)))
                child, reader = ranks[victims[0]]
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                done += 1
                ranks[victims[0]] = start(live_long, folder, victims[0], None, hosts)
            wait_until_in(ranks, folder)
            slowest_s = max(slowest_s, time.monotonic() - begin)
            time.sleep(chance.choice((0, 0.01, 0.05)))
        (folder / "end").touch()
        for child in ranks:
            finish(*child)
        if host is not None:
            os.kill(host[0], signal.SIGKILL)
            finish(*host)
        told = [json.loads(file.read_text()) for file in folder.glob("held-*")]
    print(f"{done} kills (seed {seed}): nothing stuck, no wrong number; back to four ranks after")
    print(f"{slowest_s:.2f} s at most; descriptors, threads, shared pages: {told}", flush=True)


def wait_until_in(ranks: list[tuple[int, int]], folder: Path) -> None:
    """Return once every process has done some calls with all others."""
    end = time.monotonic() + 60
    while not all((folder / f"in-{child}").exists() for child, _ in ranks):
        time.sleep(0.001)
        for child, _ in ranks:
            if os.waitpid(child, os.WNOHANG)[0]:
                raise SystemExit(f"rank process {child}, which nobody killed, has ended")
        if time.monotonic() > end:
            raise SystemExit(f"stuck for 60 s: {[child for child, _ in ranks]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--hosts", action="store_true", help="2 hosts x 2 ranks")
    parser.add_argument("--soak", type=int, default=0, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        hosts: Sequence[Any] = ()
        if options.hosts:
            hosts = stack.enter_context(make_hosts(3 if options.soak else 2))
        if options.soak:
            soak(options.soak, options.seed, hosts)
        else:
            measure_all([4] if hosts else options.ranks, options.times, hosts)


@contextlib.contextmanager
def make_hosts(count: int) -> Iterator[Sequence[Any]]:
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    from namespaces import network, why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    for module in ("torch.distributed", "growing", "going_on"):  # once, and not in every rank
        importlib.import_module(module if "." in module else f"unisono.comm.hosts.{module}")
    with network(count) as made:
        yield made.hosts


def measure_all(sizes: Sequence[int], times: int, hosts: Sequence[Any]) -> None:
    ways = list(WAYS)
    if tuple(map(int, metadata.version("torch").split(".")[:2])) >= (2, 15):
        ways.append(ON_GLOO)
        importlib.import_module("torch.distributed")  # once, and not in every rank
    print(f"{'ranks':>5}  {'way':18}{'median ms':>10}{'90%':>8}{'worst':>8}")
    for size in sizes:
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(times):
            for way in ways:
                taken[way].append(measure(size, way, hosts))
        for way, ms in taken.items():
            ms.sort()
            print(
                f"{size:5}  {way:18}{statistics.median(ms):10.1f}"
                f"{ms[int(0.9 * (len(ms) - 1))]:8.1f}{ms[-1]:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
