"""Gradients through collectives: compared with the whole computation in one process, float64.

Every rank can make every rank's inputs. The loss is the sum over ranks of a random weighting of
each rank's results, so that every element's gradient differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
from expected import REDUCED, SPREAD, doubles
from unisono import differentiable
from unisono.comm.communicator import Communicator

RANKS = [1, 2, 3, 4]


def weighted(results: Any, rank: int) -> torch.Tensor:
    """A rank's loss: its results, each element with its own weight and also squared, so that
    gradients depend on the values."""
    if isinstance(results, torch.Tensor):
        results = [results]
    total = torch.zeros((), dtype=torch.float64)
    for i, result in enumerate(results):
        total = total + (doubles(1000 + 10 * rank + i, *result.shape) * (result + result**2)).sum()
    return total


def check(
    comm: Communicator,
    inputs: list[Any],
    distributed: Callable[[Any], Any],
    whole: Callable[[list[Any]], list[Any]],
) -> None:
    """Compare `distributed`, on this rank's input, with `whole`, which returns every rank's result
    from all ranks' inputs."""

    def fresh(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given.clone().requires_grad_()
        return [fresh(part) for part in given]

    def flat(given: Any) -> list[torch.Tensor]:
        return [given] if isinstance(given, torch.Tensor) else given

    everyone = [fresh(row) for row in inputs]
    mine = fresh(inputs[comm.rank])
    expected = whole(everyone)
    got = distributed(mine)
    for tensor, other in zip(flat(got), flat(expected[comm.rank]), strict=True):
        torch.testing.assert_close(tensor, other)
    weighted(got, comm.rank).backward()
    torch.stack([weighted(tensor, rank) for rank, tensor in enumerate(expected)]).sum().backward()
    for tensor, other in zip(flat(mine), flat(everyone[comm.rank]), strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)
        assert torch.equal(tensor.detach(), other.detach())  # inputs are unchanged


# -- primitives --------------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
def test_all_reduce(comm: Communicator) -> None:
    inputs = [doubles(rank, 3, 2) for rank in range(comm.size)]
    ways: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.amax(0),
        "min": lambda x: x.amin(0),
        unisono.PremulSum(0.25): lambda x: 0.25 * x.sum(0),
    }
    for op, combined in ways.items():
        check(
            comm,
            inputs,
            lambda x, op=op: differentiable.all_reduce(x, op, comm),
            lambda all_, combined=combined: [combined(torch.stack(all_))] * comm.size,
        )


@pytest.mark.ranks(RANKS)
def test_ties(comm: Communicator) -> None:
    inputs = [torch.tensor([1.0, rank % 2, 0.0], dtype=torch.float64) for rank in range(comm.size)]
    ways = {"max": torch.amax, "min": torch.amin}
    for op, combined in ways.items():
        check(
            comm,
            inputs,
            lambda x, op=op: differentiable.all_reduce(x, op),
            lambda all_, combined=combined: [combined(torch.stack(all_), 0)] * comm.size,
        )


@pytest.mark.ranks(RANKS)
def test_all_gather_of_ragged_tensors(comm: Communicator) -> None:
    for scale in (1, 300):
        inputs = [doubles(rank, rank * scale, 2) for rank in range(comm.size)]
        check(
            comm,
            inputs,
            lambda x: differentiable.all_gather(x, comm),
            lambda all_: [list(all_)] * comm.size,
        )


@pytest.mark.ranks(RANKS)
def test_reduce_scatter(comm: Communicator) -> None:
    size = comm.size
    listed = [[doubles(9 * rank + to, to + 1) for to in range(size)] for rank in range(size)]
    wide = [doubles(rank, 2 * size, 3) for rank in range(size)]
    for op, factor in (("sum", 1.0), ("mean", 1 / size), (unisono.PremulSum(2.0), 2.0)):
        check(
            comm,
            listed,
            lambda parts, op=op: differentiable.reduce_scatter(parts, op),
            lambda all_, factor=factor: [
                factor * torch.stack([parts[rank] for parts in all_]).sum(0) for rank in range(size)
            ],
        )
        check(
            comm,
            wide,
            lambda x, op=op: differentiable.reduce_scatter(x, op),
            lambda all_, factor=factor: list((factor * torch.stack(all_).sum(0)).split(2)),
        )


@pytest.mark.ranks(RANKS)
def test_all_to_all(comm: Communicator) -> None:
    size = comm.size
    listed = [[doubles(9 * rank + to, rank, to + 1) for to in range(size)] for rank in range(size)]
    check(
        comm,
        listed,
        differentiable.all_to_all,
        lambda all_: [[parts[rank] for parts in all_] for rank in range(size)],
    )
    wide = [doubles(rank, 2 * size, 3) for rank in range(size)]
    check(
        comm,
        wide,
        differentiable.all_to_all,
        lambda all_: [
            torch.cat([row[2 * rank : 2 * rank + 2] for row in all_]) for rank in range(size)
        ],
    )


