"""The controller's side of warm ranks: processes that are started once and kept between tests."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from unisono.testing import messages
from unisono.testing.messages import Collect, Collected, Ran, Ready, Run, Start, Stop, Unable
from unisono.testing.rank import STACK_SIGNAL, stacks_file

START_S = 120.0
"""How long a rank may take to start, or to collect a file: it imports what the tests import."""

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed or died."""

_PYTEST = re.compile(r'^  File ".*/(_pytest|pluggy)/')

STOP_S = 10.0
"""How long ranks may take to tear down what their session holds."""


@dataclass(frozen=True)
class Gone:
    """A rank that brought no answer: it died, or had to be ended."""

    headline: str
    detail: str = ""


Ending = Ran | Unable | Gone
"""How a test ended on one rank."""


@dataclass
class Rank:
    """A process that runs tests."""

    number: int
    process: subprocess.Popen[bytes]
    channel: Connection
    pidfd: int
    log: Path
    files: dict[str, str | None] = field(default_factory=dict)
    """The files that it has collected, and what went wrong there."""

    def send(self, message: object) -> None:
        """Tell it something; if it is gone, whoever waits for the answer will notice."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def end(self) -> None:
        """Kill it, with whatever its tests have started, and forget it."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        os.close(self.pidfd)


class Pool:
    """The ranks of one pytest session; it grows to the largest number asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: dict[int, Rank] = {}
        factory = getattr(config, "_tmp_path_factory", None)
        self._own_folder = factory is None  # -p no:tmpdir
        folder = tempfile.mkdtemp(prefix="unisono-") if factory is None else factory.mktemp("ranks")
        self.folder = Path(folder)

    # -- life ------------------------------------------------------------------------------------

    def prepare(self, wanted: Sequence[set[str]]) -> list[Gone | None]:
        """Have a rank for each set of files, with its files collected; what went wrong where."""
        starting = []
        for number in range(len(wanted)):
            rank = self._ranks.get(number)
            if rank is not None and rank.process.poll() is not None:
                rank.end()
                rank = None
            if rank is None:
                self._ranks[number] = self._start(number)
                starting.append(number)
        failed = self._gather_starts(starting)
        for number, files in enumerate(wanted):
            if number not in failed:
                for path in sorted(files - self._ranks[number].files.keys()):
                    self._ranks[number].send(Collect(path))
        for number, files in enumerate(wanted):
            if number not in failed:
                gone = self._await_files(self._ranks[number], sorted(files))
                if gone is not None:
                    failed[number] = gone
        return [failed.get(number) for number in range(len(wanted))]

    def collection_error(self, number: int, path: str) -> str | None:
        """What went wrong when a rank collected a file."""
        return self._ranks[number].files.get(path)

    def close(self, *, gently: bool) -> None:
        """End every rank; gently: they tear down the fixtures of their session first."""
        if gently:
            for rank in self._ranks.values():
                rank.send(Stop())
            end = time.monotonic() + STOP_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                for rank in self._ranks.values():
                    rank.process.wait(max(0.0, end - time.monotonic()))
        for number in list(self._ranks):
            self._end(number)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, number: int) -> Rank:
        ours, theirs = Pipe()
        environment = {**os.environ, messages.CHANNEL: str(theirs.fileno())}
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
        parameters = self._config.invocation_params
        plugins = ["unisono.testing.rank"]
        plugins += [name for name in parameters.plugins or () if isinstance(name, str)]
        log = self.folder / f"rank-{number}.log"
        shown = self._config.getoption("capture") == "no"
        with contextlib.ExitStack() as stack:
            output = None if shown else stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                [
                    sys.executable,
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    "-P",
                    "-m",
                    "pytest",
                    *(word for name in plugins for word in ("-p", name)),
                    *parameters.args,
                ],
                cwd=parameters.dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is the controller's to handle
            )
        theirs.close()
        rank = Rank(number, process, ours, os.pidfd_open(process.pid), log)
        rank.send(
            Start(
                number,
                os.getpid(),
                tuple(sys.path),
                tuple(sys.argv),
                str(self.folder),
                getattr(self._config, "workerinput", {}),
            )
        )
        return rank

    def _gather_starts(self, numbers: list[int]) -> dict[int, Gone]:
        failed = {}
        for number in numbers:
            answer = self._answer(self._ranks[number], START_S)
            if not isinstance(answer, Ready):
                failed[number] = self._lost(number, answer, f"not started in {START_S:g} s")
        return failed

    def _await_files(self, rank: Rank, paths: list[str]) -> Gone | None:
        for path in paths:
            if path in rank.files:
                continue
            answer = self._answer(rank, START_S)
            if not isinstance(answer, Collected):
                late = f"{path} not collected in {START_S:g} s"
                return self._lost(rank.number, answer, late)
            rank.files[path] = answer.error
        return None

    # -- running ---------------------------------------------------------------------------------

    def run(self, runs: Sequence[Run], timeout_s: float) -> list[Ending]:
        """Run one test on ranks 0, 1, ...; returns when each has answered, died or been ended.

        Raises pytest.exit's exception where the test did on a rank.
        """
        for number, run in enumerate(runs):
            self._ranks[number].send(run)
        endings: dict[int, Ending] = {}
        waiting = {number: self._ranks[number] for number in range(len(runs))}
        end, why = time.monotonic() + timeout_s, f"the test's deadline of {timeout_s:g} s"
        while waiting:
            places = {rank.channel: rank for rank in waiting.values()}
            watched: list[object] = [*places, *(rank.pidfd for rank in waiting.values())]
            wait(watched, max(0.0, end - time.monotonic()))  # type: ignore[arg-type]
            answered = [rank for rank in waiting.values() if _has_word(rank)]
            if not answered and time.monotonic() >= end:
                endings.update(self._give_up(list(waiting), why))
                break
            for rank in answered:
                del waiting[rank.number]
                ending = endings[rank.number] = self._ending(rank)
                if _is_bad(ending) and end > time.monotonic() + GRACE_S:
                    end = time.monotonic() + GRACE_S
                    why = f"{GRACE_S:g} s after rank {rank.number} failed"
        return [endings[number] for number in range(len(runs))]

    def _ending(self, rank: Rank) -> Ending:
        answer = self._answer(rank, 0.0)
        if isinstance(answer, messages.Exit):
            self.close(gently=False)
            pytest.exit(answer.reason, answer.returncode)
        if isinstance(answer, Unable) and answer.broken:
            self._end(rank.number)
        if isinstance(answer, Ran | Unable):
            return answer
        return self._lost(rank.number, answer, "no answer")

    def _answer(self, rank: Rank, timeout_s: float) -> object:
        """A rank's next word; None where it is gone or late; Gone where it makes no sense."""
        wait([rank.channel, rank.pidfd], timeout_s)
        try:
            if not rank.channel.poll():
                return None
            data = rank.channel.recv_bytes()
        except (EOFError, OSError):
            return None
        try:
            return pickle.loads(data)
        except Exception as error:  # a class that only the rank can import
            return Gone("the controller cannot read the report", repr(error))

    def _lost(self, number: int, answer: object, late: str) -> Gone:
        """Part from a rank that has not answered as it should, and say why."""
        rank = self._ranks[number]
        if isinstance(answer, Gone):
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(1.0)  # it hangs up before it ends
        code = rank.process.poll()
        headline = late if code is None else _how_it_ended(code)
        self._end(number)
        texts = [_stacks(_read(stacks_file(str(self.folder), number))), _read(rank.log).strip()]
        return Gone(headline, "\n".join(text for text in texts if text))

    def _give_up(self, numbers: list[int], why: str) -> dict[int, Gone]:
        files = {number: stacks_file(str(self.folder), number) for number in numbers}
        for number, file in files.items():
            os.truncate(file, 0)
            os.kill(self._ranks[number].process.pid, STACK_SIGNAL)
        _settle(list(files.values()))
        for number in numbers:
            self._end(number)
        return {
            number: Gone(
                f"not done by {why}",
                _stacks(_read(file)) or "It does not say where it is: has it been stopped?",
            )
            for number, file in files.items()
        }

    def _end(self, number: int) -> None:
        self._ranks.pop(number).end()


def _has_word(rank: Rank) -> bool:
    """Whether a rank has answered or ended."""
    try:
        return rank.channel.poll() or rank.process.poll() is not None
    except OSError:
        return True


def _is_bad(ending: Ending) -> bool:
    """Whether the other ranks may now wait in vain."""
    if not isinstance(ending, Ran):
        return True
    return any(one["outcome"] == "failed" or "wasxfail" in one for one in ending.reports)


def _how_it_ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"the process ended with exit code {code}"


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _stacks(text: str) -> str:
    """The stacks that faulthandler wrote, without the frames of pytest beneath a test."""
    threads = []
    for thread in re.split(r"\n(?=\S)", text.strip()):
        lines = thread.split("\n")
        beneath = [number for number, line in enumerate(lines) if _PYTEST.search(line)]
        threads.append("\n".join(lines[: beneath[0]] if beneath and beneath[0] > 1 else lines))
    return "\n".join(threads)


def _settle(files: list[Path]) -> None:
    """Wait until all files are written, for a second at most."""
    end = time.monotonic() + 1.0
    before: list[int] = []
    while time.monotonic() < end:
        time.sleep(0.05)
        sizes = [file.stat().st_size for file in files]
        if all(sizes) and sizes == before:
            return
        before = sizes
