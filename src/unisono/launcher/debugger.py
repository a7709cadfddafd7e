"""`breakpoint()` in a rank: a debugger on the launching process's standard input.

One rank at a time has it; other ranks at a breakpoint wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pdb
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from unisono.errors import UnisonoError
from unisono.launcher.process import bring_to_foreground

_RUNNING_S = 1.0
"""If a command lets the program run for longer than this, another rank gets the debugger: the
program may wait for that rank."""
_EXCLUSIVE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""A struct flock for the whole file. Ranks that meet in the file lock it by flock(2), which does
not see this lock."""


def debug(frame: FrameType, rank: int, input_fd: int, turn_fd: int) -> None:
    """Stop at `frame` and read commands from `input_fd`, the launching process's standard input.
    `turn_fd` is a file that all ranks have inherited.

    Raises UnisonoError if there is nothing to read from.
    """
    if not _can_be_read(input_fd):
        raise UnisonoError(
            f"breakpoint() in rank {rank}, {_location(frame)}: the debugger needs a terminal or a "
            "pipe as the launching process's standard input: start it from a terminal, or skip "
            "breakpoints with PYTHONBREAKPOINT=0"
        )
    _Debugger(rank, input_fd, _turn(turn_fd, input_fd)).set_trace(frame)


class _Turn:
    """The right to debug, one per launch: a lock on a file, and the terminal."""

    def __init__(self, turn_fd: int, input_fd: int) -> None:
        self._turn_fd, self._input_fd = turn_fd, input_fd
        self._held: int | None = None
        self._terminal_was: int | None = None
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, frame: FrameType | None) -> None:
        with self._lock:
            self._taken += 1
            if self._held is not None:
                return
            # reopened: with the inherited descriptor all ranks would hold the same lock
            held = os.open(f"/proc/self/fd/{self._turn_fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                try:
                    fcntl.fcntl(held, fcntl.F_OFD_SETLK, _EXCLUSIVE)
                except BlockingIOError:
                    print(f"breakpoint(): {_location(frame)}: waits until the debugger is free")
                    fcntl.fcntl(held, fcntl.F_OFD_SETLKW, _EXCLUSIVE)
            except BaseException:
                os.close(held)
                raise
            self._held = held
            with contextlib.suppress(OSError):  # a pipe, or not our terminal
                before = os.tcgetpgrp(self._input_fd)
                bring_to_foreground(self._input_fd, os.getpgrp())
                self._terminal_was = before

    def leave(self, taken: int | None = None) -> None:
        """At once; with `taken`, unless it has been taken again since."""
        with self._lock:
            if taken not in (None, self._taken):
                return
            if self._terminal_was is not None:
                with contextlib.suppress(OSError):
                    bring_to_foreground(self._input_fd, self._terminal_was)
            if self._held is not None:
                os.close(self._held)
            self._held = self._terminal_was = None

    def leave_soon(self) -> None:
        """Unless another command is read soon."""
        timer = threading.Timer(_RUNNING_S, self.leave, [self._taken])
        timer.daemon = True
        timer.start()


_turn = functools.cache(_Turn)


class _Debugger(pdb.Pdb):
    def __init__(self, rank: int, input_fd: int, turn: _Turn) -> None:
        output: Any = sys.stdout
        if os.isatty(input_fd):  # prompts do not end with a newline
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY
            output = os.fdopen(os.open(os.ttyname(input_fd), flags), "w")
        super().__init__(
            stdin=_Lines(input_fd),  # type: ignore[arg-type]
            stdout=output,
            nosigint=True,
            skip=["unisono.launcher.*"],
        )
        self.prompt = f"(Pdb rank {rank}) "
        self._rank, self._turn = rank, turn

    def interaction(self, frame: FrameType | None, *args: Any, **keywords: Any) -> None:
        self._turn.take(frame)
        try:
            super().interaction(frame, *args, **keywords)
        finally:
            self._turn.leave_soon()

    def set_continue(self) -> None:
        super().set_continue()
        self._turn.leave()

    def set_quit(self) -> None:
        super().set_quit()
        self._turn.leave()

    def do_EOF(self, arg: str) -> NoReturn:
        """There is nothing more to read."""
        self._turn.leave()
        raise UnisonoError(
            f"breakpoint() in rank {self._rank}: the launching process's standard input has ended"
        )


class _Lines:
    """Lines of a descriptor, none of which is read before it is asked for: the next may be
    another rank's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readline(self) -> str:
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._descriptor, 1)):
            line += byte
        return line.decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")


def _can_be_read(descriptor: int) -> bool:
    try:
        kind = os.fstat(descriptor)
    except OSError:
        return False
    return os.isatty(descriptor) or not stat.S_ISCHR(kind.st_mode)


def _location(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
