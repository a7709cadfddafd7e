"""Ranks for tests: warm processes that run a function of a test module with a Communicator.

The processes come from a fork server that has loaded torch, NumPy and unisono, so a new one costs
little. A job is a function that can be imported; what it returns or raises is passed back. A job
that misses its deadline fails with the stack of every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle
import pytest
import torch

from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.comm.shared_memory.record_reader import read_process
from unisono.variables import watch_is_wanted

DEADLINE_S = 60.0
Error = TypeVar("Error", bound=BaseException)

# Ranks find test modules by name, in any folder.
sys.path += sorted({str(file.parent) for file in Path(__file__).parent.rglob("test_*.py")})

# Modules that a thread would import in every rank: tests count threads.
for _module in (*NEEDED_LATER, "unisono.torch_backend.futures"):
    importlib.import_module(_module)

_context = multiprocessing.get_context("forkserver")
_preloaded = ["numpy", "torch", "pytest", "hypothesis", "ranks"]
_context.set_forkserver_preload([*_preloaded, "frozen"])


def _start_fork_server() -> None:
    """Unwatched: a process that forks must have no other thread. The ranks watch themselves, if
    asked to. multiprocessing does not tell it where our modules are; `frozen` undoes this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_WATCH", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()


def preload(module: str) -> None:
    """Load a module before ranks are forked; call this while tests are collected."""
    if module not in _preloaded:
        _preloaded.append(module)
    _context.set_forkserver_preload([*_preloaded, "frozen"])


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank: with a value, with an error's text, or not at all. If the
    process exited, `exit_code` says how, and `ended_s` when this was noticed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    ended_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """What a rank is told to do; `connected`: with a Communicator; `mortal`: what it raises ends
    the process."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    connected: bool
    mortal: bool
    rank: int
    size: int
    path: str


@dataclass(frozen=True)
class RankProcess:
    """A rank as seen from its pool."""

    process: Any
    pipe: Connection

    def has_said_or_ended(self) -> bool:
        return self.pipe.poll() or not self.process.is_alive()

    def outcome(self) -> Outcome:
        """The ending of its job, or of the process with it."""
        try:
            if self.pipe.poll():
                outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
                return outcome
        except EOFError:
            self.process.join(5)
        code = self.process.exitcode
        return Outcome(None, f"the process ended with {code}", code, time.monotonic())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class RankPool:
    """Up to `size` rank processes, reused from job to job; one that has died is replaced."""

    def __init__(self, size: int = 8) -> None:
        if "torch._dynamo" in sys.modules:
            preload("torch._dynamo")  # otherwise every rank with DDP spends seconds on it
        _start_fork_server()
        self._size = size
        self._temporary = tempfile.TemporaryDirectory(prefix="unisono-tests-")
        self.folder = Path(self._temporary.name)
        self._ranks: list[RankProcess] = []
        self._jobs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *args: Any,
        connected: bool = True,
        deadline_s: float = DEADLINE_S,
    ) -> list[Any]:
        """Run `function(comm, *args)` on ranks 0, 1, ... and return their results in order.

        Ranks that are not `connected` run `function(rank, size, path, *args)`: they may meet at
        the path.
        """
        outcomes = self.outcomes(function, ranks, *args, connected=connected, deadline_s=deadline_s)
        failed = {
            rank: outcome.error
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None
        }
        if failed:
            texts = [f"-- rank {rank} of {ranks}:\n{text}" for rank, text in failed.items()]
            texts.sort(key=lambda text: "PeerLost" in text)  # the root cause first
            raise RankFailed(f"{function.__name__}{args!r:.200}\n" + "\n".join(texts))
        return [outcome.value for outcome in outcomes]

    def launch(
        self, function: Callable[..., Any], ranks: int, args: tuple[Any, ...] = (), **_: Any
    ) -> list[Any]:
        """Replaces `unisono.launch` in tests of other things: its ranks need not import torch
        first. Use it with the test's own ranks, because it changes their environment."""
        call = cloudpickle.dumps((function, args))
        return self.run(_run_as_launched, ranks, call, connected=False, deadline_s=3 * DEADLINE_S)

    def outcomes(
        self,
        function: Callable[..., Any],
        ranks: int,
        *args: Any,
        connected: bool = True,
        mortal: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> list[Outcome]:
        """Like `run`, but a rank that raises or dies is a result, not a failure.

        An exception of a `mortal` rank, or its sys.exit, ends the process through the interpreter's
        normal exit, as in a program of its own.
        """
        self._start(ranks)
        self._jobs += 1
        path = str(self.folder / f"rendezvous-{self._jobs}")
        for number, rank in enumerate(self._ranks[:ranks]):
            job = Job(function, args, connected, mortal, number, ranks, path)
            rank.pipe.send_bytes(pickle.dumps(job))
        return self._collect(ranks, deadline_s)

    def pids(self, ranks: int) -> list[int]:
        """The process ids of the first ranks."""
        self._start(ranks)
        return [rank.process.pid for rank in self._ranks[:ranks]]

    def close(self) -> None:
        """End every process."""
        self._end()
        self._temporary.cleanup()

    def _start(self, ranks: int) -> None:
        assert ranks <= self._size, f"this pool has {self._size} ranks"
        for number in range(ranks):
            if number == len(self._ranks):
                self._ranks.append(self._start_rank(number))
            elif not self._ranks[number].process.is_alive():
                self._ranks[number].end()
                self._ranks[number] = self._start_rank(number)

    def _start_rank(self, number: int) -> RankProcess:
        ours, theirs = _context.Pipe()
        given = (theirs, str(self._stacks_file(number)), watch_is_wanted())
        process = _context.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()
        return RankProcess(process, ours)

    def _collect(self, ranks: int, deadline_s: float) -> list[Outcome]:
        end = time.monotonic() + deadline_s
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._ranks[:ranks]))
        while waiting:
            # A rank's sentinel shows its death even if a child keeps the pipe open.
            signs = [sign for r in waiting.values() for sign in (r.pipe, r.process.sentinel)]
            if not multiprocessing.connection.wait(signs, max(0.0, end - time.monotonic())):
                stacks = self._stacks(sorted(waiting))
                done = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error}
                self._end()
                raise RankFailed(f"not done in {deadline_s:g} s; failed: {done}\n{stacks}")
            for number, rank in list(waiting.items()):
                if rank.has_said_or_ended():
                    outcomes[number] = rank.outcome()
                    del waiting[number]
        return [outcomes[rank] for rank in range(ranks)]

    def _stacks_file(self, number: int) -> Path:
        return self.folder / f"stacks-{number}"

    def _stacks(self, numbers: list[int]) -> str:
        for number in numbers:
            os.kill(self._ranks[number].process.pid, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes without our buffers
        texts = []
        for number in numbers:
            file = self._stacks_file(number)
            texts.append(f"-- rank {number} is at:\n{file.read_text() if file.exists() else '?'}")
        return "\n".join(texts)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()


def attempt(function: Callable[..., Any], *args: Any, **keywords: Any) -> BaseException | None:
    """Call `function` and return what it raised, or None."""
    try:
        function(*args, **keywords)
    except BaseException as error:
        return error.with_traceback(None)
    return None


def raised(
    kind: type[Error] | tuple[type[Error], ...], function: Callable[..., Any], *args: Any
) -> Error:
    """What a call raises; it must be of this kind."""
    error = attempt(function, *args)
    assert isinstance(error, kind), error
    return error


def in_a_fork(work: Callable[[], Any]) -> str:
    """Run `work` in a forked child; returns the text of its result, or the name of what it
    raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            try:
                text = str(work())
            except BaseException as error:
                text = type(error).__name__
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@contextlib.contextmanager
def signalled_while_waiting(
    number: int = signal.SIGINT, handler: Callable[..., object] = signal.default_int_handler
) -> Iterator[list[float]]:
    """Send this process a signal, which has this handler meanwhile, once its latest call waits for
    its peers and keeps waiting; returns a list with the moment, as soon as there is one."""
    moment: list[float] = []

    def press() -> None:
        seen = -1
        while True:
            ranks = [rank for group in read_process(os.getpid()) for rank in group.ranks]
            mine = [record for rank in ranks if rank.pid == os.getpid() for record in rank.records]
            waiting = [record.number for record in mine if record.state == "waiting"]
            if waiting and waiting[-1] == seen:
                break
            seen = waiting[-1] if waiting else -1
            time.sleep(0.1)
        moment.append(time.monotonic())
        os.kill(os.getpid(), number)

    before = signal.signal(number, handler)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield moment
    finally:
        presser.join()
        signal.signal(number, before)


def connect(path: str, rank: int, size: int) -> Communicator:
    """Join a native group through a file."""
    return connect_on_host(FileBoard(path), rank, size, timeout_s=60.0)


def subgroup(comm: Communicator, ranks: Iterable[int], label: str = "") -> Communicator:
    """Split off a group that has this rank as a member."""
    group = comm.split(list(ranks), label)
    assert group is not None
    return group


def _serve(pipe: Connection, stacks: str, watched: bool) -> None:
    if watched:
        os.environ["UNISONO_WATCH"] = "1"
        watch.start()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        while True:
            try:
                data = pipe.recv_bytes()
            except EOFError:
                return
            mortal = False
            try:
                job = pickle.loads(data)
                mortal = job.mortal
                answer = pickle.dumps(Outcome(value=_do(job)))
            except BaseException as error:
                if mortal:
                    end_as_a_program(error)
                answer = pickle.dumps(Outcome(error=traceback.format_exc()))
            pipe.send_bytes(answer)


def end_as_a_program(error: BaseException) -> NoReturn:
    """End the process through the interpreter's normal exit, as for an uncaught exception."""
    code = error.code if isinstance(error, SystemExit) else 1
    error.__traceback__ = None  # and with it the frames, which would otherwise be gone by then
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("the process has ended")


def _run_as_launched(rank: int, size: int, path: str, call: bytes) -> Any:
    function, args = cloudpickle.loads(call)
    os.environ.update(UNISONO_RANK=str(rank), UNISONO_SIZE=str(size), UNISONO_RENDEZVOUS=path)
    return function(*args)


def _do(job: Job) -> Any:
    if not job.connected:
        return job.function(job.rank, job.size, job.path, *job.args)
    with connect(job.path, job.rank, job.size) as comm:
        return job.function(comm, *job.args)
