"""After a death torch.distributed continues on the group of the survivors, and on a grown one."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import unisono
from ranks import RankPool, raised
from unisono import GroupClosed, PeerLost
from unisono.torch_backend.groups import connect_group
from unisono.training import catch_up


def test_torch_goes_on_with_the_survivors_and_a_newcomer(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(go_on_with_ddp, 4, connected=False)
    for rank in (0, 2, 3):
        assert outcomes[rank].value == [(2, 3.0), (3, 6.0)][rank == 3 :], outcomes[rank].error


def go_on_with_ddp(rank: int, size: int, path: str) -> object:
    """Ranks 0 to 2 start, rank 1 dies, and rank 3 takes its place. Returns the sum in each
    world."""
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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> int:
    synced = DDP(model, process_group=group)  # one dropped before backward averages nothing
    synced(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return 2


def count() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return float(x)


# -- torch's own shrink_group --------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_torch_refuses_to_shrink_by_its_own_means(process_group: Any) -> None:
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([1 - dist.get_rank()])
    dist.barrier()


# -- for those who wrap a group --------------------------------------------------------------------


def test_a_group_for_wrappers_needs_no_world(pool: RankPool) -> None:
    pool.run(use_wrapped, 2, connected=False)


def use_wrapped(rank: int, size: int, path: str) -> None:
    assert not dist.is_initialized()
    group = connect_group(dist.FileStore(path, size), rank, size, timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size(), group.comm.timeout_s) == (rank, size, 20)
    group.allreduce([x := torch.full((2,), float(rank))], dist.AllreduceOptions()).wait()
    assert x.tolist() == [1, 1]
    group.barrier().wait()
    group.shutdown()
    raised(GroupClosed, group.barrier)
