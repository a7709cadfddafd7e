"""Who reads from a terminal, and hears its Ctrl-C: the process group in its foreground."""

from __future__ import annotations

import contextlib
import os
import signal


def take(terminal_fd: int) -> int | None:
    """Come to the foreground: the group that was there, None where there is no terminal of ours."""
    try:
        before = os.tcgetpgrp(terminal_fd)
        give(terminal_fd, os.getpgrp())
    except OSError:
        return None
    return before


def give(terminal_fd: int, group: int) -> None:
    """Bring a group to the foreground; also from the background, for which the kernel stops those
    who do not say that they know."""
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(terminal_fd, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def take_back(group: int) -> None:
    """Come back to the foreground of our terminal where a group that has ended was in it."""
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(0) == group:
            give(0, os.getpgrp())
