"""Ends what ranks have started when the launching process is killed and cannot do it any more.

The kernel kills the ranks themselves then (`end_with_parent`), but not their children.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from unisono.errors import UnisonoError

_SCRIPT = str(Path(__file__).with_name("guard_process.py"))


class Guardian:
    """A small process in a session of its own, which outlives the one that started it by as much
    as it takes to kill the process groups that it was last told of."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", _SCRIPT, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise UnisonoError(
                f"the process that guards the ranks could not be started: {error.strerror}"
            ) from error

    def guard(self, groups: Iterable[int]) -> None:
        """From now on kill these process groups, and no others, if we are killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has ended it: then nobody guards
            self._process.stdin.write((" ".join(map(str, groups)) + "\n").encode())

    def close(self) -> None:
        """There is nothing to guard any more."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
