"""DDP, FSDP2, DTensor and DeviceMesh for any placement of ranks: losses as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import Places, places, world
from namespaces import MakeNetwork
from torch import nn

import ranks
from ranks import RankPool

PLACEMENTS = {
    "1+3": (0, 1, 1, 1),
    "2+1+1": (0, 0, 1, 2),
    "cyclic": (0, 1, 0, 1),
    "cyclic on three": (0, 1, 2, 0),
}
STEPS, WIDTH, ROWS = 3, 48, 6


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def train(model: nn.Module, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    """The loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def losses_of_all(model: nn.Module, rank: int) -> list[float]:
    """The loss over all ranks' rows in each step."""
    found = []
    for loss in train(model, rows_of(rank)):
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        found.append(loss.item())
    return found


# -- the ways to train ---------------------------------------------------------------------------


def by_ddp(rank: int, size: int) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    return losses_of_all(DistributedDataParallel(make_model(), bucket_cap_mb=0.01), rank)


def by_fsdp(rank: int, size: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return losses_of_all(model, rank)


def by_hybrid_sharding(rank: int, size: int) -> list[float]:
    """Sharded along one axis of a mesh, replicated along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    return losses_of_all(model, rank)


def by_tensor_parallelism(rank: int, size: int) -> list[float]:
    """DTensor's own: the first layer split by columns, the second by rows; every rank has all
    data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh, plan)
    batch = torch.cat([rows_of(other) for other in range(size)])
    return [loss.item() for loss in train(model, batch)]


WAYS: tuple[Callable[[int, int], list[float]], ...] = (
    by_ddp,
    by_fsdp,
    by_hybrid_sharding,
    by_tensor_parallelism,
)


def train_in_every_way(rank: int, size: int, _: str, where: Places) -> None:
    torch.set_num_threads(1)
    together = torch.cat([rows_of(other) for other in range(size)])
    expected = [loss.item() for loss in train(make_model(), together)]
    assert expected[-1] < expected[0]
    with world(rank, where):
        for way in WAYS:
            assert way(rank, size) == pytest.approx(expected, rel=1e-5), way.__name__
        check_redistribution(rank, size)


def check_redistribution(rank: int, size: int) -> None:
    """DTensors from one placement to another, with a length that the number of ranks does not
    divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(11 * 7.0).reshape(11, 7)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    parts = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    total = whole * (size * (size + 1) // 2)
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).full_tensor(), total)
    assert torch.equal(parts.full_tensor(), total)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_losses_are_those_of_one_process(
    fresh_pool: RankPool, make_network: MakeNetwork, placement: str
) -> None:
    of_rank = PLACEMENTS[placement]
    with make_network(max(of_rank) + 1) as made:
        fresh_pool.run(train_in_every_way, len(of_rank), places(made, of_rank), connected=False)


ranks.preload("host_jobs")
