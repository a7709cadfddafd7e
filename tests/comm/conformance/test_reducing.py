"""Reductions: every dtype and op, sizes around every threshold, edge cases of numbers."""

from __future__ import annotations

import re

import torch

from expected import (
    COMPLEXES,
    FLOATS,
    INTEGERS,
    OPS,
    REDUCIBLE,
    assert_reduced,
    assert_same,
    copy_of,
    gloo_has,
    inputs,
    meaningful,
    movable_dtypes,
    promised,
    reduced,
    values,
)
from implementations import (
    EVERY,
    OURS,
    QUICK_DTYPES,
    QUICK_HEAVY,
    assert_usable,
    on_implementations,
    refused_by,
)
from ranks import attempt, raised
from unisono import PremulSum
from unisono.comm.communicator import Communicator

COUNTS = (0, 1, 2, 7, 1001)
# an even share of one, several slots, what bypasses the cache.
BYTE_SIZES = tuple(
    size + more
    for size in (64, 1504, 4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)
    for more in (-8, 0, 8)
)
LARGE_COUNT = (8 << 20) // 4 + 1001


@on_implementations(EVERY, quick=QUICK_DTYPES)
def test_all_reduce_does_every_dtype_and_op_that_has_a_meaning(comm: Communicator) -> None:
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(-3), PremulSum(0.3)):
            if not promised(comm, dtype, op):
                continue
            for count in COUNTS if comm.backend == "unisono" or comm.size < 3 else (0, 37):
                given = inputs(comm.size, dtype, count)
                tensor = given[comm.rank].clone()
                comm.all_reduce(tensor, op)
                assert_reduced(comm, tensor, reduced(given, op), (dtype, op, count))


def test_reduce_and_reduce_scatter_know_the_same_ops(comm: Communicator) -> None:
    count, root = 37, comm.size - 1
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(2), PremulSum(-0.7)):
            if not promised(comm, dtype, op):
                continue
            given = inputs(comm.size, dtype, count * comm.size)
            result = reduced(given, op)
            tensor = given[comm.rank].clone()
            comm.reduce(tensor, root, op)
            expected = result if comm.rank == root else given[comm.rank]
            assert_reduced(comm, tensor, expected, (dtype, op, "reduce"))
            output = torch.zeros(count, dtype=dtype)
            comm.reduce_scatter(output, source := given[comm.rank].clone(), op)
            mine = result[comm.rank * count : (comm.rank + 1) * count]
            assert_reduced(comm, output, mine, (dtype, op, "reduce_scatter"))
            assert_same(source, given[comm.rank], (dtype, op, "the input"))


def test_reductions_without_a_meaning_are_refused_and_the_group_goes_on(comm: Communicator) -> None:
    whole = [dtype for dtype in movable_dtypes() if not re.search(r"int[1-7]$", str(dtype))]
    for dtype in whole:
        for op in (*OPS, PremulSum(2), PremulSum(0.5)):
            lacks = comm.backend == "gloo" and not gloo_has(dtype, op)
            if meaningful(dtype, op) and not lacks:
                continue
            tensor = values(dtype, 3, 1, comm.rank)
            before = copy_of(tensor)
            name = str(dtype).removeprefix("torch.")
            for refused in (
                attempt(comm.all_reduce, tensor, op),
                attempt(comm.reduce, tensor, 0, op),
                attempt(comm.reduce_scatter, tensor, tensor.repeat(comm.size), op)
                if dtype in REDUCIBLE
                else attempt(comm.all_reduce, [tensor], op),
            ):
                assert isinstance(refused, (TypeError, ValueError)), (dtype, op, refused)
                if dtype in REDUCIBLE and not isinstance(op, PremulSum):
                    assert name in str(refused)
                if lacks and meaningful(dtype, op):
                    named = re.search(f"gloo (cannot|does not).*{name}.*use", str(refused))
                    assert type(refused) is TypeError, refused
                    assert named, refused
            assert_same(tensor, before, (dtype, op))
    for nonsense in ("total", "", None, 3):
        refused = raised((TypeError, ValueError), comm.all_reduce, torch.ones(3), nonsense)
        assert "all_reduce" in str(refused)
    comm.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [comm.size] * 3


