"""Groups of torch on "unisono": subgroups, meshes, functional collectives, timeouts, hosts."""

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
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from torch_names import functional_all_gather, functional_reduce_scatter
from unisono.comm.rendezvous import discovery
from unisono.errors import CollectiveTimeout, RendezvousError


def total(group: Any) -> float:
    """The sum of the global ranks of a group's members."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


@pytest.mark.ranks(4)
def test_subgroups(process_group: Any) -> None:
    rank = dist.get_rank()
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    assert total(mine) == (1.0 if rank < 2 else 5.0)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert total(mine) == 3.0
    some = dist.new_group([3, 1])
    if rank in (1, 3):
        assert dist.get_process_group_ranks(some) == [1, 3]
        assert total(some) == 4.0
        assert dist.get_group_rank(some, 3) == 1
    assert total(None) == 6.0


@pytest.mark.ranks(4)
def test_a_mesh_has_a_group_for_each_row_and_column(process_group: Any) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert total(mesh.get_group("columns")) == (1.0 if rank < 2 else 5.0)
    assert total(mesh["rows"].get_group()) == (2.0 if rank % 2 == 0 else 4.0)
    flat = mesh["rows", "columns"]._flatten("all")
    assert total(flat.get_group()) == 6.0


@pytest.mark.ranks(2)
def test_torch_splits_no_groups_of_cpu_tensors(process_group: Any) -> None:
    with pytest.raises(RuntimeError):
        dist.split_group(None, [[0], [1]])
    assert total(None) == 1.0


@pytest.mark.ranks([1, 2, 3])
def test_functional_collectives(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    tensor = torch.full((size, 2), float(rank + 1))
    summed = sum(range(1, size + 1))
    assert functional.all_reduce(tensor, "sum", group).eq(summed).all()
    gathered = functional_all_gather(tensor[:1], 0, group)
    assert gathered[:, 0].tolist() == [peer + 1.0 for peer in range(size)]
    scattered = functional_reduce_scatter(tensor, "avg", 0, group)
    assert torch.equal(scattered, torch.full((1, 2), summed / size))
    assert functional.broadcast(tensor, 0, group).eq(1).all()
    turned = functional.all_to_all_single(tensor, None, None, group)
    assert turned[:, 0].tolist() == [peer + 1.0 for peer in range(size)]
    one, two = functional.all_reduce_coalesced([tensor, tensor[:, :1]], "max", group)
    assert one.eq(size).all()
    assert two.eq(size).all()


@pytest.mark.ranks(2)
def test_gradients_pass_through_functional_collectives(process_group: Any) -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    output = functional.all_gather_tensor_autograd(weight * dist.get_rank(), 0, dist.group.WORLD)
    (output * 1.0).sum().backward()  # torch 2.11 takes no expanded gradient
    assert weight.grad is not None
    assert float(weight.grad) == 2.0 * dist.get_rank()


@pytest.mark.ranks(2)
def test_a_process_group_is_made_again_in_the_same_process(
    process_group: Any, shared_tmp_path: Path
) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    descriptors = []
    for number in range(5):
        store = dist.FileStore(str(shared_tmp_path / f"store-{number}"), 2)
        dist.init_process_group("unisono", store=store, rank=rank, world_size=2)
        assert total(None) == 1.0
        assert total(dist.new_group([0, 1])) == 1.0
        dist.destroy_process_group()
        del store
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[1]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(shared_tmp_path / "gloo"), 2),
        rank=rank,
        world_size=2,
    )
    assert total(None) == 1.0


@pytest.mark.ranks(2)
def test_the_timeout_of_init_counts_for_joining(process_group: Any, tmp_path: Path) -> None:
    """Each rank waits for the other at a place of its own."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"did not come within 0\.4 s"):
        init(tmp_path / "alone", rank, timeout_s=0.4)
    assert 0.4 <= time.monotonic() - start < 2
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_a_group_has_a_timeout_of_its_own(process_group: Any) -> None:
    brief = dist.new_group(timeout=timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            dist.barrier(group=brief)
    assert total(None) == 1.0


def init(path: Path, rank: int, timeout_s: float) -> None:
    dist.init_process_group(
        "unisono",
        store=dist.FileStore(str(path), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )


@pytest.mark.ranks(2)
def test_a_rank_on_another_host_is_told_which_backend_to_use(
    process_group: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, here = dist.get_rank(), socket.gethostname()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        monkeypatch.setattr(discovery, "boot_id", lambda: "ffffffff-ffff-ffff-ffff-ffffffffffff")
        monkeypatch.setattr(socket, "gethostname", lambda: "faraway")
    start = time.monotonic()
    with pytest.raises(RendezvousError) as raised:
        init(shared_tmp_path / "apart", rank, timeout_s=20)
    assert time.monotonic() - start < 5
    text = str(raised.value)
    assert f"host {here}" in text
    assert "host faraway" in text
    assert "gloo" in text
