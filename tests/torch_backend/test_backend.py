"""torch.distributed on the backend "unisono": every function reaches the engine and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_names import all_gather_single, reduce_scatter_single
from unisono.errors import CollectiveMismatch, UnisonoError

RANKS = [1, 2, 3, 4]


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_of_tensors(process_group: Any, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))

    def done(work: Any) -> None:
        if async_op:
            assert work.wait()
            assert work.is_completed()
        else:
            assert work is None

    mine = torch.full((5,), float(rank + 1))
    summed = mine.clone()
    done(dist.all_reduce(summed, async_op=async_op))
    assert summed.eq(total).all()
    root = size - 1
    reduced = mine.clone()
    done(dist.reduce(reduced, root, async_op=async_op))
    assert reduced.eq(total if rank == root else rank + 1).all()
    sent = mine.clone()
    done(dist.broadcast(sent, root, async_op=async_op))
    assert sent.eq(size).all()
    gathered = [torch.zeros(5) for _ in range(size)]
    done(dist.all_gather(gathered, mine, async_op=async_op))
    assert [float(part[0]) for part in gathered] == [peer + 1.0 for peer in range(size)]
    wide = torch.zeros(5 * size)
    done(all_gather_single(wide, mine, async_op=async_op))
    assert torch.equal(wide, torch.cat(gathered))
    part = torch.zeros(2)
    done(reduce_scatter_single(part, torch.arange(2.0 * size), async_op=async_op))
    assert torch.equal(part, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * size)
    parts = [torch.full((2,), float(peer)) for peer in range(size)]
    done(dist.reduce_scatter(part, parts, async_op=async_op))
    assert part.eq(rank * size).all()
    received = torch.zeros(size)
    done(dist.all_to_all_single(received, torch.full((size,), float(rank)), async_op=async_op))
    assert torch.equal(received, torch.arange(float(size)))
    done(dist.barrier(async_op=async_op))


@pytest.mark.ranks(3)
def test_a_mismatch_shows_the_user_s_line(process_group: Any) -> None:
    with pytest.raises(CollectiveMismatch, match=r"test_backend.py:[0-9]+ in test_a_mismatch"):
        dist.all_reduce(torch.ones(3 + dist.get_rank() // 2))


def test_a_backend_for_another_device_is_refused() -> None:
    with pytest.raises(UnisonoError, match=r"new_group\(backend=\"unisono\"\)"):
        dist.init_process_group(
            "cpu:unisono,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )
