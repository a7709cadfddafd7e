"""Gradients that cross between hosts in few bits."""

from __future__ import annotations

import torch
from torch import nn

from made_up_hosts import world
from ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.training import GradientSync


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 1), nn.Linear(1, 1))


def train(comm: Communicator, wire: str | None) -> torch.Tensor:
    """The parameters after some steps."""
    model = make()
    sync = GradientSync(model, comm, wire=wire, unused="zero")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(12):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        loss = (model[:3](x) - x.sum(1, keepdim=True)).square().mean()  # type: ignore[index]
        loss.backward()
        sync.finish()
        assert model[3].weight.grad is None  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
    sync.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_both(rank: int, size: int, path: str) -> bytes:
    with world(rank, path, "ABB") as comm:
        full, packed = train(comm, None), train(comm, "int8")
        start = torch.cat([p.detach().flatten() for p in make().parameters()])
        assert not torch.equal(full, packed)
        assert (full - packed).norm() < 0.02 * (full - start).norm()
        return packed.numpy().tobytes()


def test_a_run_with_error_feedback_stays_close(pool: RankPool) -> None:
    assert len(set(pool.run(train_both, 3, connected=False))) == 1
