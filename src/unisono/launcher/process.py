"""One rank's process: how it is started, and what is known of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launcher.output import Lines, Stream
from unisono.launcher.protocol import Failure


@dataclass
class Rank:
    """One rank's process, and what is known of it."""

    number: int
    process: subprocess.Popen[bytes]
    lines: dict[Stream, Lines]
    pipes: list[int]
    """Our ends of its stdout, its stderr, its results and its stacks, as long as they are open."""
    pidfd: int | None = None
    messages: bytearray = field(default_factory=bytearray)
    stack: bytearray = field(default_factory=bytearray)
    started: bool = False
    value: bytearray | None = None
    failure: Failure | None = None
    failed_at: float | None = None
    exit_code: int | None = None
    """As subprocess has it: negative for a signal; None while the process lives."""
    ended_by_us: bool = False

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, which must not have been waited for, and to its children.

        Those, at least, that stayed in its process group.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:  # it has left its group
                os.kill(self.process.pid, number)


def start_rank(
    number: int,
    lines: dict[Stream, Lines],
    environment: Mapping[str, str],
    instructions_fd: int,
    inherit: Sequence[int],
) -> Rank:
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
    return Rank(number, process, lines, list(readers))


def python_command(module: str, *numbers: int) -> list[str]:
    """The command that calls `module`'s main in a new interpreter with this one's options."""
    if not sys.executable:
        raise UnisonoError("there is no Python interpreter to start ranks with (sys.executable)")
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    folder = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({folder!r}); from {module} import main; main()"
    return [sys.executable, *options, "-c", code, *map(str, numbers)]
