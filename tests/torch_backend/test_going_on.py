"""After a death torch.distributed goes on over the group of the survivors, and over a grown one."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import unisono
from ranks import RankPool, raised
from unisono import PeerLost
from unisono.training import catch_up


def test_torch_goes_on_with_the_survivors_and_a_newcomer(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(go_on_with_ddp, 4, connected=False)
    for rank in (0, 2, 3):
        assert outcomes[rank].value == [(2, 3.0), (3, 6.0)][rank == 3 :], outcomes[rank].error


def go_on_with_ddp(rank: int, size: int, path: str) -> object:
    """Ranks 0 to 2 begin, rank 1 dies, and rank 3 takes its number. What each world counted."""
    found = []
    model, optimizer = make(rank)
    step = 0
    if rank < 3:
        dist.init_process_group("unisono", store=dist.FileStore(path), rank=rank, world_size=3)  # type: ignore[attr-defined]
        train(model, optimizer)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world = unisono.get_world()
        raised(PeerLost, dist.barrier)
        unisono.set_world(world.shrink())
        step = train(model, optimizer)
        found.append((dist.get_world_size(), count()))
        unisono.set_world(unisono.get_world().grow(path))
    else:
        unisono.set_world(unisono.Communicator.join(path, rank=1))
        assert dist.get_rank() == 1
    assert catch_up(model, optimizer, step=step) == 2
    train(model, optimizer)
    states = unisono.all_gather_object([p.tolist() for p in model.parameters()])
    assert states == [states[0]] * 3
    found.append((dist.get_world_size(), count()))
    unisono.shutdown()
    assert not dist.is_initialized()
    return found


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    synced = DDP(model)  # what is dropped before backward averages nothing
    synced(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return 2


def count() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return float(x)
