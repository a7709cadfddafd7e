"""ShardedOptimizer: what it learns is what the whole optimizer learns in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono import UnisonoError
from unisono.comm.base import Communicator
from unisono.training import ShardedOptimizer
from unisono.world import resolve

BATCH = 12
on_both = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            backend, marks=pytest.mark.ranks(ranks, backend=backend), id=f"{backend}{ranks}"
        )
        for backend, counts in (("unisono", [1, 2, 3, 4]), ("gloo", [2]))
        for ranks in counts
    ],
)


def model_of() -> torch.nn.Sequential:
    """28 elements of weights and 7 of biases: 3 divides neither, 2 and 4 do not divide 7."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4, dtype=torch.float64),
        torch.nn.Tanh(),
        torch.nn.Linear(4, 3, dtype=torch.float64),
    )


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(BATCH, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


def learn(model: Any, optimizer: Any, inputs: list[torch.Tensor], set_to_none: bool = True) -> Any:
    for one in inputs:
        optimizer.zero_grad(set_to_none)
        model(one).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_both
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_as_the_whole_one(process_group: Any, backend: str, make: Any, set_to_none: bool) -> None:
    comm = resolve()
    whole = model_of()
    expected = learn(whole, make(_groups(whole), lr=0.05), batches())
    model = model_of()
    mine = [batch.chunk(comm.size)[comm.rank] for batch in batches()]
    optimizer = ShardedOptimizer(_groups(model), make, lr=0.05)
    torch.testing.assert_close(learn(model, optimizer, mine, set_to_none), expected)


def _groups(model: torch.nn.Sequential) -> list[dict[str, Any]]:
    weights = [one for one in model.parameters() if one.dim() > 1]
    biases = [one for one in model.parameters() if one.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.ranks([2, 3])
def test_each_rank_holds_its_share_of_the_state(comm: Communicator) -> None:
    model = model_of()
    optimizer = ShardedOptimizer(model, torch.optim.Adam)
    learn(model, optimizer, batches()[:1])
    elements = sum(one.numel() for one in model.parameters())
    moments = [one["exp_avg"].numel() for one in optimizer.state_dict()["state"].values()]
    assert moments == [-(-elements // comm.size)]


@pytest.mark.ranks(2)
def test_dtypes_and_saved_states(comm: Communicator) -> None:
    def made() -> list[torch.nn.Parameter]:
        dtypes = (torch.float32, torch.float64, torch.float32)
        return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]

    def run(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
        optimizer.zero_grad()
        for number, one in enumerate(parameters):
            (one**2 * (number + 1)).sum().backward()
        optimizer.step()

    whole, parts, again = made(), made(), made()
    plain = torch.optim.Adam(whole, lr=0.1)
    first = ShardedOptimizer(parts, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        run(plain, whole)
        run(first, parts)
    with torch.no_grad():
        for one, other in zip(again, parts, strict=True):
            one.copy_(other)
    second = ShardedOptimizer(again, torch.optim.Adam, lr=0.1)
    second.load_state_dict(first.state_dict())
    run(plain, whole)
    run(second, again)
    torch.testing.assert_close(again, whole)


@pytest.mark.ranks(2)
def test_everyone_starts_from_one_rank(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.full((3,), float(comm.rank)))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, src=1, lr=1.0)
    assert weight.tolist() == [1, 1, 1]
    (weight * comm.rank).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.ranks(2)
def test_unused_parameters(comm: Communicator) -> None:
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = ShardedOptimizer([("a", a), ("b", b)], torch.optim.SGD, lr=1.0)
    (a + b if comm.rank == 0 else a).sum().backward()
    with pytest.raises(UnisonoError, match=r"no gradient for b \(on 1 of 2 ranks"):
        optimizer.step()
    assert a.tolist() == [1, 1]
    optimizer = ShardedOptimizer([a, b], torch.optim.SGD, unused="zero", lr=1.0)
    optimizer.zero_grad()
    (a + b if comm.rank == 0 else a).sum().backward()
    optimizer.step()
    assert a.tolist() == [0, 0]
    assert b.tolist() == [0.5, 0.5]
