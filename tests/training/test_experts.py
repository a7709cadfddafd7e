"""Tokens to the ranks of their experts and back, compared with one process that has all tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from implementations import on_backends
from unisono import CollectiveMismatch
from unisono.comm.communicator import Communicator
from unisono.training import ExpertParallel, combine_tokens, dispatch_tokens
from unisono.world.world import resolve

EXPERTS, CHOICES, WIDTH = 8, 2, 3


def tokens_of(rank: int) -> torch.Tensor:
    """A different number on every rank; none on rank 2."""
    generator = torch.Generator().manual_seed(rank)
    number = 0 if rank == 2 else 5 + 3 * rank
    return torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)


def choices_of(rank: int) -> torch.Tensor:
    """Different experts for each token, low numbers more often."""
    generator = torch.Generator().manual_seed(100 + rank)
    number = len(tokens_of(rank))
    scores = torch.rand(number, EXPERTS, generator=generator) - torch.arange(EXPERTS) / EXPERTS
    return scores.topk(CHOICES).indices


def weights_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(200 + rank)
    shape = (len(tokens_of(rank)), CHOICES)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def output_of(expert: int, token: torch.Tensor) -> torch.Tensor:
    return (expert + 1) * token.square()


def room(size: int, factor: float | None) -> dict[tuple[int, int, int], bool]:
    """Whether choice c of token i of rank r fits: all first choices, then the second ones."""
    total = sum(choices_of(rank).numel() for rank in range(size))
    capacity = math.inf if factor is None else math.ceil(factor * total / EXPERTS)
    taken = [0] * EXPERTS
    found = {}
    for choice in range(CHOICES):
        for rank in range(size):
            for token, expert in enumerate(choices_of(rank)[:, choice].tolist()):
                found[rank, token, choice] = taken[expert] < capacity
                taken[expert] += 1
    return found


def alone(
    size: int, factor: float | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's combined tokens, and the gradients of its tokens and weights if the loss is the
    sum of the squares of all results."""
    tokens = [tokens_of(rank).requires_grad_() for rank in range(size)]
    weights = [weights_of(rank).requires_grad_() for rank in range(size)]
    has_room = room(size, factor)
    results = []
    for rank in range(size):
        rows = [
            sum(
                (
                    weights[rank][token, choice]
                    * output_of(int(choices_of(rank)[token, choice]), tokens[rank][token])
                    for choice in range(CHOICES)
                    if has_room[rank, token, choice]
                ),
                start=torch.zeros(WIDTH, dtype=torch.float64) * tokens[rank][token],
            )
            for token in range(len(tokens[rank]))
        ]
        results.append(torch.stack(rows) if rows else tokens[rank] * 1)
    sum(result.square().sum() for result in results).backward()  # type: ignore[union-attr]

    def gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    return [result.detach() for result in results], gradients(tokens), gradients(weights)


def check(comm: Communicator, factor: float | None) -> None:
    results, token_gradients, weight_gradients = alone(comm.size, factor)
    tokens, weights = tokens_of(comm.rank).requires_grad_(), weights_of(comm.rank).requires_grad_()
    choices = choices_of(comm.rank)
    there = dispatch_tokens(tokens, choices, EXPERTS, comm, capacity_factor=factor)
    has_room = room(comm.size, factor)
    assert there.dropped.tolist() == [
        [not has_room[comm.rank, token, choice] for choice in range(CHOICES)]
        for token in range(len(tokens))
    ]
    first = comm.rank * EXPERTS // comm.size
    parts = there.tokens.split(there.counts)
    assert len(parts) == EXPERTS // comm.size
    outputs = torch.cat([output_of(first + at, part) for at, part in enumerate(parts)])
    combined = combine_tokens(outputs, there, weights)
    combined.square().sum().backward()
    torch.testing.assert_close(combined.detach(), results[comm.rank])
    torch.testing.assert_close(tokens.grad, token_gradients[comm.rank])
    torch.testing.assert_close(weights.grad, weight_gradients[comm.rank])


