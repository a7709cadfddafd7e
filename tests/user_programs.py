"""Programs that tests write, start and observe from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono.processes import state_of

DEADLINE_S = 180.0


@dataclass(frozen=True)
class Program:
    """A script in its own folder."""

    path: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, *args: str, before: Sequence[str] = (), environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start it; `before` goes between the interpreter and the script."""
        process = subprocess.Popen(
            [sys.executable, *before, str(self.path), *args],
            env=plain_environment() | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.path.parent,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill what still runs, after a test that failed: nothing may outlive the test run."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(
        self, *args: str, before: Sequence[str] = (), environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*args, before=before, environment=environment)
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def write_program(folder: Path, text: str, name: str = "program.py") -> Program:
    """Write a program to a file."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return Program(path)


def run_python(
    *args: str | Path, environment: dict[str, str] | None = None, timeout_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end."""
    return subprocess.run(
        [sys.executable, *args],
        env=plain_environment() | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


WriteProgram = Callable[..., Program]
"""The fixture `program`: writes one to the folder of the test."""


@contextlib.contextmanager
def ignoring(number: signal.Signals) -> Iterator[None]:
    """Processes started meanwhile begin with this signal ignored, as with a script's `&` and
    nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints; it must print one."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr and process.stderr.read()
    return line


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """The next process ids that ranks print as "pid N"."""
    pids: list[int] = []
    while len(pids) < count:
        line = read_line(process)
        if " pid " in line:
            pids.append(int(line.split()[-1]))
    return pids


def plain_environment() -> dict[str, str]:
    """The environment without variables that change how programs start and log; but programs of a
    watched test run are watched."""
    ours = ("UNISONO_", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "NO_COLOR", "MASTER_", "RANK")
    ours += ("WORLD_SIZE", "LOCAL_RANK")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) or name.startswith("UNISONO_WATCH")
    }


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def lives(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    return not state_of(pid).has_ended
