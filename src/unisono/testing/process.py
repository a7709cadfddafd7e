"""The controller's handles of the rank processes: start, talk to, and end them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from unisono.processes import ask_for_stack, describe_exit, start_python
from unisono.testing import nursery, protocol
from unisono.testing.rank import stacks_file

_PYTEST = re.compile(r'^  File ".*/(_pytest|pluggy)/')


_HEAVY = ("numpy", "torch", "torch._dynamo")
"""Modules that take seconds to import. DDP, FSDP and DTensor need the last: if the controller has
imported it, the nursery imports it once for all ranks."""


class Nursery:
    """The process that ranks are forked from; see nursery.py."""

    def __init__(self, folder: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        heavy = [name for name in _HEAVY if name in sys.modules]
        with theirs:
            self._process = start_python(
                *("-P", nursery.__file__, theirs.fileno(), os.getpid(), "pytest", *heavy),
                # One thread each, as under torchrun: ranks share the cores. A process that forks
                # must not run the watch's thread.
                environment={"OMP_NUM_THREADS": "1", **os.environ, "UNISONO_WATCH": "0"},
                inherit=[theirs.fileno()],
                cwd=folder,
            )

    def fork(self, channel: int, status: int, output: int | None) -> int:
        """A new process with these descriptors; returns its pid. Raises OSError."""
        descriptors = [channel, status] if output is None else [channel, status, output]
        socket.send_fds(self._control, [b"fork"], descriptors)
        pid = self._control.recv(16)
        if not pid:
            raise BrokenPipeError("the process that ranks are forked from has ended")
        return int(pid)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and with it the remaining ranks."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class PooledRank:
    """A process that runs tests. It has the controller's command line, folder and environment."""

    def __init__(self, number: int, config: pytest.Config, folder: Path, nursery: Nursery) -> None:
        self.number = number
        self.files: dict[str, str | None] = {}
        """The files that it has collected, and the error of each."""
        self._code: int | None = None
        self._log = folder / f"rank-{number}.log"
        self._stacks = stacks_file(str(folder), number)
        self._stacks.unlink(missing_ok=True)  # left by an earlier process with this number
        self.channel, theirs = Pipe()
        self.sentinel, status = os.pipe()
        self._end = select.poll()
        self._end.register(self.sentinel, select.POLLIN)
        shown = config.getoption("capture", "no") == "no"
        with theirs, open(status, "wb"), self._log.open("wb") as log:
            self._pid = nursery.fork(theirs.fileno(), status, None if shown else log.fileno())
        self.send((_command_line(config), dict(os.environ), str(config.invocation_params.dir)))
        given = _coverage_input(config) | getattr(config, "workerinput", {})
        paths, words = tuple(sys.path), tuple(sys.argv)
        self.send(protocol.Start(number, paths, words, str(folder), given))

    def send(self, message: object) -> None:
        """Send it a message; if it is gone, the wait for the answer will notice."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def answer(self, timeout_s: float) -> object:
        """Its next message; None if it is gone or late, Unable if the message cannot be read."""
        if timeout_s:
            wait([self.channel, self.sentinel], timeout_s)
        try:
            if not self.channel.poll():
                return None
            data = self.channel.recv_bytes()
        except (EOFError, OSError):
            return None
        try:
            return pickle.loads(data)
        except Exception as error:  # a class that only the rank can import
            text = "the controller cannot read the report"
            return protocol.Unable(text, repr(error), broken=True)

    def is_alive(self) -> bool:
        self.join(0.0)
        return self._code is None

    def join(self, timeout_s: float) -> None:
        if self._code is None and self._end.poll(1e3 * timeout_s):
            self._code = int(os.read(self.sentinel, 16) or -signal.SIGKILL)

    def end(self) -> None:
        """Kill it and the processes that its tests have started."""
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        self.join(5.0)
        self.channel.close()
        os.close(self.sentinel)

    def describe_end(self, late: str) -> protocol.Unable:
        """How it ended; `late` is the text if it is alive and only has not answered."""
        self.join(1.0)  # it closes the connection before it ends
        texts = [_without_pytest(_read(self._stacks)), _read(self._log).strip()]
        headline = late if self._code is None else f"the process {describe_exit(self._code)}"
        return protocol.Unable(headline, "\n".join(text for text in texts if text))

    def ask_for_stacks(self) -> None:
        os.truncate(self._stacks, 0)
        ask_for_stack(self._pid)

    def stacks(self) -> str:
        return _without_pytest(_read(self._stacks))


def let_write(ranks: Sequence[PooledRank]) -> None:
    """Wait until all have written their stacks, for at most a second."""
    end = time.monotonic() + 1.0
    before: list[str] = []
    while time.monotonic() < end:
        time.sleep(0.05)
        texts = [rank.stacks() for rank in ranks]
        if all(texts) and texts == before:
            return
        before = texts


def _coverage_input(config: pytest.Config) -> dict[str, object]:
    """What makes a rank's pytest-cov measure as a worker of pytest-xdist would, and save its data
    where ours combines it; empty where no coverage is measured."""
    measuring = getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)
    if measuring is None:
        return {}
    return {
        "cov_master_host": socket.gethostname(),
        "cov_master_topdir": measuring.topdir,
        "cov_master_rsync_roots": [],
    }


def _command_line(config: pytest.Config) -> list[str]:
    parameters = config.invocation_params
    plugins = ["unisono.testing.rank"]
    plugins += [name for name in parameters.plugins or () if isinstance(name, str)]
    # Or a rank that starts late would erase what others have saved.
    more = ["--cov-append"] if _coverage_input(config) else []
    return ["pytest", *(word for name in plugins for word in ("-p", name)), *more, *parameters.args]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _without_pytest(text: str) -> str:
    """Stacks as faulthandler writes them, without the frames of pytest beneath a test."""
    threads = []
    for thread in re.split(r"\n(?=\S)", text.strip()):
        lines = thread.split("\n")
        beneath = [number for number, line in enumerate(lines) if _PYTEST.search(line)]
        threads.append("\n".join(lines[: beneath[0]] if beneath and beneath[0] > 1 else lines))
    return "\n".join(threads)
