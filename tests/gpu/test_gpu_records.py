"""Records of calls on CUDA tensors for `unisono top` and the watch: one per call, of what the
program called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from unisono.comm.communicator import Communicator
from unisono.comm.cuda.calls import STAGED_BYTES
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import Record
from user_programs import eventually

pytestmark = pytest.mark.ranks(2)


def newest_records(comm: Communicator, count: int) -> list[Record]:
    (known,) = [known for known in read_process(os.getpid()) if known.name == comm.name]
    return list(known.ranks[comm.rank].records)[-count:]


@pytest.mark.parametrize("count", [1000, 2 * STAGED_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("async_op", [False, True])
def test_every_call_leaves_one_record(comm: Communicator, count: int, async_op: bool) -> None:
    given = torch.ones(count, device="cuda")
    wide = torch.empty(2 * count, device="cuda")
    part = torch.empty(count // 2, device="cuda")
    comm.all_reduce(given)  # so that the ranks have met
    comm.barrier()
    works = [
        comm.all_reduce(given, async_op=async_op),
        comm.reduce(given, 1, "max", async_op=async_op),
        comm.broadcast(given, 0, async_op=async_op),
        comm.broadcast([given, part], 1, async_op=async_op),
        comm.all_gather(wide, given, async_op=async_op),
        comm.reduce_scatter(part, given, async_op=async_op),
        comm.all_to_all(torch.empty_like(given), given, async_op=async_op),
    ]
    for work in works:
        if work is not None:
            work.wait()
    torch.cuda.synchronize()
    comm.barrier()
    records = newest_records(comm, 9)
    assert [record.operation for record in records] == [
        *("barrier", "all_reduce", "reduce", "broadcast", "broadcast", "all_gather"),
        *("reduce_scatter", "all_to_all", "barrier"),
    ]
    calls = records[1:-1]
    assert {record.state for record in calls} == {"finished"}
    assert {record.dtype for record in calls} == {"float32"}
    assert [record.count for record in calls if record.operation != "broadcast"] == [count] * 5


def test_top_shows_a_call_on_cuda_tensors(comm: Communicator) -> None:
    tensor = torch.ones(2 * STAGED_BYTES, device="cuda")
    output = torch.empty(STAGED_BYTES, device="cuda")
    comm.reduce_scatter(output, tensor)

    def is_shown() -> bool:
        command = [sys.executable, "-m", "unisono", "top", "--once", "--json", str(os.getpid())]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return "reduce_scatter" in shown.stdout

    assert comm.rank or eventually(is_shown)  # the other rank waits for us in its call
    comm.reduce_scatter(output, tensor)
    comm.barrier()