@on_backends(unisono=[1, 2, 4], gloo=[2])
def test_all_tokens_reach_their_experts_and_return(process_group: Any, backend: str) -> None:
    check(resolve(process_group), None)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("factor", [0.25, 1.0, 1.25])
def test_experts_with_limited_room(comm: Communicator, factor: float) -> None:
    assert not all(room(comm.size, factor).values())
    check(comm, factor)


@pytest.mark.ranks(2)
def test_each_expert_has_its_tokens_in_the_order_of_ranks(comm: Communicator) -> None:
    tokens = torch.arange(4.0).reshape(-1, 1) + 10 * comm.rank
    experts = torch.tensor([[3], [0], [-1], [0]])
    there = dispatch_tokens(tokens, experts, 4, comm)
    if comm.rank == 0:
        assert there.tokens.flatten().tolist() == [1.0, 3.0, 11.0, 13.0]
        assert there.counts == [4, 0]
    else:
        assert there.tokens.flatten().tolist() == [0.0, 10.0]
        assert there.counts == [0, 2]
    back = combine_tokens(there.tokens + 100, there)
    expected_back = [tokens[0] + 100, tokens[1] + 100, tokens[2] * 0, tokens[3] + 100]
    assert back.tolist() == torch.stack(expected_back).tolist()


@pytest.mark.ranks(2)
def test_one_rank_without_gradients_goes_backward_too(comm: Communicator) -> None:
    """Only rank 1's tokens, then only rank 1's outputs, require a gradient."""
    mine = torch.ones(2, 1, requires_grad=comm.rank == 1)
    there = dispatch_tokens(mine, torch.tensor([[0], [1]]), 2, comm)
    weight = torch.full((1,), 3.0, requires_grad=comm.rank == 1)
    combine_tokens(there.tokens * weight, there).sum().backward()
    if comm.rank == 1:
        assert mine.grad is not None
        assert mine.grad.tolist() == [[3.0], [3.0]]
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0]
    else:
        assert mine.grad is None


@pytest.mark.ranks(2)
def test_gradients_of_gradients(comm: Communicator) -> None:
    def both_ways(tokens: torch.Tensor) -> torch.Tensor:
        there = dispatch_tokens(tokens, torch.tensor([[0, 1], [1, 0], [1, 0]]), 2, comm)
        return combine_tokens(there.tokens.pow(3), there)

    tokens = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
    (first,) = torch.autograd.grad(both_ways(tokens).sum(), tokens, create_graph=True)
    torch.testing.assert_close(first, 6 * tokens.square())
    (second,) = torch.autograd.grad(first.sum(), tokens)
    torch.testing.assert_close(second, 12 * tokens)


@pytest.mark.ranks([1, 2])
def test_arguments_that_make_no_sense(comm: Communicator) -> None:
    """All ranks pass them, so the group stays usable."""
    tokens, experts = torch.ones(2, 3), torch.tensor([[0], [1]])
    wrong: list[tuple[Any, Any, Any, float | None, str]] = [
        (tokens, experts[:1], 2, None, "a row of choices for each token"),
        (tokens, experts + 1, 2, None, "experts has values from 1 to 2, but valid ones are 0 to 1"),
        (tokens, experts, 2, 0.0, "capacity_factor must be positive"),
        (tokens, experts.float(), 2, None, "integers, not torch.float32"),
        (tokens, [0, 1], 2, None, "torch tensors"),
    ]
    for given, chosen, number, factor, text in wrong:
        with pytest.raises((ValueError, TypeError), match=text):
            dispatch_tokens(given, chosen, number, comm, capacity_factor=factor)
    if comm.size == 2:
        with pytest.raises(ValueError, match="3 experts cannot be divided evenly among 2 ranks"):
            dispatch_tokens(tokens, experts, 3, comm)
        with pytest.raises(ValueError, match="different capacity factors"):
            dispatch_tokens(tokens, experts, 2, comm, capacity_factor=1 + comm.rank / 2)
    there = dispatch_tokens(tokens, experts, 2, comm)
    with pytest.raises(ValueError, match="a row for each of dispatched"):
        combine_tokens(tokens[:0], there)
    with pytest.raises(ValueError, match=r"weights of shape \(2,\)"):
        combine_tokens(there.tokens, there, torch.ones(2))
    assert combine_tokens(there.tokens, there).tolist() == tokens.tolist()


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_one_rank_refuses_and_nobody_waits(comm: Communicator) -> None:
    experts = torch.tensor([[0], [5 if comm.rank == 1 else 1]])
    with pytest.raises((ValueError, CollectiveMismatch), match=r"experts has values|refused"):
        dispatch_tokens(torch.ones(2, 3), experts, 2, comm)


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_more_experts_on_one_rank(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch):
        dispatch_tokens(torch.ones(2, 3), torch.tensor([[0], [1]]), 2 + 2 * comm.rank, comm)


