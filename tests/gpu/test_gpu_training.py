"""torch's own data and tensor parallelism on one shared GPU trains like one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

STEPS = 5


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 16)).cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 256, generator=generator)
    return x.cuda(), torch.randn(16, 16, generator=generator).cuda()


def train(
    trained: Callable[[torch.Tensor], torch.Tensor], parameters: object, rank: int, size: int
) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        x, y = (part.chunk(size)[rank] for part in batch(step))
        loss = nn.functional.mse_loss(trained(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def train_alone() -> list[float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    alone = model()
    return train(alone, alone.parameters(), 0, 1)


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.ranks(n), id=str(n)) for n in (2, 4, 8)]
)
class TestAsOneProcess:
    def test_ddp(self, process_group: dist.ProcessGroup, ranks: int) -> None:
        expected = train_alone()
        wrapped = nn.parallel.DistributedDataParallel(model(), device_ids=[0])
        losses = train(wrapped, wrapped.parameters(), dist.get_rank(), ranks)
        assert losses == pytest.approx(expected, rel=1e-4)

    def test_fsdp2(self, process_group: dist.ProcessGroup, ranks: int) -> None:
        from torch.distributed.fsdp import fully_shard

        expected = train_alone()
        sharded = model()
        mesh = init_device_mesh("cuda", (ranks,))
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        losses = train(sharded, sharded.parameters(), dist.get_rank(), ranks)
        assert losses == pytest.approx(expected, rel=1e-4)

    def test_tensor_parallel(self, process_group: dist.ProcessGroup, ranks: int) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        expected = train_alone()
        mesh = init_device_mesh("cuda", (ranks,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallel = parallelize_module(model(), mesh, plan)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, foreach=False)
        losses = []
        for step in range(STEPS):
            x, y = batch(step)
            loss = nn.functional.mse_loss(parallel(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.ranks(2)
def test_after_wait_a_future_is_done_and_its_callbacks_have_run(
    process_group: dist.ProcessGroup,
) -> None:
    for count in (3, 1 << 20):  # through the CPU, and by the conductor's kernel
        tensor = torch.zeros(count, device="cuda")
        for _ in range(500):
            work, calls = dist.all_reduce(tensor.fill_(1), async_op=True), []
            future = work.get_future()
            chained = future.then(
                lambda done, calls=calls: calls.append(1) or done.value()[0].mean()
            )
            work.wait()
            assert future.done()
            assert calls == [1]
            assert chained.done()
            assert chained.wait().item() == 2  # its stream has ended what it returned


@pytest.mark.ranks(2)
def test_objects_and_plain_calls(process_group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    told: list[object] = [None, None]
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": 0}, {"rank": 1}]
    tensor = torch.full((3,), rank + 1.0, device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().wait()[0].eq(3).all()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(arrived := torch.empty(3, device="cuda"), 0)
        assert arrived.eq(3).all()
    dist.barrier()
