"""Without the engine, everything that does not need it still works."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys
sys.modules["unisono._native"] = None  # as where it was not built
import numpy, unisono
comm = unisono.init()
array = numpy.ones(3)
comm.all_reduce(array, unisono.PremulSum(2.0))
print(unisono.get_world_size(), array.tolist())
try:
    unisono.shutdown()
    unisono.init(rank=0, size=2, rendezvous="nowhere/meeting")
except unisono.EngineUnavailable as error:
    print("unavailable:", error)
"""


def test_one_rank_needs_no_engine_and_two_say_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=180, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "1 [2.0, 2.0, 2.0]"
    assert second.startswith("unavailable: the native engine is not available")


def test_the_package_imports_no_torch() -> None:
    code = "import sys, unisono; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == "False"
