"""Wire formats: sums cross between hosts in few bits. The expected numbers are computed by NumPy
and torch's own float8; hosts are simulated."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch

from expected import assert_same
from made_up_hosts import world
from ranks import RankPool, attempt, raised
from unisono import CollectiveMismatch
from unisono.comm.communicator import Communicator
from unisono.comm.reductions import WIRES

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def crossed(row: Any, wire: str) -> Any:
    """A row of float32 as the other hosts see it."""
    if wire == "bfloat16":
        return torch.from_numpy(row).bfloat16().float().numpy()
    result = numpy.empty_like(row)
    for first in range(0, len(row), 256):
        block = row[first : first + 256]
        most = numpy.abs(block).max() if numpy.isfinite(block).all() else 0
        scale = most / numpy.float32(125 if wire == "int8" else 416)
        scaled = block / scale if scale else block * 0 + 0.0
        if wire == "int8":
            codes = numpy.rint(scaled) + 0.0  # there is no -0
        else:
            limited = torch.from_numpy(scaled.clip(-416, 416).astype(numpy.float32))
            codes = limited.to(torch.float8_e4m3fn).float().numpy()
        result[first : first + 256] = codes.astype(numpy.float32) * scale
    return result


def numbers(count: int, rank: int) -> torch.Tensor:
    """Of magnitudes that differ from block to block and inside one; some blocks are zeros."""
    chance = numpy.random.default_rng([count, rank])
    sizes = 2.0 ** chance.integers(-30, 30, -(-count // 300)).repeat(300)[:count]
    sizes *= 2.0 ** chance.integers(-9, 10, count)
    sizes[600:1200] = 0
    return torch.from_numpy(chance.normal(size=count) * sizes).float()


def sum_of_two(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AB") as comm:
        for dtype in FLOATS:
            for wire in WIRES:
                for count in (2049, 70_001):
                    given = [(numbers(count, r) / 2**36).to(dtype) for r in range(2)]
                    rows = [each.float().numpy() for each in given]
                    half = -(-count // 2)  # each rank owns a half, and crosses the other's
                    parts = [
                        rows[owner][part] + crossed(rows[1 - owner][part], wire)
                        for owner, part in enumerate((slice(half), slice(half, None)))
                    ]
                    total = numpy.concatenate([crossed(part, wire) for part in parts])
                    comm.all_reduce(got := given[rank].clone(), wire=wire)
                    assert_same(got, torch.from_numpy(total).to(dtype), (dtype, wire, count))
                    work = comm.all_reduce(got := given[rank].clone(), wire=wire, async_op=True)
                    work.wait()
                    assert_same(got, torch.from_numpy(total).to(dtype), "asynchronous")


def test_every_number_is_the_one_that_was_promised(pool: RankPool) -> None:
    pool.run(sum_of_two, 2, connected=False)


def bound(wire: str, partials: list[Any], total: Any) -> Any:
    """The most that a sum may be wrong: what each host's partial sum and the result may lose."""
    most = 1 / 250 if wire == "int8" else 1 / 16 if wire == "fp8" else 2**-8
    if wire == "bfloat16":
        largest = sum(map(numpy.abs, [*partials, total]))
    else:
        largest = sum(numpy.abs(each).max() for each in [*partials, total])
    return most * largest * 1.2 + 1e-6


def sum_on_hosts(rank: int, size: int, path: str, hosts: str) -> list[bytes]:
    found = []
    with world(rank, path, hosts) as comm:
        for count in (6000, 700_001):
            chance = numpy.random.default_rng(count)
            given = chance.normal(size=(size, count)).astype(numpy.float32)
            partials = [
                sum(given[r] for r in range(size) if hosts[r] == host)
                for host in sorted(set(hosts))
            ]
            for wire in WIRES:
                for op, times in (("sum", 1), ("avg", 1 / size)):
                    comm.all_reduce(got := torch.from_numpy(given[rank]).clone(), op, wire=wire)
                    exact = given.astype(numpy.float64).sum(0) * times
                    most = bound(wire, [each * times for each in partials], exact)
                    assert (numpy.abs(got.numpy() - exact) <= most).all(), (wire, op, count)
                    found.append(got.numpy().tobytes())
    return found


