"""A newcomer gets the state of the training, and all continue with the same state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.training import ShardedOptimizer, catch_up

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, 0.01, amsgrad=True),
}


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_go_on_as_the_one_that_is_furthest(comm: Communicator, kind: str) -> None:
    model, optimizer = make(kind, comm.rank)
    steps = 2 * comm.rank if comm.rank < 2 else 0  # rank 1 is furthest, rank 2 has none
    train(model, optimizer, range(steps))
    assert catch_up(model, optimizer, step=steps, group=comm) == 2
    train(model, optimizer, range(2, 5))
    alone, alone_optimizer = make(kind, 1)
    train(alone, alone_optimizer, range(5))
    for ours, expected in zip(
        model.state_dict().values(), alone.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.ranks(2)
def test_a_sharded_optimizer_is_refused(comm: Communicator) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="is sharded"):
        catch_up(model, ShardedOptimizer(model, torch.optim.Adam, comm), group=comm)
