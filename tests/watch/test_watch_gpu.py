"""Watched nccl: needs a GPU; one rank is enough."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from unisono import watch
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import Record
from user_programs import eventually

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and nccl"
)


@pytest.fixture(autouse=True)
def _watched_nccl() -> Iterator[None]:
    watch.start(hang_s=0.5)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    watch.stop()


def records() -> list[Record]:
    (group,) = [known for known in read_process(os.getpid()) if known.name == "world"]
    assert group.backend == "nccl"
    return list(group.ranks[0].records)


def keep_busy(seconds: float) -> None:
    """Keep the GPU busy first."""
    torch.cuda._sleep(int(seconds * 2e9))


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_is_under_way_until_the_gpu_has_done_it(async_op: bool) -> None:
    tensor = torch.arange(5.0, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert eventually(lambda: records()[-1].state == "finished")
    keep_busy(2)
    work = dist.all_reduce(tensor, async_op=async_op)
    assert (work is not None) == async_op
    time.sleep(0.3)
    newest = records()[-1]
    assert (newest.state, newest.operation) == ("waiting", "all_reduce"), newest
    assert "test_watch_gpu.py" in (newest.site or "")
    if work is not None:
        work.wait()
    torch.cuda.synchronize()
    assert eventually(lambda: records()[-1].state == "finished")
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert watch.reports() == []  # all ranks have arrived: none is late


def test_ddp_is_recorded() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).cuda())
    before = len(records())
    model(torch.ones(4, 3, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    made = records()[before:]
    assert [record.operation for record in made] == ["all_reduce"], made
    assert made[0].bytes == 8 * 4


def test_a_cuda_graph_is_captured_and_replayed() -> None:
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        dist.all_reduce(tensor)
        time.sleep(0.5)  # the watching thread checks meanwhile
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [4, 4, 4, 4]
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert eventually(lambda: all(record.state == "finished" for record in records()))
