"""The process that ranks are forked from. It has done the slow imports, and it has a single thread,
so that forking is safe here; in the controller, where tests run, it would not be.

It runs as a script, so that none of our modules is loaded before pytest can rewrite assertions.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

CHANNEL = "UNISONO_TEST_CHANNEL"
"""The environment variable that tells a rank the descriptor of its socket."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the controller closes the connection. Arguments: a descriptor, its pid, modules
    to import."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    _end_with_parent(int(sys.argv[2]))
    gc.disable()
    for name in sys.argv[3:]:
        with contextlib.suppress(Exception):  # the tests will show the error
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # otherwise every rank's first collection would touch, and copy, all of it
    wakeup, woken = socket.socketpair()
    for end in (wakeup, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(4096)
            _tell_of_ends(children)
        if control in ready:
            request, descriptors, *_ = socket.recv_fds(control, 16, 4)
            if not request:
                return
            channel, status, *output = descriptors
            me = os.getpid()
            child = os.fork()
            if child == 0:
                for other in (control, wakeup, woken):
                    other.close()
                for descriptor in (status, *children.values()):
                    os.close(descriptor)
                _become_a_rank(me, channel, output)
            for descriptor in (channel, *output):
                os.close(descriptor)
            children[child] = status
            control.send(str(child).encode())


def _tell_of_ends(children: dict[int, int]) -> None:
    """Write the exit status of each ended child to where the controller reads it."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        descriptor = children.pop(child)
        with contextlib.suppress(OSError):
            os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(descriptor)


def _become_a_rank(parent: int, descriptor: int, output: list[int]) -> NoReturn:
    """Drop everything of the nursery and become a pytest session."""
    os.setpgid(0, 0)  # the controller handles Ctrl-C
    _end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for output_fd in output:
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
    with Connection(os.dup(descriptor)) as channel:
        argv, environment, folder = channel.recv()
    os.environ.clear()
    os.environ.update(environment)
    os.environ[CHANNEL] = str(descriptor)
    os.chdir(folder)
    sys.argv[:] = argv
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # otherwise all ranks would draw the same random numbers
    import pytest

    code = pytest.main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: an orderly exit with torch loaded is slow, and threads may linger


def _end_with_parent(parent: int) -> None:
    """A copy of the one in unisono.processes: pytest must come before `import unisono`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
