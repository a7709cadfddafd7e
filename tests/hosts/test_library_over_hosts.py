"""What the library builds on groups, over 2 hosts of 2 ranks: the same as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_jobs import Places, places, world
from namespaces import MakeNetwork

import ranks
import unisono
from ranks import RankPool
from unisono import plan
from unisono.comm.communicator import Communicator
from unisono.training import GradientSync, ShardedOptimizer

PLACEMENTS = {"block": (0, 0, 1, 1), "cyclic": (0, 1, 0, 1)}


def use_everything(rank: int, size: int, _: str, where: Places) -> None:
    with world(rank, where) as comm:
        check_training(comm)
        check_axes(comm)
        check_structures_and_objects(comm)
        check_derivatives(comm)
        check_statistics(comm)
        check_schedules(comm)


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(40, 40, dtype=torch.float64) for _ in range(3)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh())


def batch_of(step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(12, 40, dtype=torch.float64)


def learn(model: Any, optimizer: Any, part: slice, sync: Any = None) -> list[torch.Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of(step)[part]).square().mean().backward()
        if sync is not None:
            sync.finish()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_training(comm: Communicator) -> None:
    whole = model_of()
    expected = learn(whole, torch.optim.AdamW(whole.parameters(), 0.05), slice(None))
    part = slice(comm.rank, None, comm.size)
    model = model_of()
    sync = GradientSync(model, bucket_bytes=10_000)
    mine = learn(model, torch.optim.AdamW(model.parameters(), 0.05), part, sync)
    torch.testing.assert_close(mine, expected)
    model = model_of()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    torch.testing.assert_close(learn(model, sharded, part), expected)


def check_axes(comm: Communicator) -> None:
    """Tensor parallel groups are pairs of neighbours, data parallel ones the others."""
    with unisono.ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        for axis, members in (
            ("tp", [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]),
            ("dp", [comm.rank % 2, comm.rank % 2 + 2]),
        ):
            group = manager.along(axis).comm
            for count in (1, 200_000):
                group.all_reduce(tensor := torch.full((count,), 1.0 + comm.rank))
                assert tensor.eq(sum(1.0 + member for member in members)).all()


def check_structures_and_objects(comm: Communicator) -> None:
    everyone = range(comm.size)
    mine = {"loss": torch.tensor([1.0 + comm.rank]), "counts": [torch.arange(50_000) + comm.rank]}
    summed = unisono.all_reduce(mine)
    assert summed["loss"].item() == sum(1.0 + rank for rank in everyone)
    assert torch.equal(summed["counts"][0], sum(torch.arange(50_000) + rank for rank in everyone))
    theirs = unisono.all_gather_object({"rank": comm.rank, "text": "x" * 9000 * comm.rank})
    assert [len(each["text"]) for each in theirs] == [9000 * rank for rank in everyone]
    assert unisono.broadcast_object([comm.rank, "ä"], src=3) == [3, "ä"]
    gathered = unisono.gather_object((comm.rank,), dst=2)
    assert gathered == ([(rank,) for rank in everyone] if comm.rank == 2 else None)


def check_derivatives(comm: Communicator) -> None:
    """The gradient of the sum over all ranks of weights times each rank's result."""
    differentiable = unisono.differentiable
    for count in (4, 40_000):
        inputs = [torch.arange(count, dtype=torch.float64) + rank for rank in range(comm.size)]
        mine = inputs[comm.rank].clone().requires_grad_()
        total = differentiable.all_reduce(mine)
        assert torch.equal(total, sum(inputs))
        (total * (comm.rank + 1)).sum().backward()
        assert mine.grad is not None
        assert mine.grad.eq(sum(rank + 1 for rank in range(comm.size))).all()
        mine = inputs[comm.rank].clone().requires_grad_()
        everybody = differentiable.all_gather(mine)
        assert all(map(torch.equal, everybody, inputs))
        sum((part * (comm.rank + 1)).sum() for part in everybody).backward()  # type: ignore[union-attr]
        assert mine.grad is not None
        assert mine.grad.eq(sum(rank + 1 for rank in range(comm.size))).all()


def check_statistics(comm: Communicator) -> None:
    torch.manual_seed(5)
    whole = torch.randn(comm.size, 30, dtype=torch.float64)
    mine = whole[comm.rank]
    right = torch.softmax(whole.flatten(), 0).view_as(whole)[comm.rank]
    torch.testing.assert_close(unisono.math.softmax(mine, dim=0), right)
    torch.testing.assert_close(unisono.math.logsumexp(mine, dim=0), whole.flatten().logsumexp(0))


def check_schedules(comm: Communicator) -> None:
    size = comm.size
    data = [torch.arange(40_000, dtype=torch.float64) * (rank + 1) for rank in range(size)]
    for algorithm in ("ring", "double_tree", "recursive_doubling"):
        tensor = data[comm.rank].clone()
        unisono.run_schedule(plan.find("all_reduce", algorithm).schedule(size), comm, tensor)
        assert torch.equal(tensor, sum(data)), algorithm
    tensor = data[comm.rank].clone()
    comm.all_reduce(tensor, algorithm="ring")
    assert torch.equal(tensor, sum(data))
    gathered = torch.empty(size * 40_000, dtype=torch.float64)
    comm.all_gather(gathered, data[comm.rank], algorithm="ring")
    assert torch.equal(gathered, torch.cat(data))


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_what_the_library_builds_on_groups(
    fresh_pool: RankPool, make_network: MakeNetwork, placement: str
) -> None:
    with make_network(2) as made:
        where = places(made, PLACEMENTS[placement])
        fresh_pool.run(use_everything, 4, where, connected=False, deadline_s=240)


ranks.preload("host_jobs")
