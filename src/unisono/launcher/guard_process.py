"""The process behind guardian.py: a script that needs nothing but the interpreter, to start fast.

It reads lines of process group numbers, of which the last one counts, and kills those groups when
the process that writes them is gone.
"""

import contextlib
import os
import select
import signal
import sys


def main() -> None:
    """Watch over the process whose number is the first argument; it writes to our stdin."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # an old kernel, or it is gone: then the pipe tells
        poller.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN)
    text, groups, gone = b"", b"", False
    while not gone:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if 0 in ready:  # what it wrote last comes before its end
            data = os.read(0, 1 << 16)
            *lines, text = (text + data).split(b"\n")
            groups = lines[-1] if lines else groups
            gone = not data
        else:
            gone = True
    for group in groups.split():
        with contextlib.suppress(OSError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main()