@pytest.mark.parametrize("hosts", ["ABBA", "ABC"])
def test_the_error_is_within_its_bound_and_the_same_everywhere(pool: RankPool, hosts: str) -> None:
    results = pool.run(sum_on_hosts, len(hosts), hosts, connected=False)
    assert all(result == results[0] for result in results)


def sum_infinities(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AB") as comm:
        for wire in WIRES:
            x = torch.ones(5000)
            if rank == 1:
                x[[10, 4990]], x[[20, 4980]], x[[30, 4970]] = torch.inf, -torch.inf, torch.nan
            comm.all_reduce(x, wire=wire)
            assert (x[[10, 4990]] == torch.inf).all()
            assert (x[[20, 4980]] == -torch.inf).all()
            assert x[[30, 4970]].isnan().all()
            rest = torch.ones(5000, dtype=torch.bool)
            rest[[10, 4990, 20, 4980, 30, 4970]] = False
            assert torch.allclose(x[rest], torch.tensor(2.0), rtol=0.05), wire
            tiny = torch.full((5000,), 1e-44)
            comm.all_reduce(tiny, wire=wire)
            assert tiny.abs().max() < 1e-43


def test_nans_and_infinities_cross(pool: RankPool) -> None:
    pool.run(sum_infinities, 2, connected=False)


def feed_back(rank: int, size: int, path: str) -> None:
    """What a step loses, the next adds: after many steps the total is off by one step's error."""
    steps, count = 40, 20_000
    with world(rank, path, "ABBA") as comm:
        given = numpy.random.default_rng(2).normal(size=(size, count)).astype(numpy.float32)
        for op, exact in (("sum", given.sum(0)), ("avg", given.mean(0))):
            wrong = {}
            for kept in (False, True):
                residual = torch.zeros(count) if kept else None
                total = torch.zeros(count, dtype=torch.float64)
                for _ in range(steps):
                    x = torch.from_numpy(given[rank]).clone()
                    comm.all_reduce(x, op, wire="int8", residual=residual)
                    total += x
                wrong[kept] = float((total / steps - torch.from_numpy(exact)).abs().max())
            assert wrong[True] < 4 * wrong[False] / steps, (op, wrong)


def test_a_residual_feeds_errors_back(pool: RankPool) -> None:
    pool.run(feed_back, 4, connected=False)


@pytest.mark.ranks(2)
def test_on_one_host_nothing_is_lost(comm: Communicator) -> None:
    x = numbers(9000, comm.rank)
    comm.all_reduce(got := x.clone(), wire="int8")
    assert_same(got, numbers(9000, 0) + numbers(9000, 1), "full precision")
    residual = torch.zeros(9000)
    comm.all_reduce(x.clone(), wire="int8", residual=residual)
    assert not residual.any()


@pytest.mark.ranks(2)
def test_what_cannot_cross_is_refused(comm: Communicator) -> None:
    x = torch.ones(6)

    def refused(*args: Any, **named: Any) -> str:
        return str(attempt(partial(comm.all_reduce, *args, **named)))

    assert "unknown wire format" in refused(x, wire="int4")
    assert "unknown wire format" in refused(x, residual=torch.zeros(6))
    assert "for sums and averages" in refused(x, "max", wire="int8")
    assert "not int64" in refused(x.long(), wire="int8")
    assert "not float64" in refused(x.double(), wire="fp8")
    assert "excludes" in refused(x, wire="int8", reproducible=True)
    assert "excludes" in refused(x, wire="int8", algorithm="ring")
    assert "as many elements" in refused(x, wire="int8", residual=torch.zeros(5))
    assert "float32" in refused(x, wire="int8", residual=torch.zeros(6, dtype=torch.float64))
    assert "float32" in refused(x, wire="int8", residual=torch.zeros(12)[::2])
    assert "shares memory" in refused(x, wire="int8", residual=x)
    comm.all_reduce(x)
    assert x.tolist() == [2] * 6


def differ(rank: int, size: int, path: str) -> str:
    with world(rank, path, "ABB") as comm:
        x = torch.ones(50_000)
        wire: Any = "fp8" if rank == 2 else "int8"
        return str(raised(CollectiveMismatch, partial(comm.all_reduce, x, wire=wire)))


def test_ranks_with_different_formats_are_told_so(fresh_pool: RankPool) -> None:
    for text in fresh_pool.run(differ, 3, connected=False):
        assert "sum, wire int8" in text
        assert "sum, wire fp8" in text
