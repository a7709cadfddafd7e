"""Ranks that may die: warm processes that play programs with faults, and those who watch them.

The nursery has torch loaded and forks a few lanes. A lane plays one program after another with
ranks that it forks; a rank that lives on plays in the next program too, one that has died is
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

from fault_play import Ended, Player
from fault_programs import ENDINGS, Program

DEADLINE_S = 40.0


@dataclass
class Story:
    """What became of one rank: what it reported, and how its process ended, if it did."""

    fault_s: float | None = None
    ends: list[Ended] | None = None
    well: bool = False
    failure: str = ""
    code: int | None = None
    gone_s: float | None = None


@dataclass
class Course:
    """How a program went."""

    program: Program
    stories: list[Story]
    left_behind: list[str] = field(default_factory=list)


class Nursery:
    """The warm process, seen from a test."""

    def __init__(self, lanes: int = 3) -> None:
        self._pipe, theirs = Pipe()
        command = f"import fault_ranks; fault_ranks.serve({theirs.fileno()}, {lanes})"
        paths = (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        theirs.close()

    def play(self, programs: list[Program]) -> list[Course]:
        """Have all programs played; in the order in which they ended."""
        self._pipe.send(programs)
        courses: list[Course] = self._pipe.recv()
        return courses

    def close(self) -> None:
        """Hang up: the lanes end their ranks, and the nursery its lanes."""
        self._pipe.close()
        assert self._process.wait(20) == 0


def serve(descriptor: int, lanes: int) -> None:
    """The nursery's life: hand programs to lanes until the other side hangs up."""
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
            programs = asking.recv()
        except EOFError:
            break
        asking.send(play_all(programs, pipes))
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


def play_all(programs: list[Program], lanes: list[Connection]) -> list[Course]:
    waiting = list(reversed(programs))
    idle, busy = list(lanes), []
    courses: list[Course] = []
    while len(courses) < len(programs):
        while waiting and idle:
            idle[-1].send(waiting.pop())
            busy.append(idle.pop())
        for lane in multiprocessing.connection.wait(busy):
            assert isinstance(lane, Connection)
            courses.append(lane.recv())
            busy.remove(lane)
            idle.append(lane)
    return courses


class Lane:
    """Parent of ranks: it has programs played, hears what its ranks report, collects the dead."""

    def __init__(self, asking: Connection) -> None:
        self._asking = asking
        self._folder = tempfile.mkdtemp(prefix="unisono-faults-")
        self._gate = os.pipe()
        self._pids: list[int] = []
        self._pipes: list[Any] = []

    def serve(self) -> None:
        """Play programs until the nursery hangs up. Only the lane itself returns from here."""
        while True:
            try:
                program = self._asking.recv()
            except EOFError:
                break
            self._asking.send(self._play(program))
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder)

    def _play(self, program: Program) -> Course:
        stories = [Story() for _ in range(program.ranks)]
        while len(self._pids) < program.ranks:
            self._start(len(self._pids))
        path = f"{self._folder}/meeting-{program.seed}"
        for rank in range(program.ranks):
            self._pipes[rank].send((program, path))
        self._listen(program, stories)
        for rank, story in enumerate(stories):
            if story.code is not None:
                self._start(rank)
        meetings = list(Path(self._folder).glob("meeting*"))
        left = [path.name for path in meetings]
        left += [name for name in os.listdir("/dev/shm") if "unisono" in name]
        for meeting in meetings:
            meeting.unlink()  # the next program shall not answer for it
        return Course(program, stories, left)

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

    def _listen(self, program: Program, stories: list[Story]) -> None:
        end = time.monotonic() + DEADLINE_S
        playing = {self._pipes[rank]: rank for rank in range(program.ranks)}
        while playing:
            ready = multiprocessing.connection.wait(list(playing), max(0, end - time.monotonic()))
            if not ready:
                self._give_up(playing, stories)
                end = time.monotonic() + 5.0
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = playing[pipe]
                story = stories[rank]
                try:
                    word, what = pipe.recv()
                except (EOFError, ConnectionError):
                    pipe.close()
                    status = os.waitpid(self._pids[rank], 0)[1]
                    story.gone_s = time.monotonic()
                    story.code = os.waitstatus_to_exitcode(status)
                    del playing[pipe]
                    continue
                setattr(story, word, what)
                if story.well and not story.failure:
                    del playing[pipe]
                if story.failure:
                    end = min(end, time.monotonic() + 5.0)  # no need to see the others wait
                if word == "ends" and program.fault.kind == "stop":
                    self._wake(program, stories, rank)

    def _wake(self, program: Program, stories: list[Story], rank: int) -> None:
        """The stopped one goes on once all others have come to their end without it."""
        others = [other for number, other in enumerate(stories) if number != program.fault.rank]
        if rank == program.fault.rank or any(other.ends is None for other in others):
            return
        culprit = self._pids[program.fault.rank]
        os.waitid(os.P_PID, culprit, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        os.kill(culprit, signal.SIGCONT)

    def _give_up(self, playing: dict[Any, int], stories: list[Story]) -> None:
        """They hang: have their stacks, then end them."""
        for rank in playing.values():
            os.kill(self._pids[rank], signal.SIGUSR1)
            os.kill(self._pids[rank], signal.SIGCONT)
        time.sleep(0.5)  # the handler writes behind our back
        for rank in playing.values():
            stacks = Path(self._folder, f"errors-{rank}").read_text()
            stories[rank].failure = f"not done in {DEADLINE_S:g} s:\n{stacks}"
            os.kill(self._pids[rank], signal.SIGKILL)


def serve_rank(rank: int, report: Connection, gate: tuple[int, int], errors: str) -> None:
    """A rank's life, which ends here, or by the exception of a culprit."""
    descriptor = os.open(errors, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            program, path = report.recv()
        except EOFError:
            os._exit(0)
        try:
            Player(program, rank, path, report, gate).play()
        except BaseException:
            if rank == program.fault.rank and program.fault.kind in ENDINGS:
                raise
            report.send(("failure", traceback.format_exc()))
            os._exit(1)
