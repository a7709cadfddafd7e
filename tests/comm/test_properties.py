"""Properties that hold for any shape, layout, count, dtype, op and set of members."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expected import FLOATS, OPS, REDUCIBLE, assert_same, inputs, meaningful, reduced, values
from ranks import RankPool
from unisono import PremulSum
from unisono.comm.communicator import Communicator

relaxed = settings(
    derandomize="EXPLORE"
    not in os.environ,  # the same examples every time, unless others are requested
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
dtypes = st.sampled_from(REDUCIBLE)
ops = st.one_of(
    st.sampled_from(OPS),
    st.sampled_from([-2.0, 0.0, 3.0, 0.25]).map(PremulSum),
)
counts = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 120_000))
members = st.permutations(range(4)).flatmap(
    lambda order: st.integers(1, 4).map(lambda length: tuple(order[:length]))
)
seeds = st.integers(0, 2**31)


@st.composite
def reductions(draw: st.DrawFn) -> tuple[torch.dtype, str | PremulSum]:
    dtype, op = draw(dtypes), draw(ops)
    return (dtype, op) if meaningful(dtype, op) else (dtype, "sum")


@dataclass(frozen=True)
class Layout:
    """A view of a tensor of `shape`: a step along each dimension, then a permutation of them."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]

    def of(self, base: torch.Tensor) -> torch.Tensor:
        window = base[tuple(slice(None, None, step) for step in self.steps)]
        return window.permute(self.order)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dims = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims)))
    steps = tuple(draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims)))
    return Layout(shape, steps, tuple(draw(st.permutations(range(dims)))))


@relaxed
@given(reduction=reductions(), count=counts, ranks=members, seed=seeds)
def test_any_members_reduce_anything(
    pool: RankPool, reduction: Any, count: int, ranks: tuple[int, ...], seed: int
) -> None:
    pool.run(members_reduce, 4, *reduction, count, ranks, seed)


def members_reduce(
    comm: Communicator,
    dtype: torch.dtype,
    op: str | PremulSum,
    count: int,
    ranks: tuple[int, ...],
    seed: int,
) -> None:
    group = comm.split(ranks)
    if group is None:
        return
    with group:
        given = [values(dtype, count, seed, rank) for rank in ranks]
        result = reduced(given, op)
        group.all_reduce(tensor := given[group.rank].clone(), op)
        assert_same(tensor, result)
        root = seed % group.size
        group.reduce(tensor := given[group.rank].clone(), root, op)
        assert_same(tensor, result if group.rank == root else given[group.rank])
        cuts = [(seed >> r) % (count + 1) for r in range(group.size - 1)]
        edges = [0, *sorted(cuts), count]
        sizes = [b - a for a, b in pairwise(edges)]
        output = torch.zeros(sizes[group.rank], dtype=dtype)
        group.reduce_scatter(output, list(given[group.rank].split(sizes)), op)
        assert_same(output, result.split(sizes)[group.rank])
        parts = [torch.zeros(size, dtype=dtype) for size in sizes]
        group.all_gather(parts, output)
        assert_same(torch.cat(parts), result)


@relaxed
@given(layout=layouts(), reduction=reductions(), ranks=st.sampled_from([1, 2, 3, 4]), seed=seeds)
def test_any_layout_gives_and_takes(
    pool: RankPool, layout: Layout, reduction: Any, ranks: int, seed: int
) -> None:
    pool.run(layout_gives_and_takes, ranks, layout, *reduction, seed)


def layout_gives_and_takes(
    comm: Communicator, layout: Layout, dtype: torch.dtype, op: str | PremulSum, seed: int
) -> None:
    count = torch.Size(layout.shape).numel()
    bases = [row.reshape(layout.shape) for row in inputs(comm.size, dtype, count, seed)]
    views = [layout.of(base) for base in bases]
    mine = bases[comm.rank].clone()
    comm.all_reduce(layout.of(mine), op)
    expected = bases[comm.rank].clone()
    result = reduced([view.contiguous() for view in views], op)
    layout.of(expected).copy_(result)
    assert_same(mine, expected, layout)

    mine = bases[comm.rank].clone()
    root = seed % comm.size
    comm.broadcast(layout.of(mine), root)
    expected = bases[comm.rank].clone()
    layout.of(expected).copy_(views[root])
    assert_same(mine, expected, layout)

    outputs = [base.clone() for base in bases]
    comm.all_gather([layout.of(output) for output in outputs], views[comm.rank])
    for rank, output in enumerate(outputs):
        expected = bases[rank].clone()
        layout.of(expected).copy_(views[rank])
        assert_same(output, expected, layout)


