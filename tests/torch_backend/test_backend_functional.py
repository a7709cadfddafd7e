"""Collectives that return tensors, with gradients and without, on the backend "unisono"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from torch_names import (
    functional_all_gather,
    functional_all_gather_coalesced,
    functional_reduce_scatter,
    functional_reduce_scatter_coalesced,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # about old names
RANKS = [1, 2, 3]


def grad_of(output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient of this rank's input if the loss is the sum over ranks of (rank + 1) *
    output.sum()."""
    (output.sum() * (dist.get_rank() + 1)).backward()
    assert input.grad is not None
    return input.grad


@pytest.mark.ranks(RANKS)
def test_functional_collectives(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), float(rank + 1))
    total = float(sum(range(1, size + 1)))
    assert functional.all_reduce(mine, "sum", process_group).eq(total).all()
    assert functional.all_reduce(mine, "avg", process_group).eq(total / size).all()
    assert mine.eq(rank + 1).all()
    gathered = functional_all_gather(mine, 0, process_group)
    assert gathered.tolist() == [peer + 1.0 for peer in range(size) for _ in range(2)]
    part = functional_reduce_scatter(gathered, "sum", 0, process_group)
    assert part.eq(size * (rank + 1)).all()
    part = functional_reduce_scatter(gathered, "avg", 0, process_group)
    assert part.eq(rank + 1).all()
    sent = functional.broadcast(mine, size - 1, process_group)
    assert sent.eq(size).all()
    swapped = functional.all_to_all_single(
        torch.arange(float(size)) + 10 * rank, None, None, process_group
    )
    assert swapped.tolist() == [rank + 10.0 * peer for peer in range(size)]
    uneven = functional.all_to_all_single(
        torch.full((size * rank,), float(rank)), list(range(size)), [rank] * size, process_group
    )
    assert uneven.tolist() == [float(peer) for peer in range(size) for _ in range(peer)]
    both = functional.all_reduce_coalesced([mine, mine * 2], "sum", process_group)
    assert [float(tensor[0]) for tensor in both] == [total, 2 * total]
    both = functional.all_reduce_coalesced([mine, mine[:1]], "max", process_group)
    assert [tensor.tolist() for tensor in both] == [[size] * 2, [size]]
    wide = functional_all_gather_coalesced([mine, mine * 2], process_group)
    assert wide[1].tolist() == [2.0 * (peer + 1) for peer in range(size) for _ in range(2)]
    parts = functional_reduce_scatter_coalesced(wide, "sum", [0, 0], process_group)
    assert parts[1].eq(2 * size * (rank + 1)).all()


@pytest.mark.ranks(RANKS)
def test_gradients_flow_back_through_collectives(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    world = process_group  # the default is the group that existed when torch imported them

    def fresh(count: int = 2) -> torch.Tensor:
        return torch.full((count,), float(rank + 1), requires_grad=True)

    mine = fresh()
    assert grad_of(differentiable.all_reduce(mine, group=world), mine).eq(total).all()
    mine = fresh()
    assert (
        grad_of(torch.cat(list(differentiable.all_gather(mine, group=world))), mine).eq(total).all()
    )
    mine = fresh()
    root_only = torch.tensor(1.0 if rank == 0 else 0.0)
    sent = differentiable.broadcast(mine, 0, world) * root_only
    assert grad_of(sent, mine).eq(1 if rank == 0 else 0).all()
    mine = fresh()
    reduced = differentiable.reduce(mine, 0, group=world) * root_only
    assert grad_of(reduced, mine).eq(1).all()
    mine = fresh(2 * size)
    scattered = differentiable.reduce_scatter(torch.zeros(2), list(mine.chunk(size)), group=world)
    expected = [peer + 1.0 for peer in range(size) for _ in range(2)]
    assert grad_of(scattered, mine).tolist() == expected
    mine = fresh(size)
    swapped = differentiable.all_to_all_single(torch.zeros(size), mine, group=world)
    assert grad_of(swapped, mine).tolist() == [peer + 1.0 for peer in range(size)]
    mine = fresh(size)
    cells = [torch.zeros(1) for _ in range(size)]
    swapped = torch.cat(list(differentiable.all_to_all(cells, list(mine.split(1)), world)))
    assert grad_of(swapped, mine).tolist() == [peer + 1.0 for peer in range(size)]


@pytest.mark.ranks(2)
def test_gradients_pass_through_functional_collectives(process_group: Any) -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    output = functional.all_gather_tensor_autograd(weight * dist.get_rank(), 0, dist.group.WORLD)
    (output * 1.0).sum().backward()  # torch 2.11 does not accept an expanded gradient
    assert weight.grad is not None
    assert float(weight.grad) == 2.0 * dist.get_rank()


@pytest.mark.ranks(2)
def test_a_compiled_all_reduce(process_group: Any) -> None:
    """The graph's collectives reach the backend from C++."""
    result = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", process_group.group_name)
    result = torch.ops._c10d_functional.wait_tensor(result)
    assert result.eq(2).all()