@on_implementations(EVERY, quick=QUICK_HEAVY)
def test_sizes_around_every_threshold(comm: Communicator) -> None:
    cases = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.complex128, "product"))
    for size_bytes in BYTE_SIZES:
        for dtype, op in (case for case in cases if promised(comm, *case)):
            count = size_bytes // dtype.itemsize
            given = inputs(comm.size, dtype, count)
            result = reduced(given, op)
            tensor = given[comm.rank].clone()
            comm.all_reduce(tensor, op)
            assert_reduced(comm, tensor, result, (dtype, op, count))
        given = inputs(comm.size, torch.float32, size_bytes // 4)
        root = size_bytes % comm.size
        tensor = given[comm.rank].clone()
        comm.reduce(tensor, root, "max")
        expected = reduced(given, "max") if comm.rank == root else given[comm.rank]
        assert_reduced(comm, tensor, expected, size_bytes)
        comm.broadcast(tensor, root)
        assert_reduced(comm, tensor, reduced(given, "max"), size_bytes)
        output = torch.zeros(size_bytes // 4 * comm.size)
        comm.all_gather(output, given[comm.rank])
        assert_same(output, torch.cat(given), size_bytes)


@on_implementations(EVERY, quick=QUICK_HEAVY)
def test_parts_of_sizes_around_every_threshold(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for size_bytes in BYTE_SIZES[::2]:
        for part in sorted({size_bytes // 4, size_bytes // 4 // size}):
            given = inputs(size, torch.float32, part * size)
            mine = slice(rank * part, (rank + 1) * part)
            output = torch.zeros(part)
            comm.reduce_scatter(output, given[rank])
            assert_reduced(comm, output, reduced(given, "sum")[mine], ("reduce_scatter", part))
            wide = torch.zeros(part * size)
            comm.all_to_all(wide, given[rank])
            assert_same(wide, torch.cat([row[mine] for row in given]), ("all_to_all", part))
            root = part % size
            comm.scatter(output, given[rank] if rank == root else None, root)
            assert_same(output, given[root][mine], ("scatter", part))
            wide = torch.zeros(part * size)
            comm.gather(wide if rank == root else None, given[rank][mine], root)
            own = [row[r * part : (r + 1) * part] for r, row in enumerate(given)]
            expected = torch.cat(own) if rank == root else torch.zeros(part * size)
            assert_same(wide, expected, ("gather", part))


@on_implementations(EVERY, quick=QUICK_HEAVY)
def test_large_tensors(comm: Communicator) -> None:
    rank, size, count = comm.rank, comm.size, LARGE_COUNT
    given = inputs(size, torch.float32, count)
    tensor = given[rank].clone()
    comm.all_reduce(tensor)
    assert_reduced(comm, tensor, reduced(given, "sum"))
    comm.broadcast(tensor := given[rank].clone(), size - 1)
    assert_same(tensor, given[size - 1])
    part = count // size
    mine = slice(rank * part, (rank + 1) * part)
    output = torch.zeros(part)
    comm.reduce_scatter(output, given[rank][: part * size])
    assert_reduced(comm, output, reduced([row[mine] for row in given], "sum"))
    wide = torch.zeros(part * size)
    comm.all_to_all(wide, given[rank][: part * size])
    assert_same(wide, torch.cat([row[mine] for row in given]))
    comm.all_gather(wide, given[rank][mine])
    everyone = [row[r * part : (r + 1) * part] for r, row in enumerate(given)]
    assert_same(wide, torch.cat(everyone))
    if promised(comm, torch.float16, "avg"):
        halves = inputs(size, torch.float16, count)
        tensor = halves[rank].clone()
        comm.all_reduce(tensor, "avg")
        assert_reduced(comm, tensor, reduced(halves, "avg"))


def test_integers_wrap_around(comm: Communicator) -> None:
    for dtype in INTEGERS:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        span = most - least + 1
        total, product = most * comm.size, most**comm.size
        for op, exact in (("sum", total), ("product", product), (PremulSum(-2), -2 * total)):
            if not promised(comm, dtype, op):
                continue
            comm.all_reduce(tensor := torch.full((5,), most, dtype=dtype), op)
            assert tensor.tolist() == [(exact - least) % span + least] * 5, (dtype, op)


@on_implementations(OURS)
def test_one_nan_makes_min_and_max_nan(comm: Communicator) -> None:
    for dtype in FLOATS:
        for op in ("min", "max"):
            for count in (comm.size, 500, 20_000):
                given = [row.clone() for row in inputs(comm.size, dtype, count)]
                for rank in range(comm.size):
                    given[rank][rank :: comm.size + 3] = float("nan")
                infinite = [torch.full((1,), (-1.0) ** r * float("inf")) for r in range(comm.size)]
                given = [torch.cat([g, i.to(dtype)]) for g, i in zip(given, infinite, strict=True)]
                tensor = given[comm.rank].clone()
                comm.all_reduce(tensor, op)
                stacked = torch.stack([row.double() for row in given])
                plain = stacked.amin(0) if op == "min" else stacked.amax(0)
                assert_same(tensor, plain.to(dtype), (dtype, op, count))


@on_implementations(OURS)
def test_halves_overflow_to_infinity_and_keep_subnormals(comm: Communicator) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        given = [
            torch.roll(every.view(torch.int16), 257 * rank).view(dtype) for rank in range(comm.size)
        ]
        for op in ("sum", "avg", "product", "min", "max"):
            tensor = given[comm.rank].clone()
            comm.all_reduce(tensor, op)
            assert_reduced(comm, tensor, reduced(given, op), (dtype, op))


def test_complex_types_have_no_order(comm: Communicator) -> None:
    for dtype in COMPLEXES:
        error = refused_by(comm.all_reduce, torch.ones(2, dtype=dtype), "max")
        assert "max" in str(error)
        assert str(dtype).removeprefix("torch.") in str(error)
    assert_usable(comm)
