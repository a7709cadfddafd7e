"""Random programs on random groups that overlap and interleave, checked against NumPy.

A program follows from its seed alone, so that every rank can work out what all others do.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass

import numpy
import pytest
import torch

from expected import REDUCIBLE, assert_same, meaningful, reduced, values
from unisono import PremulSum
from unisono.comm.base import Communicator

OPERATIONS = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "coalesced",
)


@dataclass(frozen=True)
class Line:
    """One call of a program: on which group, what, with what."""

    group: int
    operation: str
    dtype: torch.dtype
    op: str | PremulSum
    root: int
    counts: tuple[int, ...]
    strided: bool
    seed: int


def groups_of(chance: random.Random, ranks: int) -> list[tuple[int, ...]]:
    """The world, twice, and a few groups of any shape."""
    groups = [tuple(range(ranks)), tuple(range(ranks))]
    for _ in range(6):
        size = chance.randint(1, ranks)
        groups.append(tuple(chance.sample(range(ranks), size)))
    return groups


def program(seed: int, ranks: int, length: int) -> tuple[list[tuple[int, ...]], list[Line]]:
    chance = random.Random(f"{seed} {ranks}")
    groups = groups_of(chance, ranks)
    lines = []
    for number in range(length):
        group = chance.randrange(len(groups))
        size = len(groups[group])
        operation = chance.choice(OPERATIONS)
        dtype = chance.choice(REDUCIBLE)
        op: str | PremulSum = chance.choice(
            ("sum", "sum", "avg", "product", "min", "max", "band", "bxor", PremulSum(3))
        )
        if not meaningful(dtype, op):
            op = "sum"
        most = chance.choice((1, 8, 200, 3000, 3000, 40_000))
        counts = tuple(chance.randint(0, most) for _ in range(size * size))
        strided = chance.random() < 0.2
        root = chance.randrange(size)
        lines.append(Line(group, operation, dtype, op, root, counts, strided, seed + number))
    return groups, lines


def run_program(comm: Communicator, seed: int, length: int) -> int:
    groups, lines = program(seed, comm.size, length)
    done = 0
    with ExitStack() as stack:  # so that nobody waits for a rank that failed
        made = [comm.split(members) for members in groups]
        for group in made:
            if group is not None:
                stack.enter_context(group)
        for number, line in enumerate(lines):
            group = made[line.group]
            if group is not None:
                check_line(group, line, f"seed {seed}, line {number}: {line}"[:300])
                done += 1
    return done


def laid(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    """A copy, in one piece or with gaps."""
    if not strided:
        return tensor.clone()
    gaps = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
    gaps[:, 0] = tensor
    return gaps[:, 0]


def check_line(group: Communicator, line: Line, what: str) -> None:
    rank, size, root = group.rank, group.size, line.root
    count = line.counts[0]
    given = [values(line.dtype, count, line.seed, r) for r in range(size)]
    mine = laid(given[rank], line.strided)
    at_root = rank == root
    if line.operation == "barrier":
        group.barrier()
    elif line.operation == "all_reduce":
        group.all_reduce(mine, line.op)
        assert_same(mine.contiguous(), reduced(given, line.op), what)
    elif line.operation == "reduce":
        group.reduce(mine, root, line.op)
        expected = reduced(given, line.op) if at_root else given[rank]
        assert_same(mine.contiguous(), expected, what)
    elif line.operation == "broadcast":
        group.broadcast(mine, root)
        assert_same(mine.contiguous(), given[root], what)
    elif line.operation == "coalesced":
        tensors = [laid(values(line.dtype, n, line.seed, rank), line.strided) for n in line.counts]
        group.all_reduce(tensors, line.op)
        for n, tensor in zip(line.counts, tensors, strict=True):
            every = [values(line.dtype, n, line.seed, r) for r in range(size)]
            assert_same(tensor.contiguous(), reduced(every, line.op), what)
    else:
        check_parts(group, line, what)


def check_parts(group: Communicator, line: Line, what: str) -> None:
    rank, size, root = group.rank, group.size, line.root
    table = numpy.array(line.counts).reshape(size, size)
    at_root = rank == root

    def row(r: int) -> list[torch.Tensor]:
        """What rank r gives to each, in an exchange."""
        counts = table[r].tolist()
        return list(values(line.dtype, sum(counts), line.seed, r).split(counts))

    def empty(count: int) -> torch.Tensor:
        return laid(torch.zeros(int(count), dtype=line.dtype), line.strided)

    if line.operation == "all_to_all":
        taken = [empty(table[r, rank]) for r in range(size)]
        group.all_to_all(taken, [laid(part, line.strided) for part in row(rank)])
        for r, part in enumerate(taken):
            assert_same(part.contiguous(), row(r)[rank], what)
    elif line.operation in ("all_gather", "gather"):
        outputs = [empty(table[r, 0]) for r in range(size)]
        own = laid(row(rank)[0], line.strided)
        if line.operation == "gather":
            group.gather(outputs if at_root else None, own, root)
        else:
            group.all_gather(outputs, own)
        if at_root or line.operation == "all_gather":
            for r, part in enumerate(outputs):
                assert_same(part.contiguous(), row(r)[0], what)
    elif line.operation == "scatter":
        output = empty(table[root, rank])
        group.scatter(output, row(root) if at_root else None, root)
        assert_same(output.contiguous(), row(root)[rank], what)
    else:
        counts = table[0].tolist()
        every = [values(line.dtype, sum(counts), line.seed, r) for r in range(size)]
        output = empty(counts[rank])
        group.reduce_scatter(output, list(every[rank].split(counts)), line.op)
        assert_same(output.contiguous(), reduced(every, line.op).split(counts)[rank], what)


@pytest.mark.ranks([2, 3, 4, 8])
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
    """As fast as they come: what is left of one call must not show in the next."""
    for step in range(times):
        count = step % 13
        comm.all_reduce(tensor := torch.full((count,), float(comm.rank + step)))
        total = comm.size * step + sum(range(comm.size))
        assert tensor.tolist() == [total] * count
        if step % 7 == 0:
            comm.broadcast(tensor := torch.tensor([comm.rank]), step % comm.size)
            assert tensor.item() == step % comm.size


@pytest.mark.ranks([2, 4])
def test_thousands_of_small_calls(comm: Communicator) -> None:
    small_calls(comm, 40_000 // comm.size)


@pytest.mark.slow
@pytest.mark.ranks([2, 3, 8], timeout_s=900)
def test_a_million_small_calls(comm: Communicator) -> None:
    small_calls(comm, 1_000_000 // comm.size)
