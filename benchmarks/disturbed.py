"""How calls behave when other programs take the cores for a moment, and how soon they recover.

    python benchmarks/disturbed.py                     as many ranks as half the cores, at least 2
    python benchmarks/disturbed.py --ranks 8 --seconds 5 --times 5 --json disturbed.json
    python benchmarks/disturbed.py --backends unisono  without Open MPI

The ranks make one all_reduce of 8 bytes after the other: on unisono, on Open MPI that spins, and on
Open MPI that yields, in turns. First nothing disturbs them. Then, for equal times, another process
takes half of the cores, all cores, or stops one rank (SIGSTOP), for 1 to 20 ms at random moments.
"back after" is the time from the end of a disturbance until the median of 32 calls in a row is at
most 1.25 times the quiet one. If mpi4py and mpirun are missing, they are set up in build/peers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import peers

BACKENDS = ("unisono", "mpi-spins", "mpi-yields")
SCENARIOS = ("half of the cores", "all cores", "one rank stopped")
LENGTH_MS = (1.0, 20.0)
PAUSE_MS = (20.0, 60.0)
"""Between two disturbances."""
WINDOW = 32
NEAR = 1.25
"""A window of calls whose median is at most this many times the quiet one is back to normal."""
PATIENCE_S = 60.0
"""For ranks to start and to end."""
CALLS_BETWEEN_LOOKS = 256


# -- a rank ------------------------------------------------------------------------------------


def connect(backend: str, flag: np.ndarray[Any, Any]) -> tuple[int, Callable[[], object]]:
    """This rank, and a call after which `flag` is the sum of all ranks' flags."""
    if backend == "unisono":
        import unisono

        comm = unisono.init()
        return comm.rank, lambda: comm.all_reduce(flag)
    from mpi4py import MPI

    world, here, total = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.SUM
    return world.rank, lambda: world.Allreduce(here, flag, total)


def be_rank(backend: str, folder: Path) -> None:
    """Call until rank 0 finds the file "stop"; it writes when each call ended, in nanoseconds."""
    flag = np.zeros(1, dtype=np.int64)
    rank, call = connect(backend, flag)
    for _ in range(1000):
        call()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    stop, ended, now = str(folder / "stop"), array("q"), time.monotonic_ns
    while not flag[0]:
        for _ in range(CALLS_BETWEEN_LOOKS):
            call()
            ended.append(now())
        flag[0] = rank == 0 and os.path.exists(stop)
        call()  # whether rank 0 has found it
    if rank == 0:
        np.save(folder / "ended.npy", np.frombuffer(ended, dtype=np.int64))


# -- disturbing --------------------------------------------------------------------------------


def burn(core: int, orders: Connection) -> None:
    """Take one core until the moment that each command names."""
    os.sched_setaffinity(0, {core})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent ends us
    while (until_ns := orders.recv()) is not None:
        while time.monotonic_ns() < until_ns:
            pass


