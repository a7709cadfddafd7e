"""Random programs on random groups that overlap and interleave, checked against NumPy.

A program depends only on its seed, so every rank knows what all others do.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from expected import REDUCIBLE, meaningful
from random_scenarios.steps import COLLECTIVES, RankStep, Step, draw_step
from unisono import PremulSum
from unisono.comm.communicator import Communicator

KINDS = (*COLLECTIVES, "coalesced", "message", "ring")
OPS = ("sum", "sum", "avg", "product", "min", "max", "band", "bxor", PremulSum(3))


def draw_groups(chance: random.Random, ranks: int) -> list[tuple[int, ...]]:
    """The world, twice, and a few groups of any shape."""
    groups = [tuple(range(ranks)), tuple(range(ranks))]
    for _ in range(6):
        size = chance.randint(1, ranks)
        groups.append(tuple(chance.sample(range(ranks), size)))
    return groups


def draw_any_step(chance: random.Random, groups: list[tuple[int, ...]]) -> Step:
    """With any reduction, parts of any length, and gaps between elements."""
    step = draw_step(chance, groups, REDUCIBLE, (1, 8, 200, 3000, 3000, 40_000), KINDS)
    most = step.counts[0]
    op: str | PremulSum = chance.choice(OPS)
    return replace(
        step,
        counts=tuple(chance.randint(0, most) for _ in step.counts),
        op=op if meaningful(step.dtype, op) else "sum",
        strided=chance.random() < 0.2,
    )


def run_program(comm: Communicator, seed: int, length: int) -> int:
    """Returns how many steps this rank took part in."""
    chance = random.Random(f"{seed} {comm.size}")
    groups = draw_groups(chance, comm.size)
    steps = [draw_any_step(chance, groups) for _ in range(length)]
    under_way: list[tuple[int, RankStep]] = []  # when to wait
    own = 0
    with ExitStack() as stack:  # so that no rank waits for one that failed
        made = [comm.split(members) for members in groups]
        for group in made:
            if group is not None:
                stack.enter_context(group)
        for step in steps:
            group = made[step.group]
            if group is None or comm.rank not in step.members(groups):
                continue
            part = RankStep(group, step)
            part.begin()
            under_way.append((own + part.later, part))
            finish([part for due, part in under_way if due <= own])
            under_way = [(due, part) for due, part in under_way if due > own]
            own += 1
        finish([part for _, part in under_way])
    return own


def finish(parts: list[RankStep]) -> None:
    for part in parts:
        for work in part.works:
            work.wait()
        part.check()


@pytest.mark.ranks([2, 3, 4, 8], timeout_s=300)
def test_random_programs(comm: Communicator) -> None:
    length = {2: 400, 3: 300, 4: 200, 8: 60}[comm.size]
    done = run_program(comm, 1000 + comm.size, length)
    comm.all_reduce(everybodys := torch.tensor(done))
    assert everybodys > length


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.ranks([2, 3, 4, 5, 8], timeout_s=300)
def test_many_long_random_programs(comm: Communicator, seed: int) -> None:
    run_program(comm, 10_000 * (seed + 1), 600)


def small_calls(comm: Communicator, times: int) -> None:
    """Back to back: nothing of one call may leak into the next."""
    for step in range(times):
        count = step % 13
        comm.all_reduce(tensor := torch.full((count,), float(comm.rank + step)))
        total = comm.size * step + sum(range(comm.size))
        assert tensor.tolist() == [total] * count
        if step % 7 == 0:
            comm.broadcast(tensor := torch.tensor([comm.rank]), step % comm.size)
            assert tensor.item() == step % comm.size


@pytest.mark.ranks([2, 4], timeout_s=300)
def test_thousands_of_small_calls(comm: Communicator) -> None:
    small_calls(comm, 40_000 // comm.size)


@pytest.mark.slow
@pytest.mark.ranks([2, 3, 8], timeout_s=900)
def test_a_million_small_calls(comm: Communicator) -> None:
    small_calls(comm, 1_000_000 // comm.size)
