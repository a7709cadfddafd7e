"""Before abort() ends a process, its watch has a moment to tell others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, faulthandler, os, sys, threading, time
from unisono.comm.engine import native

faulthandler.enable()
native.hold_aborts(True)

def tell():
    while not native.hold_aborts(None):
        time.sleep(0.01)
    print("told", flush=True)
    native.hold_aborts(False)

threading.Thread(target=tell, daemon=True).start()
"""
ABORTS = {
    "another thread runs": ("ctypes.CDLL(None).abort()", "told\n", False),
    "no other thread runs": ("ctypes.PyDLL(None).abort()", "", True),
    "let go": ("native.hold_aborts(False); ctypes.PyDLL(None).abort()", "", False),
    "a forked child": (
        "child = os.fork() or ctypes.PyDLL(None).abort()\n"
        "print(os.waitpid(child, 0)[1] & 127, native.hold_aborts(False), flush=True)\n"
        "ctypes.PyDLL(None).abort()",
        "6 False\n",
        False,
    ),
}


LONGEST_S = 2.0
TRIES = 5  # a busy machine may take that long for anything, but not every time


@pytest.mark.parametrize("how", ABORTS)
def test_an_abort_waits_until_the_others_have_been_told(how: str) -> None:
    program, said, waits_longest = ABORTS[how]
    if waits_longest:
        assert seconds_to_abort(program, said) >= LONGEST_S
    else:
        assert any(seconds_to_abort(program, said) < LONGEST_S for _ in range(TRIES))


def seconds_to_abort(program: str, said: str) -> float:
    python = f"{PROGRAM}\nprint(time.monotonic(), flush=True)\n{program}\n"
    ended = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
    ended_s = time.monotonic()
    began_s, _, output = ended.stdout.partition("\n")
    assert ended.returncode == -signal.SIGABRT
    assert output == said
    assert "Fatal Python error: Aborted" in ended.stderr, "faulthandler was there before us"
    return ended_s - float(began_s)