class Disturber:
    """Takes cores away, by a process for each, and stops ranks."""

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.orders: list[Connection] = []
        self.processes: list[multiprocessing.Process] = []
        for core in self.cores:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=burn, args=(core, theirs), daemon=True)
            process.start()
            self.orders.append(ours)
            self.processes.append(process)

    def disturb(self, scenario: str, ranks: Sequence[int], length_s: float) -> tuple[int, int]:
        """One disturbance: when it began and ended."""
        begin_ns = time.monotonic_ns()
        if scenario == "one rank stopped":
            victim = random.choice(ranks)
            os.kill(victim, signal.SIGSTOP)
            try:
                time.sleep(length_s)
            finally:
                os.kill(victim, signal.SIGCONT)
            return begin_ns, time.monotonic_ns()
        count = len(self.cores) if scenario == "all cores" else max(1, len(self.cores) // 2)
        end_ns = begin_ns + int(length_s * 1e9)
        for orders in random.sample(self.orders, count):
            orders.send(end_ns)
        time.sleep(length_s)
        return begin_ns, end_ns

    def disturb_for(self, seconds: float, scenario: str, ranks: Sequence[int]) -> Phase:
        """Disturbances at random moments."""
        begin_ns, disturbances = time.monotonic_ns(), []
        while time.monotonic_ns() < begin_ns + seconds * 1e9:
            disturbances.append(self.disturb(scenario, ranks, random.uniform(*LENGTH_MS) / 1e3))
            time.sleep(random.uniform(*PAUSE_MS) / 1e3)
        return Phase(scenario, begin_ns, time.monotonic_ns(), disturbances)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class Phase:
    """What was done to the ranks, from when to when, on the clock that all processes share."""

    scenario: str
    begin_ns: int
    end_ns: int
    disturbances: list[tuple[int, int]]


# -- starting the ranks ------------------------------------------------------------------------


def command(backend: str, ranks: int, found: peers.Peers | None) -> list[str]:
    """What starts the ranks; their program's arguments follow."""
    if backend == "unisono":
        python = found.python if found else sys.executable
        return [python, "-m", "unisono", "run", "-n", str(ranks), "--threads", "1", __file__]
    assert found is not None
    return [*found.command(ranks, spins=backend == "mpi-spins"), __file__]


@contextmanager
def started(arguments: list[str], backend: str, ranks: int, folder: Path) -> Iterator[list[int]]:
    """The ranks' process ids, once they are running; afterwards they have ended."""
    process = subprocess.Popen(
        [*arguments, "--rank-of", backend, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    numbers: list[int] = []
    files = [folder / f"{rank}.pid" for rank in range(ranks)]
    try:
        end_s = time.monotonic() + PATIENCE_S
        while not all(file.exists() and file.read_text() for file in files):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"disturbed.py: the ranks on {backend} did not start")
            time.sleep(0.01)
        numbers += [int(file.read_text()) for file in files]
        yield numbers
        (folder / "stop").touch()
        if process.wait(PATIENCE_S):
            raise SystemExit(f"disturbed.py: {backend} ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# -- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Of one backend in one scenario, over all disturbances of all times."""

    backend: str
    scenario: str
    disturbances: int
    quiet_us: float
    median_us: float
    p95_us: float
    back_after_ms: float
    back_after_ms_p95: float
    back_after_calls: float
    never_back: int
    """Disturbances after which the next one came first."""


def back_after(
    ended_ns: np.ndarray[Any, Any], took_us: np.ndarray[Any, Any], quiet_us: float, phase: Phase
) -> list[tuple[float, int] | None]:
    """For each disturbance: after how many ms and calls the median was back; None: not in time."""
    found: list[tuple[float, int] | None] = []
    begins = [begin for begin, _ in phase.disturbances[1:]] + [phase.end_ns]
    for (_, end_ns), next_ns in zip(phase.disturbances, begins, strict=True):
        first, last = np.searchsorted(ended_ns, [end_ns, next_ns])
        if last - first < WINDOW:
            found.append(None)
            continue
        windows = np.lib.stride_tricks.sliding_window_view(took_us[first:last], WINDOW)
        # A window at a time: most are back at once.
        at = next((i for i in range(len(windows)) if np.median(windows[i]) <= NEAR * quiet_us), -1)
        begin_ns = ended_ns[first + at] - took_us[first + at] * 1e3
        found.append(None if at < 0 else (max(0.0, (begin_ns - end_ns) / 1e6), at))
    return found


@dataclass(frozen=True)
class Turn:
    """One start of the ranks: when calls ended, and what was done to them."""

    ended_ns: np.ndarray[Any, Any]
    phases: list[Phase]

    def took_us(self) -> np.ndarray[Any, Any]:
        return np.diff(self.ended_ns, prepend=self.ended_ns[0]) / 1e3

    def took_in(self, phase: Phase) -> np.ndarray[Any, Any]:
        first, last = np.searchsorted(self.ended_ns, [phase.begin_ns, phase.end_ns])
        return self.took_us()[first:last]


def summarise(backend: str, scenario: str, turns: Sequence[Turn]) -> Figures:
    quiet, disturbed, recoveries = [], [], []
    for turn in turns:
        quiet.append(turn.took_in(turn.phases[0]))
        quiet_us = float(np.median(quiet[-1]))
        for phase in turn.phases[1:]:
            if phase.scenario == scenario:
                disturbed.append(turn.took_in(phase))
                recoveries += back_after(turn.ended_ns, turn.took_us(), quiet_us, phase)
    back = [recovery for recovery in recoveries if recovery is not None]
    ms = [recovery[0] for recovery in back] or [float("nan")]
    median_us, p95_us = np.percentile(np.concatenate(disturbed), [50, 95])
    return Figures(
        backend=backend,
        scenario=scenario,
        disturbances=len(recoveries),
        quiet_us=round(float(np.median(np.concatenate(quiet))), 2),
        median_us=round(float(median_us), 2),
        p95_us=round(float(p95_us), 2),
        back_after_ms=round(float(np.median(ms)), 3),
        back_after_ms_p95=round(float(np.percentile(ms, 95)), 3),
        back_after_calls=float(np.median([recovery[1] for recovery in back])) if back else -1,
        never_back=len(recoveries) - len(back),
    )


def table(rows: Sequence[Figures]) -> str:
    lines = [
        f"{'':18} {'':11} {'quiet':>8} {'disturbed':>10} {'p95':>9} {'back after':>11} {'p95':>8} "
        f"{'calls':>6} {'never':>9}"
    ]
    lines += [
        f"{row.scenario:18} {row.backend:11} {row.quiet_us:5.1f} us {row.median_us:7.1f} us "
        f"{row.p95_us:6.1f} us {row.back_after_ms:8.2f} ms {row.back_after_ms_p95:5.2f} ms "
        f"{row.back_after_calls:6.0f} {row.never_back:3} of {row.disturbances:3}"
        for row in rows
    ]
    return "\n".join(lines)


# -- the whole ---------------------------------------------------------------------------------


def measure(backend: str, options: argparse.Namespace, found: peers.Peers | None) -> Turn:
    with tempfile.TemporaryDirectory(prefix="unisono-disturbed-") as name:
        folder = Path(name)
        arguments = command(backend, options.ranks, found)
        disturber = Disturber()
        try:
            with started(arguments, backend, options.ranks, folder) as ranks:
                begin_ns = time.monotonic_ns()
                time.sleep(options.seconds)
                phases = [Phase("quiet", begin_ns, time.monotonic_ns(), [])]
                phases += [
                    disturber.disturb_for(options.seconds, scenario, ranks)
                    for scenario in SCENARIOS
                ]
        finally:
            disturber.close()
        return Turn(np.load(folder / "ended.npy"), phases)


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--ranks", type=int, default=max(2, cores // 2))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each scenario (3)")
    parser.add_argument("--times", type=int, default=3, help="starts of each backend (3)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
    parser.add_argument("--no-setup", action="store_true", help="install nothing")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:
        be_rank(options.rank_of[0], Path(options.rank_of[1]))
        return 0
    backends = options.backends.split(",")
    unknown = [backend for backend in backends if backend not in BACKENDS]
    if unknown:
        parser.error(f"no backend {unknown[0]!r}: choose from {', '.join(BACKENDS)}")
    if options.ranks < 1 or options.seconds <= 0 or options.times < 1:
        parser.error("--ranks, --seconds and --times must be above 0")
    found = None
    try:
        if any(backend != "unisono" for backend in backends):
            found = peers.find()
            if found is None and options.no_setup:
                raise peers.PeersError("--no-setup, but mpi4py or mpirun is missing here")
            found = found or peers.set_up()
    except peers.PeersError as error:
        print(f"disturbed.py: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    turns: dict[str, list[Turn]] = {backend: [] for backend in backends}
    try:
        for _ in range(options.times):
            for backend in backends:
                turns[backend].append(measure(backend, options, found))
    except KeyboardInterrupt:
        print("disturbed.py: interrupted", file=sys.stderr)
        return 130
    rows = [summarise(name, scenario, turns[name]) for scenario in SCENARIOS for name in backends]
    print(f"all_reduce of 8 bytes, {options.ranks} ranks, {cores} cores\n")
    print(table(rows))
    if options.json:
        figures = [asdict(row) for row in rows]
        options.json.write_text(
            json.dumps({"ranks": options.ranks, "cores": cores, "rows": figures}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
