"""How soon a fault is known: from the moment it happens until the last survivor has its exception.

    python benchmarks/faults.py                 2, 4 and 8 ranks, 20 times each
    python benchmarks/faults.py --ranks 2 --times 100

Each time a new world is made by forking and one fault really happens to it: a rank is killed or
exits while the others wait in an all_reduce or for a message; a rank calls something else; all
ranks send in a circle; a rank aborts. The clock is CLOCK_MONOTONIC, which all ranks share.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

from unisono.comm.base import Communicator
from unisono.comm.rendezvous.announcements import FileAnnouncements
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.errors import CollectiveMismatch, DeadlockError, GroupAborted, GroupError, PeerLost

HEAD_START_S = 0.05
"""How long the others wait in their calls before the fault happens: long enough to be asleep."""


def wait_for_all(comm: Communicator) -> None:
    comm.all_reduce(np.ones(4))


def wait_for_a_message(comm: Communicator) -> None:
    comm.recv(np.ones(4), (comm.rank + 1) % comm.size)


def send_in_a_circle(comm: Communicator) -> None:
    comm.send(np.ones(2, dtype=np.float32), (comm.rank + 1) % comm.size)


def be_killed(comm: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(comm: Communicator) -> None:
    os._exit(1)


def call_another_size(comm: Communicator) -> None:
    comm.all_reduce(np.ones(5))


def abort(comm: Communicator) -> None:
    comm.abort("enough")
    comm.barrier()


Doing = Callable[[Communicator], None]
FAULTS: dict[str, tuple[Doing, Doing, type[GroupError], float]] = {
    "killed, others in all_reduce": (wait_for_all, be_killed, PeerLost, 0.1),
    "killed, others in recv": (wait_for_a_message, be_killed, PeerLost, 0.1),
    "exits, others in all_reduce": (wait_for_all, leave, PeerLost, 0.1),
    "calls another size": (wait_for_all, call_another_size, CollectiveMismatch, 0.1),
    "aborts": (wait_for_all, abort, GroupAborted, 0.1),
    "all send in a circle": (send_in_a_circle, send_in_a_circle, DeadlockError, 1.0),
}
"""What the others do, what the last rank does, what they must raise, and how soon (seconds)."""


def be_a_rank(fault: str, rank: int, size: int, path: str, answer: int) -> None:
    others, culprit, expected, _ = FAULTS[fault]
    comm = SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size)
    comm.barrier()
    begin_s = time.monotonic()
    try:
        if rank == size - 1:
            time.sleep(HEAD_START_S)
            begin_s = time.monotonic()
            os.write(answer, pickle.dumps(("begin", begin_s)).ljust(64, b"."))
            culprit(comm)
        else:
            others(comm)
    except expected:
        os.write(answer, pickle.dumps(("raised", time.monotonic())).ljust(64, b"."))


def measure(fault: str, ranks: int, folder: str, number: int) -> float:
    """The seconds from the fault until the last survivor raised what it should."""
    path = os.path.join(folder, f"{ranks}-{number}-{fault.replace(' ', '-')}")
    reader, writer = os.pipe()
    for rank in range(ranks):
        if os.fork() == 0:
            try:
                be_a_rank(fault, rank, ranks, path, writer)
            finally:
                os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    for _ in range(ranks):
        os.wait()
    events = [pickle.loads(said[at : at + 64]) for at in range(0, len(said), 64)]
    begun = [moment for what, moment in events if what == "begin"]
    raised = [moment for what, moment in events if what == "raised"]
    if len(begun) != 1 or len(raised) < ranks - 1:
        raise RuntimeError(f"{fault}: {len(raised)} of {ranks} ranks raised what they should")
    return max(raised) - begun[0]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args(arguments)
    late = False
    print(f"{'the last rank':32}{'ranks':>6}{'median ms':>11}{'slowest ms':>12}{'goal ms':>9}")
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
        for fault, (_, _, _, goal_s) in FAULTS.items():
            for ranks in options.ranks:
                times_s = [measure(fault, ranks, folder, n) for n in range(options.times)]
                slowest_s = max(times_s)
                late = late or slowest_s > goal_s
                print(
                    f"{fault:32}{ranks:6}{statistics.median(times_s) * 1e3:11.2f}"
                    f"{slowest_s * 1e3:12.2f}{goal_s * 1e3:9.0f}"
                    f"{'  LATE' if slowest_s > goal_s else ''}",
                    flush=True,
                )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