@relaxed
@given(
    table=st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.one_of(st.integers(0, 9), counts), min_size=ranks, max_size=ranks),
            min_size=ranks,
            max_size=ranks,
        )
    ),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
    seed=seeds,
)
def test_any_table_of_counts_is_exchanged(
    pool: RankPool, table: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    pool.run(exchange_by_table, len(table), table, dtype, seed)


def exchange_by_table(
    comm: Communicator, table: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    given = [list(values(dtype, sum(row), seed, rank).split(row)) for rank, row in enumerate(table)]
    taken = [torch.zeros(row[comm.rank], dtype=dtype) for row in table]
    comm.all_to_all(taken, given[comm.rank])
    for rank, output in enumerate(taken):
        assert_same(output, given[rank][comm.rank], rank)
    root = seed % comm.size
    at_root = comm.rank == root
    comm.scatter(taken[root], given[root] if at_root else None, root)
    assert_same(taken[root], given[root][comm.rank])
    column = [torch.zeros(row[root], dtype=dtype) for row in table]
    comm.gather(column if at_root else None, given[comm.rank][root], root)
    for rank, output in enumerate(column if at_root else []):
        assert_same(output, given[rank][root], rank)


@relaxed
@given(
    kinds=st.lists(st.tuples(st.sampled_from(FLOATS), st.integers(0, 5000)), max_size=12),
    op=st.sampled_from(["sum", "avg", "min", "max", "product"]),
    ranks=st.sampled_from([2, 3]),
    seed=seeds,
)
def test_any_list_of_tensors_is_coalesced(
    pool: RankPool, kinds: list[tuple[torch.dtype, int]], op: str, ranks: int, seed: int
) -> None:
    pool.run(coalesce, ranks, kinds, op, seed)


def coalesce(comm: Communicator, kinds: list[tuple[torch.dtype, int]], op: str, seed: int) -> None:
    given = [inputs(comm.size, dtype, count, seed + i) for i, (dtype, count) in enumerate(kinds)]
    tensors = [row[comm.rank].clone() for row in given]
    comm.all_reduce(tensors, op)
    for tensor, row in zip(tensors, given, strict=True):
        assert_same(tensor, reduced(row, op))


@dataclass(frozen=True)
class Batch:
    """Messages from one rank to another: `repeats` messages with each tag; each tag has its own
    count."""

    source: int
    target: int
    counts: dict[int, int]
    repeats: int
    from_anybody: bool


@st.composite
def message_batches(draw: st.DrawFn) -> list[Batch]:
    """Some messages; no two senders use one tag."""
    batches = []
    for group in range(draw(st.integers(1, 5))):
        repeats = draw(st.sampled_from([1, 1, 2, 400]))
        sizes = [0, 1, 20, 21] if repeats > 2 else [0, 1, 20, 21, 9000, 40_000]
        counts = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4))
        by_tag = {10 * group + number: count for number, count in enumerate(counts)}
        source, target = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        batches.append(Batch(source, target, by_tag, repeats, draw(st.booleans())))
    return batches


@settings(relaxed, max_examples=25)
@given(batches=message_batches(), rounds=st.integers(1, 3), seed=seeds)
def test_any_messages_arrive(pool: RankPool, batches: list[Batch], rounds: int, seed: int) -> None:
    pool.run(exchange_messages, 3, batches, rounds, seed)


def exchange_messages(comm: Communicator, batches: list[Batch], rounds: int, seed: int) -> None:
    """All is sent at once, received in any order of tags, and waited for in any order."""
    chance = random.Random(seed + comm.rank)
    for _ in range(rounds):
        works = [
            comm.isend(_content(tag, repeat, count), batch.target, tag)
            for batch in batches
            if batch.source == comm.rank
            for repeat in range(batch.repeats)
            for tag, count in batch.counts.items()
        ]
        wanted = [
            (batch, tag)
            for batch in batches
            if batch.target == comm.rank
            for tag in [*batch.counts] * batch.repeats
        ]
        received: Counter[int] = Counter()
        checks = []
        for batch, tag in chance.sample(wanted, len(wanted)):
            count = batch.counts[tag]
            output = torch.full((count,), -1)
            works.append(comm.irecv(output, None if batch.from_anybody else batch.source, tag))
            checks.append((output, _content(tag, received[tag], count)))
            received[tag] += 1
        for work in chance.sample(works, len(works)):
            work.wait()
        assert all(torch.equal(output, expected) for output, expected in checks)


def _content(tag: int, repeat: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 1_000_000 * tag + 1000 * repeat
