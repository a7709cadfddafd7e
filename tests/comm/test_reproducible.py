"""Reproducible reductions: the bits depend on the contributions alone, not on who brings them.

The expected results are computed from the top of the tree down, by NumPy; the engine works upwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy
import pytest
import torch

import made_up_hosts
import unisono
from expected import assert_same
from ranks import RankPool, attempt, raised, subgroup
from unisono import CollectiveMismatch, PremulSum
from unisono.comm.communicator import Communicator

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COUNTS = (70_001, 5, 1, 1003)
CONTRIBUTIONS = 16
PLACEMENTS = ("AAB", "ABCA")


def random_numbers(chance: numpy.random.Generator, count: int, kind: int) -> Any:
    """Of ordinary size; of very different sizes; denormal; or such that most cancel out."""
    numbers = chance.normal(size=(CONTRIBUTIONS, count))
    if kind == 1:
        numbers *= 2.0 ** chance.integers(-13, 14, size=numbers.shape)
    elif kind == 2:
        numbers *= 2.0 ** chance.choice([-24, -130, -1060], size=(1, count))
    elif kind == 3:
        half = CONTRIBUTIONS // 2
        numbers[half:] = -numbers[chance.permutation(half)] * (
            1 + 1e-4 * chance.normal(size=(half, count))
        )
    return numbers


def contributions(dtype: torch.dtype, count: int, seed: int) -> list[torch.Tensor]:
    numbers = random_numbers(numpy.random.default_rng(seed), count, seed % 4)
    return [torch.from_numpy(row).to(dtype) for row in numbers]


def tree(rows: list[Any], join: Callable[[Any, Any], Any], first: int, span: int) -> Any:
    """The value of a node; None if it has no contributions."""
    if first >= len(rows):
        return None
    if span == 1:
        return rows[first]
    left, right = (tree(rows, join, at, span // 2) for at in (first, first + span // 2))
    return left if right is None else join(left, right)


JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": numpy.add,
    "avg": numpy.add,
    "product": numpy.multiply,
    "min": lambda a, b: numpy.where((b < a) | (b != b), b, a),
    "max": lambda a, b: numpy.where((b > a) | (b != b), b, a),
}


def expected(given: list[torch.Tensor], op: str | PremulSum = "sum") -> torch.Tensor:
    dtype = given[0].dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    rows = [(row.float() if is_half else row).numpy() for row in given]
    if isinstance(op, PremulSum):
        rows = [row * row.dtype.type(op.factor) for row in rows]
    span = 1 << (len(rows) - 1).bit_length()
    with numpy.errstate(all="ignore"):
        total = tree(rows, JOINS["sum" if isinstance(op, PremulSum) else op], 0, span)
        if op == "avg":
            total = total / total.dtype.type(len(rows))
    return torch.from_numpy(numpy.ascontiguousarray(total)).to(dtype)


def shares(size: int, total: int = CONTRIBUTIONS, uneven: Random | None = None) -> list[range]:
    """Which contributions each rank brings: about equally many, or a random number of them."""
    if uneven is None:
        cuts = [total * rank // size for rank in range(size + 1)]
    else:
        cuts = [0, *sorted(uneven.sample(range(1, total), size - 1)), total]
    return [range(*pair) for pair in pairwise(cuts)]


def check(comm: Communicator, dtype: torch.dtype, count: int, seed: int, op: Any = "sum") -> None:
    """Every operation, with one contribution or several for each rank."""
    given, what = contributions(dtype, count, seed), (dtype, count, seed, op)
    result = expected(given, op)
    uneven = Random(seed) if seed % 2 else None
    mine = [given[i] for i in shares(comm.size, uneven=uneven)[comm.rank]]
    comm.all_reduce(got := torch.zeros(count, dtype=dtype), op, contributions=mine)
    assert_same(got, result, what)
    root = seed % comm.size
    comm.reduce(got := torch.zeros(count, dtype=dtype), root, op, contributions=mine)
    assert_same(got, result if comm.rank == root else torch.zeros_like(got), (*what, "reduce"))
    part = count // comm.size
    wide = [row[: part * comm.size].contiguous() for row in mine]
    comm.reduce_scatter(got := torch.zeros(part, dtype=dtype), op=op, contributions=wide)
    assert_same(got, result[comm.rank * part :][:part], (*what, "reduce_scatter"))

    given = given[: comm.size]
    result, mine = expected(given, op), [given[comm.rank]]
    comm.all_reduce(got := mine[0].clone(), op, reproducible=True)
    assert_same(got, result, (*what, "one each"))
    comm.reduce(got := mine[0].clone(), root, op, reproducible=True)
    assert_same(got, result if comm.rank == root else mine[0], (*what, "one each, reduce"))
    got = torch.zeros(part, dtype=dtype)
    comm.reduce_scatter(got, mine[0][: part * comm.size].contiguous(), op, reproducible=True)
    assert_same(got, result[comm.rank * part :][:part], (*what, "one each, reduce_scatter"))


def check_all(comm: Communicator) -> None:
    for seed, (dtype, count) in enumerate(zip(FLOATS * 2, COUNTS * 2, strict=True)):
        check(comm, dtype, count, seed)
    for op in ("avg", "product", "min", "max", PremulSum(1 / 3)):
        check(comm, torch.bfloat16 if op == "avg" else torch.float32, 1003, 11, op)
    check(comm, torch.float32, 0, 12)


def check_cases(comm: Communicator, cases: int) -> None:
    """Random cases, also of several tensors at once, in the background, and of any counts."""
    chance = Random(5)
    for seed in range(cases):
        dtype, count = chance.choice(FLOATS), chance.choice((1, 3, 17, 33))
        given = contributions(dtype, count, seed)
        total = chance.randint(comm.size, CONTRIBUTIONS)
        cut = shares(comm.size, total, Random(seed))[comm.rank]
        mine = [given[i] for i in cut]
        got = torch.zeros(count, dtype=dtype)
        work = comm.all_reduce(got, contributions=mine, async_op=bool(seed % 2))
        if work is not None:
            work.wait()
        assert_same(got, expected(given[:total]), (seed, dtype, count, total))


@pytest.mark.ranks([1, 2, 3, 4, 8])
def test_bits_do_not_depend_on_the_number_of_ranks(comm: Communicator) -> None:
    check_all(comm)
    check_cases(comm, 60)


@pytest.mark.ranks(16)
@pytest.mark.slow
def test_nor_on_sixteen(comm: Communicator) -> None:
    check_all(comm)


@pytest.mark.ranks([1, 2, 3, 4, 8])
@pytest.mark.slow
def test_ten_thousand_random_cases(comm: Communicator) -> None:
    check_cases(comm, 10_000)


def on_hosts(rank: int, size: int, path: str, hosts: str, cases: int) -> None:
    with made_up_hosts.world(rank, path, hosts) as comm:
        check_all(comm)
        check_cases(comm, cases)


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_bits_do_not_depend_on_the_placement(pool: RankPool, hosts: str) -> None:
    pool.run(on_hosts, len(hosts), hosts, 20, connected=False)


def random_placements() -> Iterator[str]:
    chance = Random(3)
    for _ in range(20):
        size = chance.choice((3, 4, 8))
        hosts = "ABCD"[: chance.randint(2, min(size, 4))]
        yield "".join(
            chance.sample(hosts + "".join(chance.choices(hosts, k=size - len(hosts))), size)
        )


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "ABBA", "ABCD", "ABBB", *random_placements()])
def test_nor_on_random_ones(pool: RankPool, hosts: str) -> None:
    pool.run(on_hosts, len(hosts), hosts, 500, connected=False, deadline_s=300)


# -- what else a call may be ----------------------------------------------------------------------


@pytest.mark.ranks([1, 3, 4])
def test_tensors_of_any_layout_lists_and_several_dtypes(comm: Communicator) -> None:
    cut = shares(comm.size)[comm.rank]
    for count in (7, 3001):
        floats, halves = (
            contributions(dtype, count, 8) for dtype in (torch.float32, torch.float16)
        )
        longs = [(row * 100).long() for row in contributions(torch.float64, count, 8)]
        strided = [torch.stack([floats[i], floats[i]], 1)[:, 1] for i in cut]
        got = torch.zeros(count, 2)[:, 0]
        comm.all_reduce(got, contributions=strided)
        assert_same(got.contiguous(), expected(floats), count)

        outputs = [
            torch.zeros(count),
            torch.zeros(count, dtype=torch.float16),
            torch.zeros(count).long(),
        ]
        lists = [[floats[i], halves[i], longs[i]] for i in cut]
        comm.all_reduce(outputs, contributions=lists)
        for output, result in zip(
            outputs, (expected(floats), expected(halves), sum(longs)), strict=True
        ):
            assert_same(output, result, (count, output.dtype))

        comm.all_reduce(
            first := floats[cut[0]].clone(), contributions=[first, *(floats[i] for i in cut[1:])]
        )
        assert_same(first, expected(floats), "in place")
        array = numpy.zeros(count, numpy.float32)
        comm.all_reduce(array, contributions=[floats[i].numpy() for i in cut], reproducible=True)
        assert_same(torch.from_numpy(array), expected(floats), "an array")
    comm.all_reduce(nothing := torch.zeros(0), contributions=[torch.zeros(0)])
    assert not nothing.numel()


def test_the_error_is_within_its_bound() -> None:
    """The sum of the magnitudes, times a rounding for each level; Fractions are exact."""
    for seed in range(400):
        given = contributions(torch.float32, 5, seed)
        got = expected(given).tolist()
        for at in range(5):
            exact = [Fraction(row[at].item()) for row in given]
            roundings = Fraction(4, 2**24)
            most = roundings / (1 - roundings) * sum(map(abs, exact))
            assert abs(Fraction(got[at]) - sum(exact)) <= most


@pytest.mark.ranks([2, 4])
def test_nans_and_infinities_are_those_of_ieee(comm: Communicator) -> None:
    for dtype in FLOATS:
        given = contributions(dtype, 64, 4)
        for at, values in enumerate(
            [(numpy.inf,), (numpy.inf, -numpy.inf), (numpy.nan,), (-0.0,) * 16]
        ):
            for number, value in enumerate(values):
                given[(3 * number + at) % 16][at] = value
        for op in ("sum", "avg", "product", "min", "max"):
            mine = [given[i] for i in shares(comm.size)[comm.rank]]
            comm.all_reduce(got := torch.zeros(64, dtype=dtype), op, contributions=mine)
            result = expected(given, op)
            assert torch.equal(got.isnan(), result.isnan()), (dtype, op)
            assert_same(got[~got.isnan()], result[~result.isnan()], (dtype, op))


@pytest.mark.ranks(4)
def test_a_group_may_have_it_as_its_default(comm: Communicator) -> None:
    given = contributions(torch.float32, 2001, 9)[:4]
    with subgroup(comm, range(4)) as group:
        assert not group.reproducible
        group.reproducible = True
        group.all_reduce(got := given[comm.rank].clone())
        assert_same(got, expected(given), "blocking")
        group.all_reduce(got := given[comm.rank].clone(), async_op=True).wait()
        assert_same(got, expected(given), "asynchronous")
        with subgroup(group, range(4), "again") as again:
            assert again.reproducible
        group.all_reduce(got := given[comm.rank].clone(), reproducible=False)
        total = given[0] + given[1] + given[2] + given[3]
        assert_same(got, total, "in rank order")
        raised(ValueError, partial(group.all_reduce, got, algorithm="ring"))
    assert not torch.equal(total, expected(given)), "these inputs do not show the order"


@pytest.mark.ranks(4)
def test_the_plain_functions_have_it(comm: Communicator) -> None:
    given = contributions(torch.float32, 2000, 9)[:4]
    mine, result = given[comm.rank], expected(given)
    assert_same(unisono.all_reduce(mine.clone(), reproducible=True), result, "all_reduce")
    work: Any = unisono.all_reduce(mine.clone(), async_op=True, reproducible=True)
    assert_same(work.wait(), result, "asynchronous")
    leaves = unisono.all_reduce({"a": mine.clone()}, reproducible=True)
    assert_same(leaves["a"], result, "a structure")
    got = unisono.reduce(mine, 1, reproducible=True)
    assert got is None if comm.rank != 1 else torch.equal(got, result)
    part = unisono.reduce_scatter(mine, reproducible=True)
    assert_same(part, result.chunk(4)[comm.rank], "reduce_scatter")


@pytest.mark.ranks(4)
def test_what_cannot_be_is_refused_on_every_rank(comm: Communicator) -> None:
    x = torch.ones(4)

    def refused(*args: Any, **named: Any) -> str:
        return str(attempt(partial(comm.all_reduce, *args, **named)))

    assert "at least one" in refused(x, contributions=[])
    assert "at least one" in refused(x, contributions=x)
    assert "contribution 1 has 3 elements" in refused(x, contributions=[x, torch.ones(3)])
    assert "contribution 0 is float64" in refused(x, contributions=[x.double()])
    assert "one tensor" in refused(x, contributions=[[x]])
    assert "shares memory" in refused(x, contributions=[torch.ones(4), x])
    assert "makes a reduction reproducible" in refused(x, contributions=[x], reproducible=False)
    assert "own order" in refused(x, algorithm="ring", reproducible=True)
    assert "not defined" in refused(x.long(), "avg", contributions=[x.long()])
    raised(ValueError, partial(comm.reduce_scatter, torch.ones(1), x, contributions=[x]))
    raised(ValueError, partial(comm.reduce_scatter, torch.ones(2), contributions=[x]))
    raised(ValueError, partial(comm.reduce, x, 9, contributions=[torch.ones(4)]))
    comm.all_reduce(x)
    assert x.tolist() == [4] * 4


def differ(comm: Communicator, way: str) -> str:
    odd, x = comm.rank == 2, torch.ones(5000)
    if way == "argument":
        error = raised(CollectiveMismatch, partial(comm.all_reduce, x, reproducible=odd))
    elif way == "property":
        comm.reproducible = odd
        error = raised(CollectiveMismatch, comm.all_reduce, x)
    elif way == "contributions":
        listed: Any = {"contributions": [torch.ones(5000)]} if odd else {"reproducible": True}
        error = raised(CollectiveMismatch, partial(comm.all_reduce, x, **listed))
    else:
        comm.reproducible = True
        error = raised(CollectiveMismatch, comm.all_reduce, torch.ones(2), "max" if odd else "sum")
    assert torch.equal(x, torch.ones(5000))
    assert error.culprits == (2,)
    return str(error)


@pytest.mark.parametrize("way", ["argument", "property", "contributions", "reduction"])
def test_ranks_that_differ_are_told_so(fresh_pool: RankPool, way: str) -> None:
    for text in fresh_pool.run(differ, 3, way):
        assert text.startswith("rank 2 "), text
        assert "reproducible sum" in text
        assert way != "contributions" or "reproducible sum of listed contributions" in text
        assert way != "reduction" or "reproducible max" in text


def sum_through_torch(rank: int, size: int, path: str) -> bytes:
    import torch.distributed as dist

    given = contributions(torch.float32, 2000, 13)[:size]
    os.environ["UNISONO_REPRODUCIBLE"] = "1"
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        dist.all_reduce(first := given[rank].clone())
        dist.all_reduce(second := given[rank].clone(), async_op=True).wait()
        dist.reduce_scatter_tensor(part := torch.zeros(2000 // size), given[rank].clone())
        assert torch.equal(first, second)
        assert torch.equal(part, torch.split(first, 2000 // size)[rank])
        assert_same(first, expected(given), size)
        return first.numpy().tobytes()
    finally:
        dist.destroy_process_group()
        del os.environ["UNISONO_REPRODUCIBLE"]


def test_through_torch_distributed(fresh_pool: RankPool) -> None:
    assert len(set(fresh_pool.run(sum_through_torch, 4, connected=False))) == 1


def lose_a_rank(comm: Communicator) -> bytes:
    """After a death the remaining ranks bring the same contributions."""
    given, group = contributions(torch.float32, 3001, 21), comm
    results = []
    for step in range(4):
        if step == 2 and comm.rank == 1:
            os.kill(os.getpid(), 9)
        while True:
            mine = [given[i] for i in shares(group.size)[group.rank]]
            got = torch.zeros(3001)
            try:
                group.all_reduce(got, contributions=mine)
                break
            except unisono.PeerLost:
                group = group.shrink()
        results.append(got)
    assert group.size == 3
    assert all(torch.equal(got, expected(given)) for got in results)
    return got.numpy().tobytes()


def test_the_bits_survive_a_death(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(lose_a_rank, 4)
    left = [outcome for rank, outcome in enumerate(outcomes) if rank != 1]
    assert all(outcome.error is None for outcome in left), left
    assert len({outcome.value for outcome in left}) == 1
