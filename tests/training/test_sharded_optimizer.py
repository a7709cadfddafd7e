"""ShardedOptimizer: it learns what a plain optimizer learns in one process."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from implementations import on_backends
from ranks import attempt
from unisono import UnisonoError
from unisono.comm.communicator import Communicator
from unisono.training import ShardedOptimizer
from unisono.world.world import resolve

BATCH = 12
on_both = on_backends(unisono=[1, 2, 3, 4], gloo=[2])


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
    for batch in inputs:
        optimizer.zero_grad(set_to_none)
        model(batch).square().mean().backward()
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
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.ranks([2, 3])
def test_each_rank_holds_its_share_of_the_state(comm: Communicator) -> None:
    model = model_of()
    optimizer = ShardedOptimizer(model, torch.optim.Adam)
    learn(model, optimizer, batches()[:1])
    elements = sum(parameter.numel() for parameter in model.parameters())
    moments = [state["exp_avg"].numel() for state in optimizer.state_dict()["state"].values()]
    assert moments == [-(-elements // comm.size)]


@pytest.mark.ranks(2)
def test_dtypes_and_saved_states(comm: Communicator) -> None:
    def parameters_of() -> list[torch.nn.Parameter]:
        dtypes = (torch.float32, torch.float64, torch.float32)
        return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]

    def run(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
        optimizer.zero_grad()
        for number, parameter in enumerate(parameters):
            (parameter**2 * (number + 1)).sum().backward()
        optimizer.step()

    whole, parts, again = parameters_of(), parameters_of(), parameters_of()
    plain = torch.optim.Adam(whole, lr=0.1)
    first = ShardedOptimizer(parts, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        run(plain, whole)
        run(first, parts)
    with torch.no_grad():
        for part, other in zip(again, parts, strict=True):
            part.copy_(other)
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


@on_both
def test_weights_that_are_loaded_later(process_group: Any, backend: str) -> None:
    """A step starts from the model's current values, like that of a plain optimizer."""
    comm = resolve()
    whole, cut = model_of(), model_of()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    optimizer = ShardedOptimizer(cut, torch.optim.SGD, lr=0.1)
    loaded = {name: 2 * state + 1 for name, state in whole.state_dict().items()}
    whole.load_state_dict(loaded)
    cut.load_state_dict(loaded)
    batch = batches()[0]
    expected = learn(whole, plain, [batch])
    torch.testing.assert_close(learn(cut, optimizer, [batch.chunk(comm.size)[comm.rank]]), expected)


class Interrupted(torch.optim.SGD):
    """Ctrl-C on rank 1 in its second step, once the parameters have changed."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1
        if self.steps == 2 and resolve().rank == 1:
            os.kill(os.getpid(), signal.SIGINT)


@on_both
def test_ctrl_c_in_an_update_waits_until_all_ranks_have_it(
    process_group: Any, backend: str
) -> None:
    comm = resolve()
    whole, cut = model_of(), model_of()
    expected = learn(whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), batches())
    optimizer = ShardedOptimizer(cut, Interrupted, lr=0.1, momentum=0.9)
    mine = [batch.chunk(comm.size)[comm.rank] for batch in batches()]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupted = [attempt(learn, cut, optimizer, [batch]) for batch in mine]
    finally:
        signal.signal(signal.SIGINT, before)
    kinds = [type(error) for error in interrupted if error]
    assert kinds == ([KeyboardInterrupt] if comm.rank == 1 else [])
    torch.testing.assert_close([parameter.detach() for parameter in cut.parameters()], expected)


@on_both
def test_clipping_by_the_norm_of_the_mean(process_group: Any, backend: str) -> None:
    comm = resolve()
    weights = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(()))]
    optimizer = ShardedOptimizer(weights, torch.optim.SGD, lr=1.0)
    ((weights[0].sum() + weights[1]) * (comm.rank + 1)).backward()
    norm = optimizer.step(max_norm=0.5)
    mean = (comm.size + 1) / 2
    assert norm is not None
    assert norm.item() == pytest.approx(mean * 7**0.5)
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full(weight.shape, -0.5 / 7**0.5))


@pytest.mark.ranks(2)
def test_what_does_not_fit(comm: Communicator) -> None:
    weight, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    make = torch.optim.SGD
    with pytest.raises(ValueError, match="a parameter is in two groups"):
        ShardedOptimizer([{"params": [weight]}, {"params": [weight]}], make)
    groups = [{"params": [weight]}, {"params": [other]}]
    with pytest.raises(ValueError, match=r"groups of \[2\], rank 1 has .*groups of \[1, 1\]"):
        ShardedOptimizer(groups if comm.rank else [weight, other], make)
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        ShardedOptimizer([{"params": [frozen]}], make)
    with pytest.raises(ValueError, match="groups of"):
        ShardedOptimizer([frozen] if comm.rank else [weight], make)
    optimizer = ShardedOptimizer([{"params": weight}], make, lr=1.0)  # one tensor is a group, too
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [[0, 0], [0, 0]]
    weight.data = weight.data.clone()
    with pytest.raises(ValueError, match="parameter 0 has moved"):
        optimizer.step()