# -- the layer -------------------------------------------------------------------------------------


class Layers:
    """The same gate and experts in every process, and a layer with some of the experts."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.experts = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(EXPERTS)]
        with torch.no_grad():
            for module in (self.gate, *self.experts):
                for parameter in module.parameters():
                    shape = parameter.shape
                    parameter.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for token in x.reshape(-1, WIDTH):
            scores, chosen = self.gate(token).topk(CHOICES)
            weights = scores.softmax(0)
            rows.append(
                sum(weights[at] * self.experts[int(chosen[at])](token) for at in range(CHOICES))
            )
        return torch.stack(rows).reshape(x.shape)  # type: ignore[arg-type]


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_layer_is_that_of_one_process(comm: Communicator, loss: str) -> None:
    batches = [
        torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        for rank in range(comm.size)
    ]
    whole, mine = Layers(), Layers()
    results = [whole.by_hand(batch) for batch in batches]
    total = sum(result.square().sum() for result in results)
    (total / comm.size if loss == "mean" else total).backward()  # type: ignore[union-attr]

    share = EXPERTS // comm.size
    own = slice(comm.rank * share, (comm.rank + 1) * share)
    layer = ExpertParallel(mine.gate, mine.experts[own], CHOICES, comm, loss=loss)
    result = layer(batches[comm.rank])
    torch.testing.assert_close(result, results[comm.rank])
    result.square().sum().backward()
    for expected, expert in zip(whole.experts[own], layer.experts, strict=True):
        for theirs, ours in zip(expected.parameters(), expert.parameters(), strict=True):
            wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(ours.grad, wanted)
    assert mine.gate.weight.grad is not None
    comm.all_reduce(mine.gate.weight.grad, loss)
    torch.testing.assert_close(mine.gate.weight.grad, whole.gate.weight.grad)


@pytest.mark.ranks(2)
def test_the_layer_drops_what_finds_no_room(comm: Communicator) -> None:
    layers = Layers()
    share = EXPERTS // comm.size
    own = layers.experts[comm.rank * share : (comm.rank + 1) * share]
    layer = ExpertParallel(layers.gate, own, 1, comm, capacity_factor=1.0)
    same = torch.ones(EXPERTS, WIDTH, dtype=torch.float64)  # all 16 tokens choose one expert
    result = layer(same)
    kept = 2 if comm.rank == 0 else 0  # of 16 choices, an even share is 2
    assert result.ne(0).any(1).tolist() == [row < kept for row in range(EXPERTS)]
    assert layer.dropped == (EXPERTS - kept) / EXPERTS


def test_layers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="top_k must be from 1 to 1"):
        ExpertParallel(torch.nn.Identity(), [torch.nn.Identity()], 3)
    with pytest.raises(ValueError, match='use "mean" or "sum"'):
        ExpertParallel(torch.nn.Identity(), [torch.nn.Identity()], 1, loss="max")
