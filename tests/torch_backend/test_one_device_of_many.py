"""Groups in which unisono serves one device and other backends the others: since torch 2.15."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel as DDP

import unisono
from ranks import RankPool, raised
from torch_names import all_gather_single, reduce_scatter_single, since_2_15
from unisono import CollectiveMismatch, PeerLost
from unisono.torch_backend.process_group import our_group

pytestmark = since_2_15

MIXED = "cpu:unisono,cuda:gloo"
CPU = torch.device("cpu")


def start(path: Path | str, rank: int, size: int, backend: str = MIXED, **options: Any) -> Any:
    store = dist.FileStore(str(path), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    return dist.group.WORLD


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(float(count)) + 10 * rank


def test_every_collective_of_a_mixed_group(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_everything, 3, connected=False)


def use_everything(rank: int, size: int, path: str) -> None:
    group = start(path, rank, size)
    assert type(group) is dist.ProcessGroup
    assert group._get_backend(CPU).name() == "unisono"
    assert group._get_backend(torch.device("cuda")).name() == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    everybody = [numbers(peer, 4) for peer in range(size)]
    total = torch.stack(everybody).sum(0)

    dist.all_reduce(x := numbers(rank, 4))
    assert x.equal(total)
    dist.all_reduce(x := numbers(rank, 4), dist.ReduceOp.MAX)
    assert x.equal(everybody[-1])
    dist.broadcast(x := numbers(rank, 4), 1)
    assert x.equal(everybody[1])
    dist.reduce(x := numbers(rank, 4), 2)
    assert x.equal(total if rank == 2 else numbers(rank, 4))
    dist.all_gather(parts := [torch.zeros(4) for _ in range(size)], numbers(rank, 4))
    assert torch.stack(parts).equal(torch.stack(everybody))
    all_gather_single(wide := torch.zeros(size, 4), numbers(rank, 4))
    assert wide.equal(torch.stack(everybody))
    reduce_scatter_single(part := torch.zeros(4), wide.clone())
    assert part.equal(size * everybody[rank])
    dist.reduce_scatter(part, [tensor.clone() for tensor in everybody])
    assert part.equal(size * everybody[rank])
    collected = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
    dist.gather(numbers(rank, 4), collected, dst=1)
    assert collected is None or torch.stack(collected).equal(wide)
    dist.scatter(part, list(everybody) if rank == 1 else None, src=1)
    assert part.equal(everybody[rank])
    dist.all_to_all_single(x := torch.zeros(size), torch.arange(float(size)) + 10 * rank)
    assert x.tolist() == [10.0 * peer + rank for peer in range(size)]
    taken = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(taken, [torch.tensor([float(rank)])] * size)
    assert [float(tensor) for tensor in taken] == [0, 1, 2]
    dist.barrier()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": peer} for peer in range(size)]

    work = dist.all_reduce(x := numbers(rank, 4), async_op=True)
    work.wait()
    assert x.equal(total)
    future = dist.all_reduce(x := numbers(rank, 4), async_op=True).get_future()
    assert future.wait()[0].equal(total)
    messages = [
        dist.P2POp(dist.isend, numbers(rank, 4), (rank + 1) % size),
        dist.P2POp(dist.irecv, x := torch.zeros(4), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert x.equal(everybody[rank - 1])

    assert unisono.get_world().size == size  # by our engine, through torch
    assert our_group(dist.new_group([0, 1])) is not None or rank == 2
    dist.destroy_process_group()


def test_coalesced_calls(fresh_pool: RankPool) -> None:
    fresh_pool.run(coalesce, 2, connected=False)


def coalesce(rank: int, size: int, path: str) -> None:
    group = start(path, rank, size)
    wide = [torch.zeros(size * count) for count in (2, 7)]
    with _coalescing_manager(group, CPU, async_ops=True) as manager:
        for output in wide:
            all_gather_single(output, torch.full((output.numel() // size,), float(rank)))
    manager.wait()
    assert [tensor.sum() for tensor in wide] == [2, 7]
    with _coalescing_manager(group, CPU):
        dist.send(torch.full((3,), float(rank)), 1 - rank)
        dist.recv(taken := torch.zeros(3), 1 - rank)
    assert taken.eq(1 - rank).all()
    dist.destroy_process_group()


def test_ddp_has_the_gradients_of_one_process(fresh_pool: RankPool) -> None:
    (one, same), alone = fresh_pool.run(train, 2, connected=False), gradients(torch.arange(12.0))
    assert one == same
    assert torch.tensor(one).allclose(alone / 2)


def train(rank: int, size: int, path: str) -> list[float]:
    start(path, rank, size)
    found = gradients(torch.arange(12.0).chunk(size)[rank], DDP)
    dist.destroy_process_group()
    return found.tolist()


def gradients(data: torch.Tensor, wrap: Any = lambda model: model) -> torch.Tensor:
    torch.manual_seed(1)
    model = wrap(nn.Linear(3, 2))
    model(data.reshape(-1, 3)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_failures_are_exceptions_of_ours(fresh_pool: RankPool) -> None:
    dead, *others = fresh_pool.outcomes(fail, 3, connected=False)
    assert dead.exit_code == -signal.SIGKILL
    assert [outcome.error for outcome in others] == [None, None]


def fail(rank: int, size: int, path: str) -> None:
    start(path, rank, size)
    pair = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    raised(CollectiveMismatch, lambda: dist.all_reduce(torch.ones(rank), group=pair))
    dist.barrier()
    assert raised(PeerLost, dist.barrier).peer == 0
    assert raised(PeerLost, dist.new_group).peer == 0  # at once, not at the timeout


def test_a_group_of_one(tmp_path: Path) -> None:
    start(tmp_path / "alone", 0, 1, timeout=timedelta(seconds=5))
    dist.all_reduce(x := torch.ones(2))
    assert x.tolist() == [1, 1]
    dist.destroy_process_group()


def test_gloo_for_another_device(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_both, 2, connected=False)


def use_both(rank: int, size: int, path: str) -> None:
    group = start(path, rank, size, "cpu:gloo,cuda:unisono")
    assert group._get_backend(CPU).name() == "gloo"
    assert our_group(group) is None
    dist.all_reduce(x := torch.ones(2))
    assert x.tolist() == [2, 2]
    dist.destroy_process_group()
