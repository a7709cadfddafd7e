"""Groups of torch.distributed on the backend "unisono": creating, naming, ending, starting
again."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from implementations import on_backends
from torch_names import all_gather_single, before_2_15, since_2_13, since_2_15
from unisono.comm.meeting import announcements as boards
from unisono.errors import GroupAborted, GroupClosed, RendezvousError, UnisonoError
from unisono.torch_backend import creation

RANKS = [1, 2, 3]


def count_ranks(group: Any = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def add_ranks(group: Any = None) -> float:
    """The sum of the global ranks of a group's members."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def init(path: Path, rank: int, size: int, backend: str = "unisono", **options: Any) -> None:
    store = dist.FileStore(str(path), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


# -- who is who ----------------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
def test_what_torch_knows_about_the_group(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "unisono"
    assert dist.get_backend_config() == "cpu:unisono,cuda:unisono"
    assert dist.get_process_group_ranks(process_group) == list(range(size))
    assert dist.get_group_rank(process_group, rank) == rank
    assert dist.get_global_rank(process_group, rank) == rank
    assert (process_group.rank(), process_group.size()) == (rank, size)
    assert (process_group.comm.rank, process_group.comm.size) == (rank, size)
    assert process_group.name() == "unisono"
    assert process_group._device_types == [torch.device("cpu")]
    assert dist.distributed_c10d._get_object_coll_device(process_group) == "cpu"
    assert f"rank {rank} of {size}" in repr(dist.group.WORLD)
    assert dist.get_pg_count() == 1
    config = dist.distributed_c10d._get_pg_config(process_group)
    assert config["backend_config"] == "cpu:unisono,cuda:unisono"


@before_2_15
def test_a_backend_for_another_device_is_refused() -> None:
    with pytest.raises(UnisonoError, match=r"new_group\(backend=\"unisono\"\)"):
        dist.init_process_group(
            "cpu:unisono,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1
        )


def test_torch_knows_the_name() -> None:
    assert dist.Backend("unisono") == "unisono"
    assert dist.Backend("UNISONO") == "unisono"
    assert dist.is_backend_available("unisono")
    assert dist.is_backend_available("cpu:unisono")
    assert "unisono" in dist.Backend.backend_list


@pytest.mark.ranks(2)
def test_a_group_s_description_is_kept(process_group: Any) -> None:
    group = dist.new_group(group_desc="pipeline")
    assert group.group_desc == "pipeline"
    assert group.group_name != process_group.group_name
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group


# -- subgroups -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Running all_reduce on global rank")
@pytest.mark.ranks([3, 4])
def test_a_subgroup_and_the_ranks_outside_it(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        assert dist.get_process_group_ranks(group) == [0, size - 1]
        assert dist.get_rank(group) == (0 if rank == 0 else 1)
        sent = torch.full((2,), float(rank))
        dist.broadcast(sent, src=size - 1, group=group)  # a rank of the world
        assert sent.eq(size - 1).all()
        dist.broadcast(sent, group_src=0, group=group)
        assert count_ranks(group) == 2
        parts = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
        dist.gather(torch.full((2,), float(rank)), parts, dst=0, group=group)
        if parts is not None:
            assert parts[1].eq(size - 1).all()
    else:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        dist.all_reduce(untouched := torch.ones(1), group=group)
        assert untouched.item() == 1
    assert count_ranks() == size


@pytest.mark.ranks(3)
def test_groups_whose_calls_interleave_in_different_orders(process_group: Any) -> None:
    rank = dist.get_rank()
    pairs = {pair: dist.new_group(list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}
    mine = [group for pair, group in pairs.items() if rank in pair]
    works = []
    tensors = []
    for round_ in range(20):
        for group in mine if round_ % 2 else reversed(mine):
            tensors.append(torch.ones(1000))
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
        assert count_ranks() == 3
    for work in reversed(works):
        work.wait()
    assert all(tensor.eq(2).all() for tensor in tensors)


@since_2_13
@pytest.mark.ranks(3)
def test_a_group_in_another_order_numbers_its_ranks_so(process_group: Any) -> None:
    rank = dist.get_rank()
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    assert dist.get_process_group_ranks(group) == [2, 0, 1]
    assert dist.get_rank(group) == [1, 2, 0][rank]
    wide = torch.zeros(3)
    all_gather_single(wide, torch.tensor([float(rank)]), group=group)
    assert wide.tolist() == [2, 0, 1]
    sorted_group = dist.new_group([2, 0, 1])
    assert dist.get_process_group_ranks(sorted_group) == [0, 1, 2]


@pytest.mark.ranks(3)
def test_a_group_that_only_its_members_make(process_group: Any) -> None:
    if dist.get_rank() > 0:
        group = dist.new_group([1, 2], use_local_synchronization=True)
        assert count_ranks(group) == 2
    dist.barrier()


@pytest.mark.ranks(4)
def test_groups_of_equal_size(process_group: Any) -> None:
    rank = dist.get_rank()
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    assert dist.get_process_group_ranks(mine) == ([0, 1] if rank < 2 else [2, 3])
    assert add_ranks(mine) == (1 if rank < 2 else 5)
    listed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert dist.get_process_group_ranks(listed) == ([0, 3] if rank in (0, 3) else [1, 2])
    assert add_ranks(listed) == 3
    some = dist.new_group([3, 1])
    if rank in (1, 3):
        assert dist.get_process_group_ranks(some) == [1, 3]
        assert dist.get_group_rank(some, 3) == 1
        assert add_ranks(some) == 4
    assert add_ranks() == 6


@pytest.mark.ranks(4)
def test_a_mesh_has_a_group_for_each_row_and_column(process_group: Any) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for group, peer in (
        (mesh.get_group("columns"), rank ^ 1),
        (mesh["rows"].get_group(), rank ^ 2),
    ):
        wide = torch.zeros(2)
        all_gather_single(wide, torch.tensor([float(rank)]), group=group)
        assert wide.tolist() == sorted([rank, peer])
    assert mesh["columns"].size() == 2
    flat = mesh["rows", "columns"]._flatten("all")
    assert (flat.size(), add_ranks(flat.get_group())) == (4, 6)


@pytest.mark.ranks(2)
def test_torch_splits_no_groups_of_cpu_tensors(process_group: Any) -> None:
    with pytest.raises(RuntimeError):
        dist.split_group(None, [[0], [1]])
    assert count_ranks() == 2


@on_backends(unisono=[2], gloo=[2])
def test_a_group_of_ours_beside_one_of_gloo(process_group: Any, backend: str) -> None:
    gloo = dist.new_group(backend="gloo")
    ours = dist.new_group(backend="unisono")
    assert (dist.get_backend(gloo), dist.get_backend(ours)) == ("gloo", "unisono")
    assert count_ranks(gloo) == count_ranks(ours) == count_ranks() == 2


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_end_of_a_subgroup_is_not_that_of_the_world(process_group: Any) -> None:
    group = dist.new_group()
    assert count_ranks(group) == 2
    dist.destroy_process_group(group)
    with pytest.raises((ValueError, GroupClosed)):
        count_ranks(group)
    assert count_ranks() == 2
    assert count_ranks(dist.new_group()) == 2


@pytest.mark.ranks(2)
def test_an_abort_ends_what_waits(process_group: Any) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        with pytest.raises(GroupAborted):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        group.abort()
        with pytest.raises(GroupAborted):
            dist.all_reduce(torch.ones(1), group=group)
    assert count_ranks() == 2
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


@pytest.mark.ranks(RANKS)
def test_a_process_may_start_again(process_group: Any, shared_tmp_path: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.new_group()
    dist.destroy_process_group()
    descriptors = []
    for number in range(5):
        assert not dist.is_initialized()
        init(shared_tmp_path / f"store-{number}", rank, size)
        assert count_ranks() == count_ranks(dist.new_group(range(size))) == size
        dist.destroy_process_group()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[1]
    init(shared_tmp_path / "gloo", rank, size, "gloo")
    assert count_ranks() == size


@pytest.mark.ranks(2)
def test_the_timeout_of_init_counts_for_joining(process_group: Any, tmp_path: Path) -> None:
    """Each rank waits for the other in its own folder."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"did not join within 0\.4 s"):
        init(tmp_path / "alone", rank, 2, timeout=timedelta(seconds=0.4))
    assert 0.4 <= time.monotonic() - start < 10
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_a_rank_on_another_host_is_told_which_backend_to_use(
    process_group: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, here = dist.get_rank(), socket.gethostname()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        monkeypatch.setattr(boards, "boot_id", lambda: "ffffffff-ffff-ffff-ffff-ffffffffffff")
        monkeypatch.setattr(socket, "gethostname", lambda: "faraway")
    start = time.monotonic()
    with pytest.raises(RendezvousError) as raised:
        init(shared_tmp_path / "apart", rank, 2, timeout=timedelta(seconds=20))
    assert time.monotonic() - start < 5
    text = str(raised.value)
    assert f"host {here}" in text
    assert "host faraway" in text
    assert "gloo" in text


def test_a_world_of_one_from_a_store_in_memory() -> None:
    make_two_worlds_of_one()


def test_a_torch_that_nobody_tried_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    creation._warn_if_untried.cache_clear()
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is newer than") as caught:
        make_two_worlds_of_one()
    assert len(caught) == 1
    creation._warn_if_untried.cache_clear()


def make_two_worlds_of_one() -> None:
    for _ in range(2):
        dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert count_ranks() == 1
            dist.barrier()
        finally:
            dist.destroy_process_group()


@since_2_15
@pytest.mark.ranks([2, 3])
def test_what_torch_2_15_asks_of_a_group(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend_impl() is process_group
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    dist.set_timeout(timedelta(seconds=30))
    assert process_group.comm.timeout_s == 30
    gathered = torch.zeros(size, 3) if rank == 1 else None
    dist.gather_single(torch.full((3,), float(rank)), gathered, dst=1)
    if gathered is not None:
        assert gathered.tolist() == [[float(member)] * 3 for member in range(size)]
