"""How soon the survivors of a death work again: from the kill to their first correct all_reduce.

    python benchmarks/shrink.py                 2, 4 and 8 ranks, 20 times each
    python benchmarks/shrink.py --ranks 4 --times 100
    python benchmarks/shrink.py --soak 200      random kills at random moments, 4 ranks

The ranks all_reduce all the time, and one kills itself in between. The others go on in two ways, by
turns: by `shrink`, or, as programs do without it, by closing the group and meeting again under
a new name, which here somebody tells them for nothing. The figure is that of the last survivor, by
CLOCK_MONOTONIC, which all share. A soak kills one or two of the ranks at any moment, also while the
others shrink or grow; a new process takes each place.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import pickle
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.rendezvous.announcements import FileAnnouncements
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.errors import GroupError, PeerLost, RendezvousError

for _module in (*NEEDED_LATER, "unisono.comm.solo"):  # programs have it by the time of a death
    importlib.import_module(_module)

WAYS = ("shrink", "meet again")


def live(rank: int, size: int, folder: Path, way: str) -> float:
    """One rank's life; when its first all_reduce after the death was right."""
    comm = connect_on_host(FileAnnouncements(folder / "meeting"), rank, size, timeout_s=30)
    ones = np.ones(1024, dtype=np.float32)
    fatal = random.randint(50, 400)
    try:
        for step in range(1 << 20):
            if rank == size // 2 and step == fatal:
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(ones.copy())
    except PeerLost:
        left = comm.shrink() if way == "shrink" else meet_again(comm, size // 2, folder)
    left.all_reduce(ones)
    done = time.monotonic()
    assert (ones == size - 1).all()
    assert left.size == size - 1
    left.barrier()
    return done


def meet_again(comm: Communicator, lost: int, folder: Path) -> Communicator:
    """What there is without `shrink`, for somebody who knows who is left."""
    rank = comm.rank - (comm.rank > lost)
    comm.close()
    return connect_on_host(FileAnnouncements(folder / "again"), rank, comm.size - 1, timeout_s=30)


def measure(size: int, way: str) -> float:
    """Milliseconds of one death."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [start(live, rank, size, folder, way) for rank in range(size)]
        done = [finish(*child) for child in children]
        killed = float((folder / "killed").read_text())
    return 1000 * (max(time for time in done if time) - killed)


def start(function: object, *args: object) -> tuple[int, int]:
    """A forked child that runs a function; its number, and the pipe on which it tells."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with whoever started it
    try:
        os.write(writer, pickle.dumps(function(*args)))  # type: ignore[operator]
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def finish(child: int, reader: int) -> float:
    """What a child has told; 0 where it was killed."""
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a rank failed with {os.WEXITSTATUS(status)}")
    return pickle.loads(told) if told else 0.0


# -- the soak ------------------------------------------------------------------------------------


def live_long(folder: Path, rank: int, size: int | None) -> float:
    """One rank of a soak: it counts ranks, shrinks, grows, and never ends by itself. After a while
    it holds as many descriptors and threads as any other."""
    name, full = str(folder), 4
    comm = Communicator.join(name, rank, size, timeout_s=60)
    steps = 0
    while not (folder / "end").exists() or comm.size < full or steps < 20:
        try:
            if comm.size < full:
                comm, steps = comm.grow(name, full - comm.size, timeout_s=60), 0
                continue
            count = np.ones((1, 1024, 200_000)[steps % 3], dtype=np.float32)
            comm.all_reduce(count)
            if not (count == comm.size).all():
                os._exit(3)
            steps += 1
            mark = folder / f"in-{os.getpid()}"
            if steps == 5 and not mark.exists():
                mark.write_text(str(time.monotonic()))
        except GroupError:
            comm, steps = comm.shrink(timeout_s=60), 0
        except RendezvousError:
            continue
    (folder / f"held-{os.getpid()}").write_text(
        f"{len(os.listdir('/proc/self/fd'))} {len(os.listdir('/proc/self/task'))}"
    )
    os._exit(0)  # at any moment for the others, who do not shrink any more


def soak(kills: int, seed: int) -> None:
    """Kill ranks of a group of four at random moments, one or two at once; each is replaced."""
    chance, done, slowest_s = random.Random(seed), 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [start(live_long, folder, rank, 4) for rank in range(4)]
        wait_until_in(ranks, folder)
        while done < kills:
            victims = chance.sample(range(4), chance.choice((1, 1, 2)))
            for victim in victims:
                child, reader = ranks[victim]
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                if chance.random() < 0.5:  # the next dies while the others shrink or grow
                    time.sleep(chance.choice((0, 0.001, 0.01, 0.03, 0.1)))
            begin = time.monotonic()
            for victim in victims:
                ranks[victim] = start(live_long, folder, victim, None)
            done += len(victims)
            if chance.random() < 0.3 and done < kills:  # and a newcomer on its way in
                time.sleep(chance.choice((0, 0.01, 0.05)))
                child, reader = ranks[victims[0]]
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                done += 1
                ranks[victims[0]] = start(live_long, folder, victims[0], None)
            wait_until_in(ranks, folder)
            slowest_s = max(slowest_s, time.monotonic() - begin)
            time.sleep(chance.choice((0, 0.01, 0.05)))
        (folder / "end").touch()
        for child in ranks:
            finish(*child)
        held = sorted({file.read_text() for file in folder.glob("held-*")})
    print(f"{done} kills (seed {seed}): nothing stuck, no wrong number; back to four ranks after")
    print(f"{slowest_s:.2f} s at most; descriptors and threads at the end: {', '.join(held)}")


def wait_until_in(ranks: list[tuple[int, int]], folder: Path) -> None:
    """Return once every process has made some calls with all others."""
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
    parser.add_argument("--soak", type=int, default=0, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.soak:
        soak(options.soak, options.seed)
        return
    print(f"{'ranks':>5}  {'way':12}{'median ms':>10}{'90%':>8}{'worst':>8}")
    for size in options.ranks:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.times):
            for way in WAYS:
                taken[way].append(measure(size, way))
        for way, ms in taken.items():
            ms.sort()
            print(
                f"{size:5}  {way:12}{statistics.median(ms):10.1f}"
                f"{ms[int(0.9 * (len(ms) - 1))]:8.1f}{ms[-1]:8.1f}"
            )


if __name__ == "__main__":
    main()
