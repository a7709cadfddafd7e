"""A million calls on groups that come and go: a process has the same resources afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ranks import RankPool, connect
from resources import assert_given_back, held_resources
from unisono.comm.communicator import Communicator

CALLS = 250_000  # per rank; more than a million in the two tests together
A_LIFE = 2000  # calls per set of groups
GROWTH_BYTES = 8 << 20  # allowed: allocators keep memory for reuse


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_million_calls_leave_nothing(fresh_pool: RankPool, ranks: int) -> None:
    grown = fresh_pool.run(live_many_lives, ranks, CALLS, connected=False, deadline_s=300)
    assert max(grown) < GROWTH_BYTES, grown


def live_many_lives(rank: int, size: int, path: str, calls: int) -> int:
    """How many bytes this process grew by, after a warm-up in which it may grow."""
    before = held_resources()
    start_bytes = 0
    with connect(path, rank, size) as world:
        for life in range(-(-calls // A_LIFE)):
            live(world, life)
            if life == calls // A_LIFE // 5:
                start_bytes = resident_bytes()
    assert_given_back(before)
    return resident_bytes() - start_bytes


def live(world: Communicator, life: int) -> None:
    """Some groups, of any members in any order, and many small calls on them."""
    chance = random.Random(life)
    members = [chance.sample(range(world.size), chance.randint(2, world.size)) for _ in range(3)]
    groups = [group for ranks in members if (group := world.split(ranks)) is not None]
    for group in groups:
        call_often(group, A_LIFE // len(members))
        group.close()
    world.barrier()


def call_often(group: Communicator, calls: int) -> None:
    size, rank = group.size, group.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    tensor, got = torch.ones(4), torch.zeros(3)
    parts = torch.zeros(4 * size)
    for call in range(0, calls, 5):
        tensor.fill_(1)
        group.all_reduce(tensor)
        work = group.all_reduce(tensor, async_op=True)
        group.broadcast(tensor, call % size)
        assert work is not None
        work.wait()
        assert tensor[0] == size * size
        group.all_gather(parts, tensor)
        received = group.irecv(got, before, call % 7)
        group.send(tensor[:3], after, call % 7) if rank else received.wait()
        received.wait() if rank else group.send(tensor[:3], after, call % 7)
        assert got[0] == size * size


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
