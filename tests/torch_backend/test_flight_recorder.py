"""torch's Flight Recorder on our groups: what it records, and that it costs nothing when off."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_reductions_dtypes_layouts import check
from torch._C import _distributed_c10d

from torch_names import all_gather_single, reduce_scatter_single, since_2_15
from torch_parity.matrix import cases
from unisono.errors import CollectiveMismatch
from unisono.torch_backend.process_group import UnisonoProcessGroup

pytestmark = since_2_15


_last = -1


def entries() -> list[dict[str, Any]]:
    """What the recorder has recorded since the last call; there is one per process."""
    global _last
    dump = pickle.loads(_distributed_c10d._dump_fr_trace(backend="unisono"))
    new = [entry for entry in dump["entries"] if entry["record_id"] > _last]
    _last = new[-1]["record_id"] if new else _last
    return new


@pytest.fixture
def recorded(process_group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of all ranks that is recorded."""
    entries()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    return dist.new_group()


@pytest.mark.ranks(2)
def test_calls_are_recorded_by_name_and_size(recorded: Any) -> None:
    rank = dist.get_rank()
    tensor, wide = torch.ones(4), torch.zeros(8)
    dist.all_reduce(tensor, group=recorded)
    dist.broadcast(tensor, 0, group=recorded)
    all_gather_single(wide, tensor, group=recorded)
    reduce_scatter_single(tensor, wide, group=recorded)
    work = dist.all_reduce(tensor, group=recorded, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.result()[0] is tensor
    if rank == 0:
        dist.send(tensor, 1, group=recorded)
    else:
        dist.recv(tensor, 0, group=recorded)
    dist.barrier(group=recorded)
    found = entries()
    assert [entry["profiling_name"] for entry in found] == [
        "unisono:all_reduce",
        "unisono:broadcast",
        "unisono:_all_gather_base",
        "unisono:_reduce_scatter_base",
        "unisono:all_reduce",
        "unisono:send 0->1" if rank == 0 else "unisono:recv 1<-0",
        "unisono:barrier",
    ]
    assert found[0]["input_sizes"] == [[4]]
    assert all(entry["retired"] for entry in found)


@pytest.mark.ranks(2)
def test_a_call_that_failed_is_left_open(recorded: Any) -> None:
    dist.all_reduce(torch.ones(1), group=recorded)
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.ones(dist.get_rank() + 1), group=recorded)
    assert [entry["retired"] for entry in entries()] == [True, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_the_same(recorded: Any, shared_tmp_path: Path, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(shared_tmp_path / f"store-{async_op}"), size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
    check(list(cases())[::19], async_op)
    assert entries()


@pytest.mark.ranks(2)
def test_nothing_is_recorded_unasked(process_group: Any) -> None:
    entries()
    dist.all_reduce(torch.ones(1))
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    assert type(group) is UnisonoProcessGroup
    assert not entries()
