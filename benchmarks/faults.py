"""How soon a fault is detected: from the fault until the last survivor has its exception.

    python benchmarks/faults.py                 2, 4 and 8 ranks, 20 times each
    python benchmarks/faults.py --ranks 2 --times 100
    sudo python benchmarks/faults.py --hosts        2 hosts x 2 ranks, with cables of 1 Gbit/s

Each run forks a new world and causes one real fault: a rank is killed or exits while the others
wait in an all_reduce or for a message; a rank calls something else; all ranks send in a circle; a
rank aborts. The clock is CLOCK_MONOTONIC, which all ranks share. Hosts are network namespaces, and
rank 0 hosts the store.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.errors import CollectiveMismatch, DeadlockError, GroupAborted, GroupError, PeerLost

HEAD_START_S = 0.05
"""How long the others wait in their calls before the fault: long enough to be asleep."""


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


def call_on_much(comm: Communicator) -> None:
    tensor = np.ones(16 << 20, dtype=np.float32)
    while True:
        comm.all_reduce(tensor)


OVER_HOSTS: dict[str, tuple[int, Doing, Doing, type[GroupError], float]] = {
    "killed, others in all_reduce": (3, wait_for_all, be_killed, PeerLost, 0.15),
    "killed, who hosts the store": (0, wait_for_all, be_killed, PeerLost, 0.15),
    "killed, first of its host": (2, wait_for_all, be_killed, PeerLost, 0.15),
    "killed while 64 MiB move": (3, call_on_much, be_killed, PeerLost, 0.15),
    "aborts": (3, wait_for_all, abort, GroupAborted, 0.15),
}
"""Like FAULTS, with the rank that fails first."""


def be_a_rank_on_a_host(
    fault: str, rank: int, hosts: Sequence[Any], port: int, answer: int
) -> None:
    import torch.distributed as dist

    from unisono.comm.factory import connect
    from unisono.comm.meeting.board import Board

    culprit_rank, others, culprit, expected, _ = OVER_HOSTS[fault]
    hosts[rank // 2].enter()
    os.environ["MASTER_ADDR"] = hosts[0].ipv4
    store = dist.TCPStore(hosts[0].ipv4, port, 4, rank == 0)  # type: ignore[attr-defined]
    comm = connect(Board(store), rank, 4)
    act(comm, rank == culprit_rank, others, culprit, expected, answer)
    os.close(answer)
    time.sleep(0.5)  # rank 0 hosts what the others may still need


def be_a_rank(fault: str, rank: int, size: int, path: str, answer: int) -> None:
    others, culprit, expected, _ = FAULTS[fault]
    comm = connect_on_host(FileBoard(path), rank, size)
    act(comm, rank == size - 1, others, culprit, expected, answer)


def act(
    comm: Communicator,
    is_culprit: bool,
    others: Doing,
    culprit: Doing,
    expected: type[GroupError],
    answer: int,
) -> None:
    """What a rank does, and the moments that it reports."""
    comm.barrier()
    try:
        if is_culprit:
            if others is call_on_much:  # it happens in the middle of a call
                threading.Timer(0.2, act_and_tell, (comm, culprit, answer)).start()
                others(comm)
            time.sleep(HEAD_START_S)
            act_and_tell(comm, culprit, answer)
        else:
            others(comm)
    except expected:
        os.write(answer, pickle.dumps(("raised", time.monotonic())).ljust(64, b"."))


def act_and_tell(comm: Communicator, culprit: Doing, answer: int) -> None:
    os.write(answer, pickle.dumps(("begin", time.monotonic())).ljust(64, b"."))
    culprit(comm)


def measure(fault: str, ranks: int, folder: str, number: int) -> float:
    """The seconds from the fault until the last survivor raised what it should."""
    path = os.path.join(folder, f"{ranks}-{number}-{fault.replace(' ', '-')}")
    return clock(fault, ranks, lambda rank, answer: be_a_rank(fault, rank, ranks, path, answer))


def clock(fault: str, ranks: int, be: Callable[[int, int], None]) -> float:
    """Fork this many ranks, and read what they report."""
    reader, writer = os.pipe()
    for rank in range(ranks):
        if os.fork() == 0:
            try:
                be(rank, writer)
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
    parser.add_argument("--hosts", action="store_true", help="2 hosts x 2 ranks; needs root")
    options = parser.parse_args(arguments)
    if options.hosts:
        return measure_hosts(options.times)
    late = False
    print(f"{'the last rank':32}{'ranks':>6}{'median ms':>11}{'slowest ms':>12}{'goal ms':>9}")
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as folder:
        for fault, (_, _, _, goal_s) in FAULTS.items():
            for ranks in options.ranks:
                times_s = [measure(fault, ranks, folder, n) for n in range(options.times)]
                late |= show(fault, ranks, times_s, goal_s)
    return 1 if late else 0


def measure_hosts(times: int) -> int:
    """Like `main`, for ranks on hosts."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    from namespaces import Link, network, why_not

    if why_not():
        sys.exit(f"left out: {why_not()}")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch.distributed  # noqa: F401  # once, and not in every rank

    import unisono.comm.hosts.making  # noqa: F401

    late = False
    print(f"{'a rank is/does':32}{'ranks':>6}{'median ms':>11}{'slowest ms':>12}{'goal ms':>9}")
    with network(2, Link(1_000_000_000)) as made:
        port = 29500
        for fault, (*_, goal_s) in OVER_HOSTS.items():
            times_s = []
            for _ in range(times):
                port += 1

                def be(rank: int, answer: int, fault: str = fault, port: int = port) -> None:
                    be_a_rank_on_a_host(fault, rank, made.hosts, port, answer)

                times_s.append(clock(fault, 4, be))
            late |= show(fault, 4, times_s, goal_s)
    return 1 if late else 0


def show(fault: str, ranks: int, times_s: Sequence[float], goal_s: float) -> bool:
    """A line; whether the slowest was too slow."""
    slowest_s = max(times_s)
    print(
        f"{fault:32}{ranks:6}{statistics.median(times_s) * 1e3:11.2f}"
        f"{slowest_s * 1e3:12.2f}{goal_s * 1e3:9.0f}"
        f"{'  LATE' if slowest_s > goal_s else ''}",
        flush=True,
    )
    return slowest_s > goal_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
