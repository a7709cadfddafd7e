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
from unisono.errors import PeerLost

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
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