@pytest.mark.ranks(RANKS)
def test_broadcast(comm: Communicator) -> None:
    src = comm.size - 1
    inputs = [doubles(rank, 4) for rank in range(comm.size)]
    check(
        comm,
        inputs,
        lambda x: differentiable.broadcast(x, src),
        lambda all_: [all_[src] + 0 * row for row in all_],
    )


@pytest.mark.ranks([2, 3])
def test_ranks_that_want_no_gradient_serve_one_that_does(comm: Communicator) -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [
        differentiable.all_reduce,
        differentiable.broadcast,
        differentiable.all_gather,
        lambda x: differentiable.reduce_scatter([x] * comm.size),
        lambda x: differentiable.all_to_all([x] * comm.size),
    ]
    for call in calls:
        x = torch.ones(2)
        if comm.rank == 0:
            x.requires_grad_()
        results = call(x)
        results = [results] if isinstance(results, torch.Tensor) else results
        torch.stack(list(results)).sum().backward()
        assert x.grad is None if comm.rank else x.grad.tolist() == [comm.size] * 2


@pytest.mark.ranks([1, 2, 3])
def test_gradients_have_gradients(comm: Communicator) -> None:
    def twice(results: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        loss = (results**3).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return list(torch.autograd.grad(sum((tensor**2).sum() for tensor in first), inputs))

    everyone = [doubles(rank, 3).requires_grad_() for rank in range(comm.size)]
    mine = doubles(comm.rank, 3).requires_grad_()
    total = sum(everyone)
    assert isinstance(total, torch.Tensor)
    expected = twice(torch.stack([total] * comm.size), everyone)[comm.rank]
    (got,) = twice(differentiable.all_reduce(mine, "sum", comm), [mine])
    torch.testing.assert_close(got, expected)


@pytest.mark.ranks(2)
def test_without_gradients_they_are_plain(comm: Communicator) -> None:
    assert not differentiable.all_reduce(torch.ones(2)).requires_grad
    with pytest.raises(ValueError, match="no gradient"):
        differentiable.all_reduce(torch.ones(2, dtype=torch.int64), "bor")
    with pytest.raises(ValueError, match="use all_reduce"):
        differentiable.reduce_scatter(torch.ones(2), "max")
    with pytest.raises(TypeError, match="not a torch tensor"):
        differentiable.all_gather([1.0])


# -- mathematics -------------------------------------------------------------------------------

# (our function, torch's, whether a rank's result is its part of the whole one)
SHARDED: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    **{name: (*functions, True) for name, functions in SPREAD.items()},
    **{name: (*functions, False) for name, functions in REDUCED.items()},
    "variance": (
        lambda x, d, g: unisono.math.variance(x, d, g, correction=0),
        lambda x, d: torch.var(x, d, correction=0),
        False,
    ),
    "weighted_sum": (
        lambda x, d, g: unisono.math.weighted_sum(x, 0.5, d, g),
        lambda x, d: (0.5 * x).sum(d),
        False,
    ),
}


@pytest.mark.parametrize("name", list(SHARDED))
@pytest.mark.ranks(RANKS)
def test_gradients_of_sharded_mathematics(comm: Communicator, name: str) -> None:
    ours, theirs, is_spread = SHARDED[name]
    for rows in (3, 3000):
        lengths = [rank if comm.size > 1 else 4 for rank in range(comm.size)]  # one is empty
        inputs = [doubles(rank, rows, length) for rank, length in enumerate(lengths)]

        def whole(everyone: list[torch.Tensor], lengths: list[int] = lengths) -> list[Any]:
            result = theirs(torch.cat(everyone, 1), 1)
            return list(result.split(lengths, 1)) if is_spread else [result] * comm.size

        check(comm, inputs, lambda x: ours(x, 1, comm), whole)


@pytest.mark.parametrize("name", list(SHARDED))
@pytest.mark.ranks(RANKS)
def test_gradients_element_by_element(comm: Communicator, name: str) -> None:
    ours, theirs, is_spread = SHARDED[name]
    inputs = [doubles(rank, 2, 3) for rank in range(comm.size)]

    def whole(everyone: list[torch.Tensor]) -> list[Any]:
        result = theirs(torch.stack(everyone), 0)
        return list(result.unbind(0)) if is_spread else [result] * comm.size

    check(comm, inputs, lambda x: ours(x, None, comm), whole)


def test_alone_they_pass_torch_s_own_check() -> None:
    x = doubles(0, 3, 4).requires_grad_()
    for ours, _, _ in SHARDED.values():
        assert torch.autograd.gradcheck(lambda x, ours=ours: ours(x, 1, None), (x,))
