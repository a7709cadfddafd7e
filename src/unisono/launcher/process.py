"""One rank's process: how it is started, and what is known of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from unisono.errors import UnisonoError
from unisono.launcher import terminal
from unisono.launcher.output import Lines, Stream
from unisono.launcher.protocol import STACK_SIGNAL, Failure
from unisono.processes import handles_signal

_KILLED_S = 10.0


class RankProcess(Protocol):
    """A rank's process, on this machine or another one, as those see it who look after it."""

    @property
    def readers(self) -> Sequence[int]:
        """Our ends of its stdout, its stderr, its results and its stacks; whoever reads them closes
        them."""

    @property
    def end_fd(self) -> int | None:
        """Readable once the process has ended; None where the system cannot tell so."""

    @property
    def group(self) -> int | None:
        """Its process group on this machine; None on another one."""

    @property
    def lost(self) -> str:
        """Why nobody knows how it ended ("was lost with its node"); "" as a rule."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and to what it has started."""

    def ask_for_stack(self) -> bool:
        """Have the process write down where it is. False where its program does not let it."""

    def find_status(self) -> int | None:
        """As subprocess has exit codes, negative for a signal; None while the process lives."""

    def forget(self) -> None:
        """It has ended, all is known of it, and its number may be another's."""


@dataclass
class Rank:
    """One rank's process, and what is known of it."""

    number: int
    process: RankProcess
    lines: dict[Stream, Lines]
    pipes: list[int]
    """Those of `process.readers` that are open."""
    host: str = ""
    """Where there may be several."""
    messages: bytearray = field(default_factory=bytearray)
    stack: bytearray = field(default_factory=bytearray)
    started: bool = False
    value: bytearray | None = None
    failure: Failure | None = None
    failed_at: float | None = None
    exit_code: int | None = None
    """As subprocess has it: negative for a signal; None while the process lives."""
    ended_by_us: bool = False


class LocalProcess:
    """A RankProcess on this machine: the leader of a process group."""

    lost = ""

    def __init__(self, process: subprocess.Popen[bytes], readers: Sequence[int]) -> None:
        self._process = process
        self.group = process.pid
        self.readers = readers
        self.end_fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel
            self.end_fd = os.pidfd_open(process.pid)

    def send_signal(self, number: int) -> None:
        """To what stayed in the process group, that is. Nothing happens once the process is
        forgotten."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.group, number)
            except ProcessLookupError:  # it has left its group
                os.kill(self.group, number)

    def ask_for_stack(self) -> bool:
        """A program may have given every signal its default back, as Lightning's Trainer does, and
        would die of this one."""
        if self._process.returncode is not None or not handles_signal(self.group, STACK_SIGNAL):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.group, STACK_SIGNAL)
        return True

    def find_status(self) -> int | None:
        """Its number stays its own until it is forgotten."""
        ended = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def forget(self) -> None:
        """Let the system forget it, too. One that was killed may need a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        terminal.take_back(self.group)
        if self.end_fd is not None:
            os.close(self.end_fd)
            self.end_fd = None


def start_process(
    number: int, environment: Mapping[str, str], instructions_fd: int, inherit: Sequence[int] = ()
) -> LocalProcess:
    """Start the process of a rank; it reads its instructions and inherits these descriptors."""
    pipes: list[tuple[int, int]] = []
    try:
        pipes.extend(os.pipe() for _ in range(4))
        readers, (out, err, results, stacks) = zip(*pipes, strict=True)
        numbers = (number, os.getpid(), instructions_fd, results, stacks)
        process = subprocess.Popen(
            python_command("unisono.launcher.child", *numbers),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(instructions_fd, results, stacks, *(fd for fd in inherit if fd >= 0)),
            process_group=0,  # so that it can be ended with all that it started
        )
    except OSError as error:
        for reader, _ in pipes:
            os.close(reader)
        raise UnisonoError(f"rank {number} could not be started: {error.strerror}") from error
    finally:
        for _, writer in pipes:
            os.close(writer)
    return LocalProcess(process, readers)


def python_command(module: str, *numbers: int) -> list[str]:
    """The command that calls `module`'s main in a new interpreter with this one's options."""
    if not sys.executable:
        raise UnisonoError("there is no Python interpreter to start ranks with (sys.executable)")
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    folder = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({folder!r}); from {module} import main; main()"
    return [sys.executable, *options, "-c", code, *map(str, numbers)]
