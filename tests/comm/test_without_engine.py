"""Without the engine, everything that does not need it still works."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["unisono._native"] = None  # as where it was not built
import torch, unisono

def attempt(call):
    try:
        return call()
    except Exception as error:
        print(type(error).__name__, error)
"""
STARTS = """
for start in (
    lambda: unisono.init(),
    lambda: unisono.init(rank=0, size=2, rendezvous="nowhere/meeting"),
    lambda: unisono.get_world(),
    lambda: unisono.Communicator.join("alone", 0, 1),
):
    attempt(start)
"""
HELPERS = """
x = torch.tensor([1.0, 2.0])
mean, everyone = unisono.reduce_tensor(x), unisono.gather_tensor(x)
sent = unisono.broadcast_tensor(x)
mean += 1  # the copies are independent
everyone[0] += 2
print(x.tolist(), mean.tolist(), everyone[0].tolist(), sent is x)
print(unisono.get_rank(), unisono.get_world_size(), unisono.is_main_process())
print(unisono.is_distributed(), unisono.get_device(), unisono.barrier())
works = unisono.reduce_tensor(x, "sum", async_op=True), unisono.gather_tensor(x, async_op=True)
print(works[0].wait().tolist(), works[1].wait()[0].tolist(), unisono.barrier(async_op=True).wait())
attempt(lambda: unisono.reduce_tensor(torch.tensor([1])))
attempt(lambda: unisono.reduce_tensor(x, unisono.PremulSum(2.0)))
unisono.init("gloo").barrier()
print(unisono.get_backend(), unisono.reduce_tensor(x).tolist())
"""
REASON = "EngineUnavailable the native engine is not available"


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_group_says_what_is_missing() -> None:
    lines = run(WITHOUT + STARTS)
    assert len(lines) == 4
    for line in lines:
        assert line.startswith(REASON)
        assert "`make native` in a source tree" in line


def test_a_process_that_is_not_distributed_has_the_helper_functions() -> None:
    *lines, wrong, scaled, backend = run(WITHOUT + HELPERS)
    assert lines == [
        "[1.0, 2.0] [2.0, 3.0] [3.0, 4.0] True",
        "0 1 True",
        "False cpu None",
        "[1.0, 2.0] [1.0, 2.0] None",
    ]
    assert wrong.startswith("TypeError avg is not defined for int64")
    assert scaled.startswith(REASON)  # not a wrong number
    assert backend == "gloo [1.0, 2.0]"


def test_the_package_imports_no_torch() -> None:
    assert run("import sys, unisono; print('torch' in sys.modules)") == ["False"]
