"""A user's program as mypy and pyright see it: what is right, what is wrong, what type it has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import numpy
import numpy.typing
import torch
import torch.distributed as dist

import unisono
from unisono import Communicator, Message, PremulSum, ProcessGroupManager, Work

Array = numpy.typing.NDArray[numpy.float64]


@dataclass
class Metrics:
    loss: float
    hits: torch.Tensor


class Batch(TypedDict):
    ids: torch.Tensor


def right(comm: Communicator, x: torch.Tensor, a: Array, flag: bool, batch: Batch) -> None:
    assert_type(unisono.all_reduce(x), torch.Tensor)
    assert_type(unisono.all_reduce(a), Array)
    assert_type(unisono.all_reduce(0.5), float)
    assert_type(unisono.all_reduce({"loss": 0.5}), dict[str, float])
    assert_type(unisono.all_reduce(Metrics(0.5, x)), Metrics)
    assert_type(unisono.all_reduce(batch), Batch)
    assert_type(unisono.all_reduce(x, async_op=True), Work[torch.Tensor])
    assert_type(unisono.all_reduce(x, async_op=True).wait(), torch.Tensor)
    assert_type(unisono.all_reduce(x, async_op=flag), torch.Tensor | Work[torch.Tensor])
    unisono.all_reduce(x, "prod", dist.group.WORLD, out=x, algorithm="ring")
    unisono.all_reduce(x, dist.ReduceOp.SUM, dist.new_group([0]))
    unisono.all_reduce(x, PremulSum(0.5), comm)
    assert_type(unisono.reduce(x, root=1), torch.Tensor | None)
    assert_type(unisono.broadcast(x, root=1, async_op=True), Work[torch.Tensor])
    assert_type(unisono.scatter([x, x], root=1, async_op=flag), torch.Tensor | Work[torch.Tensor])
    assert_type(unisono.broadcast([x, x]), list[torch.Tensor])
    assert_type(unisono.all_gather(x), list[torch.Tensor])
    assert_type(unisono.all_gather(a, async_op=True).wait(), list[Array])
    assert_type(unisono.all_gather(x, out=x), torch.Tensor)
    assert_type(unisono.gather(x), list[torch.Tensor] | None)
    assert_type(unisono.scatter([x, x] if flag else None), torch.Tensor)
    assert_type(unisono.scatter(), torch.Tensor)
    assert_type(unisono.reduce_scatter([x, x], "mean"), torch.Tensor)
    assert_type(unisono.reduce_scatter(a), Array)
    assert_type(unisono.all_to_all(x), torch.Tensor)
    assert_type(unisono.all_to_all([x, x]), list[torch.Tensor])
    assert_type(unisono.recv(a), Array)
    assert_type(unisono.irecv(x).wait(), torch.Tensor)
    assert_type(unisono.irecv(x).source_rank(), int)
    assert_type(unisono.reduce_tensor(x, async_op=True), Work[torch.Tensor])
    assert_type(unisono.gather_tensor(x), list[torch.Tensor] | None)
    assert_type(unisono.broadcast_tensor(x), torch.Tensor)
    assert_type(unisono.all_gather_object("text"), list[str])
    assert_type(unisono.math.softmax(x, dim=1), torch.Tensor)
    assert_type(unisono.differentiable.all_reduce(x), torch.Tensor)
    assert_type(unisono.barrier(async_op=True).wait(), None)
    unisono.barrier()
    unisono.batch_isend_irecv([Message("send", x, comm.next)])
    assert_type(comm.all_reduce(x, "max", async_op=True), Work[None])
    assert_type(comm.all_reduce([x, a], async_op=flag), Work[None] | None)
    assert_type(comm.barrier(async_op=True), Work)
    comm.all_reduce(x, dist.ReduceOp.MAX, algorithm="ring")
    assert_type(comm.reduce(x, dst=1, op=dist.ReduceOp.MAX, async_op=True), Work[None])
    assert_type(comm.broadcast(x, src=1, async_op=flag), Work[None] | None)
    assert_type(comm.gather(None, x, dst=1, async_op=True), Work[None])
    comm.scatter(x, [x, x], src=1)
    comm.scatter(x, root=1)
    comm.all_gather([x, x], x)
    assert_type(comm.split([0]), Communicator | None)
    assert_type(unisono.init(), Communicator)
    assert_type(unisono.get_world(), Communicator)
    assert_type(unisono.get_rank(), int)
    assert_type(unisono.get_device(1), torch.device)
    assert_type(unisono.launch(unisono.get_rank, 2), list[int])
    with ProcessGroupManager(tp_size=2) as manager:
        assert_type(manager.tp, Communicator)
        assert_type(manager.tp_rank, int)
    try:
        comm.barrier()
    except unisono.PeerLost as lost:
        assert_type(lost.peer, int)
    unisono.watch.start(hang_s=30)


def wrong(comm: Communicator, x: torch.Tensor) -> None:
    unisono.nosuch()  # wrong
    unisono.all_reduce()  # wrong
    unisono.get_rank() + "text"  # wrong
    unisono.all_reduce(x, "summ")  # wrong
    unisono.reduce_scatter(x, op="summ")  # wrong
    comm.all_reduce(x, "summ")  # wrong
    comm.broadcast(x, dst=1)  # wrong
    comm.gather(None, x, src=1)  # wrong
    comm.all_gather(x)  # wrong
    unisono.reduce(x, src=1)  # wrong
    unisono.differentiable.all_reduce(x, "summ")  # wrong
    work = unisono.all_reduce(x, async_op=True)
    work.sum()  # wrong
    torch.relu(work)  # wrong
    unisono.broadcast(work)  # wrong
    unisono.math.softmax(work)  # wrong
    unisono.send(work, 1)  # wrong
    comm.all_reduce(work)  # wrong
    unisono.reduce_tensor(x, async_op=True).item()  # wrong
    comm.all_reduce(x).wait()  # wrong
    Message("sent", x, 1)  # wrong
    unisono.all_reduce(x, asyncop=True)  # wrong
    unisono.watch.begin()  # wrong
    unisono.debug("loud")  # wrong
    reduced = unisono.reduce(x)
    reduced.sum()  # wrong
"""

WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def check(found: dict[int, str]) -> None:
    """Every wrong line is found, and no other."""
    surprising = {line: said for line, said in found.items() if line not in WRONG}
    assert not surprising
    lines = PROGRAM.splitlines()
    assert not [lines[number - 1] for number in sorted(WRONG - found.keys())], "not found"


@pytest.mark.types
def test_mypy(program: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    # The cache of `make check`, without which torch would take it a minute.
    mypy = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--strict"]
    done = subprocess.run(
        [*mypy, "--no-error-summary", "--no-pretty", str(program)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    print(done.stdout, done.stderr)
    # From its cache mypy may repeat its output for the same program in another folder.
    pattern = re.compile(r".*/program\.py:(\d+): error: (.*)")
    matches = [pattern.match(line) for line in done.stdout.splitlines()]
    check({int(match[1]): match[2] for match in matches if match})


@pytest.mark.types
def test_pyright(program: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    (program.parent / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "src")]})
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=program.parent,
    )
    print(done.stdout, done.stderr)
    said = json.loads(done.stdout)["generalDiagnostics"]
    errors = [entry for entry in said if entry["severity"] == "error"]
    check({entry["range"]["start"]["line"] + 1: entry["message"] for entry in errors})
