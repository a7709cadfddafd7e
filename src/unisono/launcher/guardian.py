"""Kills the ranks' child processes if the launching process is killed and cannot do it.

The kernel then kills the ranks themselves (`end_with_parent`), but not their children. This file
runs as a script in a process of its own, so it imports little: it starts with every launch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys


class Guardian:
    """A small process in its own session. It outlives the launching process just long enough to
    kill the process groups that it was last told of."""

    def __init__(self) -> None:
        import subprocess

        from unisono.errors import UnisonoError

        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
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

    def guard(self, groups: list[int]) -> None:
        """If this process is killed, kill these process groups and no others."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: there is no guard then
            self._process.stdin.write((" ".join(map(str, groups)) + "\n").encode())

    def close(self) -> None:
        """There is nothing to guard any more."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def main() -> None:
    """Guard the process whose pid is the first argument. It writes lines of process groups to our
    stdin; the last line counts."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # an old kernel, or the process is gone: the pipe will tell
        poller.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN)
    text, groups, gone = b"", b"", False
    while not gone:
        gone = True
        if any(descriptor == 0 for descriptor, _ in poller.poll()):  # read what it wrote first
            data = os.read(0, 1 << 16)
            *lines, text = (text + data).split(b"\n")
            groups = lines[-1] if lines else groups
            gone = not data
    for group in groups.split():
        with contextlib.suppress(OSError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main()
