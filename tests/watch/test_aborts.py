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
    "another thread runs": ("ctypes.CDLL(None).abort()", "told\n", 0.0, 1.9),
    "no other thread runs": ("ctypes.PyDLL(None).abort()", "", 2.0, 5.0),
    "let go": ("native.hold_aborts(False); ctypes.PyDLL(None).abort()", "", 0.0, 1.9),
    "a forked child": (
        "child = os.fork() or ctypes.PyDLL(None).abort()\n"
        "print(os.waitpid(child, 0)[1] & 127, native.hold_aborts(False), flush=True)\n"
        "ctypes.PyDLL(None).abort()",
        "6 False\n",
        0.0,
        1.9,
    ),
}


@pytest.mark.parametrize("how", ABORTS)
def test_an_abort_waits_until_the_others_have_been_told(how: str) -> None:
    program, said, least_s, most_s = ABORTS[how]
    python = f"{PROGRAM}\nprint('begun', flush=True)\n{program}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", python], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    since = time.monotonic()
    output, errors = process.communicate(timeout=60)
    assert least_s <= time.monotonic() - since < most_s
    assert process.returncode == -signal.SIGABRT
    assert output == said
    assert "Fatal Python error: Aborted" in errors, "faulthandler was there before us"
