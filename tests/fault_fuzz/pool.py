"""Ranks that may die: warm processes that run scenarios with faults, and those who watch them.

The pool has torch loaded and forks a few lanes. A lane runs one scenario after another with
ranks that it forks; a rank that lives on runs the next scenario too, one that has died is
replaced. A rank that exits or raises does so through the whole interpreter, as in a program of
its own: no frame between it and the interpreter's start may stop it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from fault_fuzz.rank import ScenarioRank, StepEnd
from fault_fuzz.scenarios import ENDINGS, Scenario

DEADLINE_S = 40.0


@dataclass
class RankResult:
    """What became of one rank: what it reported, and how its process ended, if it did."""

    fault_s: float | None = None
    ends: list[StepEnd] | None = None
    well: bool = False
    failure: str = ""
    code: int | None = None
    gone_s: float | None = None


@dataclass
class ScenarioResult:
    """How a scenario went."""

    scenario: Scenario
    by_rank: list[RankResult]
    left_behind: list[str] = field(default_factory=list)


class ScenarioPool:
    """The warm process, seen from a test."""

    def __init__(self, lanes: int = 3) -> None:
        self._pipe, theirs = Pipe()
        command = f"from fault_fuzz import pool; pool.serve({theirs.fileno()}, {lanes})"
        paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        theirs.close()

    def run(self, scenarios: list[Scenario]) -> list[ScenarioResult]:
        """Run all scenarios; their results are in the order in which they ended."""
        self._pipe.send(scenarios)
        results: list[ScenarioResult] = self._pipe.recv()
        return results

    def close(self) -> None:
        """Hang up: the lanes end their ranks, and the pool its lanes."""
        self._pipe.close()
        assert self._process.wait(20) == 0


def serve(descriptor: int, lanes: int) -> None:
    """The pool's life: hand scenarios to lanes until the other side hangs up."""
    asking: Connection = Connection(descriptor)
    gc.freeze()  # so that a fork copies less
    pipes: list[Any] = []
    for _ in range(lanes):
        ours, theirs = Pipe()
        if os.fork() == 0:
            for pipe in (asking, ours, *pipes):
                pipe.close()
            Lane(theirs).serve()
            os._exit(0)
        theirs.close()
        pipes.append(ours)
    while True:
        try:
            scenarios = asking.recv()
        except EOFError:
            break
        asking.send(run_all(scenarios, pipes))
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


def run_all(scenarios: list[Scenario], lanes: list[Connection]) -> list[ScenarioResult]:
    waiting = list(reversed(scenarios))
    idle, busy = list(lanes), []
    results: list[ScenarioResult] = []
    while len(results) < len(scenarios):
        while waiting and idle:
            idle[-1].send(waiting.pop())
            busy.append(idle.pop())
        for lane in multiprocessing.connection.wait(busy):
            assert isinstance(lane, Connection)
            results.append(lane.recv())
            busy.remove(lane)
            idle.append(lane)
    return results


class Lane:
    """Parent of ranks: it runs scenarios, hears what its ranks report, collects the dead."""

    def __init__(self, asking: Connection) -> None:
        self._asking = asking
        self._folder = tempfile.mkdtemp(prefix="unisono-faults-")
        self._gate = os.pipe()
        self._pids: list[int] = []
        self._pipes: list[Any] = []

    def serve(self) -> None:
        """Run scenarios until the pool hangs up. Only the lane itself returns from here."""
        while True:
            try:
                scenario = self._asking.recv()
            except EOFError:
                break
            self._asking.send(self._run(scenario))
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder)

    def _run(self, scenario: Scenario) -> ScenarioResult:
        by_rank = [RankResult() for _ in range(scenario.ranks)]
        while len(self._pids) < scenario.ranks:
            self._start(len(self._pids))
        path = f"{self._folder}/meeting-{scenario.seed}"
        for rank in range(scenario.ranks):
            self._pipes[rank].send((scenario, path))
        self._listen(scenario, by_rank)
        for rank, result in enumerate(by_rank):
            if result.code is not None:
                self._start(rank)
        meetings = list(Path(self._folder).glob("meeting*"))
        left = [path.name for path in meetings]
        left += [name for name in os.listdir("/dev/shm") if "unisono" in name]
        for meeting in meetings:
            meeting.unlink()  # the next scenario shall not answer for it
        return ScenarioResult(scenario, by_rank, left)

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for number, pipe in enumerate([self._asking, ours, *self._pipes]):
                if number != rank + 2:  # the rank's predecessor's, closed already
                    pipe.close()
            serve_rank(rank, theirs, self._gate, f"{self._folder}/errors-{rank}")
        theirs.close()
        if rank < len(self._pids):
            self._pids[rank], self._pipes[rank] = pid, ours
        else:
            self._pids.append(pid)
            self._pipes.append(ours)

    def _listen(self, scenario: Scenario, by_rank: list[RankResult]) -> None:
        end = time.monotonic() + DEADLINE_S
        running = {self._pipes[rank]: rank for rank in range(scenario.ranks)}
        while running:
            ready = multiprocessing.connection.wait(list(running), max(0, end - time.monotonic()))
            if not ready:
                self._give_up(running, by_rank)
                end = time.monotonic() + 5.0
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = running[pipe]
                result = by_rank[rank]
                try:
                    field, what = pipe.recv()
                except (EOFError, ConnectionError):
                    pipe.close()
                    status = os.waitpid(self._pids[rank], 0)[1]
                    result.gone_s = time.monotonic()
                    result.code = os.waitstatus_to_exitcode(status)
                    del running[pipe]
                    continue
                setattr(result, field, what)
                if result.well and not result.failure:
                    del running[pipe]
                if result.failure:
                    end = min(end, time.monotonic() + 5.0)  # no need to see the others wait
                if field == "ends" and scenario.fault.kind == "stop":
                    self._wake(scenario, by_rank, rank)

    def _wake(self, scenario: Scenario, by_rank: list[RankResult], rank: int) -> None:
        """The stopped one goes on once all others have come to their end without it."""
        others = [other for number, other in enumerate(by_rank) if number != scenario.fault.rank]
        if rank == scenario.fault.rank or any(other.ends is None for other in others):
            return
        culprit = self._pids[scenario.fault.rank]
        os.waitid(os.P_PID, culprit, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        os.kill(culprit, signal.SIGCONT)

    def _give_up(self, running: dict[Any, int], by_rank: list[RankResult]) -> None:
        """They hang: have their stacks, then end them."""
        for rank in running.values():
            os.kill(self._pids[rank], signal.SIGUSR1)
            os.kill(self._pids[rank], signal.SIGCONT)
        time.sleep(0.5)  # the handler writes behind our back
        for rank in running.values():
            stacks = Path(self._folder, f"errors-{rank}").read_text()
            by_rank[rank].failure = f"not done in {DEADLINE_S:g} s:\n{stacks}"
            os.kill(self._pids[rank], signal.SIGKILL)


def serve_rank(rank: int, report: Connection, gate: tuple[int, int], errors: str) -> None:
    """A rank's life, which ends here, or by the exception of a culprit."""
    descriptor = os.open(errors, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            scenario, path = report.recv()
        except EOFError:
            os._exit(0)
        try:
            ScenarioRank(scenario, rank, path, report, gate).run()
        except BaseException:
            if rank == scenario.fault.rank and scenario.fault.kind in ENDINGS:
                raise
            report.send(("failure", traceback.format_exc()))
            os._exit(1)
