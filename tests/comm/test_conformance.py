"""What every make of the Communicator promises, at every size of group.

One set of tests; the fixture `comm` has each run on solo and on native groups, and, slowly, on the
torch make over gloo, with two ranks: there is one order for these (test_implementations.py has
more). A test
runs on every rank and compares, bit for bit, with what it computes from all ranks' inputs.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from expected import (
    COMPLEXES,
    FLOATS,
    INTEGERS,
    OPS,
    REDUCIBLE,
    assert_same,
    copy_of,
    inputs,
    meaningful,
    raw,
    reduced,
    values,
)
from ranks import attempt, connect
from unisono import PremulSum
from unisono.comm.base import Communicator
from unisono.testing import membership
from unisono.world.world import resolve

MAKES = [("solo", 1), *(("native", ranks) for ranks in (1, 2, 3, 4, 8)), ("torch", 2)]
COUNTS = (0, 1, 2, 7, 1001)
# Around everything that the engine may treat differently: what fits a post, the cuts, a slot and
# an even share of one, several slots, what bypasses the cache.
BYTE_SIZES = tuple(
    size + more
    for size in (64, 1504, 4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)
    for more in (-8, 0, 8)
)
LARGE_COUNT = (8 << 20) // 4 + 1001


@pytest.fixture(
    params=[
        pytest.param(
            make,
            id=f"{make}-{ranks}",
            marks=[
                pytest.mark.ranks(ranks, backend="gloo" if make == "torch" else "unisono"),
                *([pytest.mark.slow] if make == "torch" else []),
            ],
        )
        for make, ranks in MAKES
    ]
)
def comm(request: pytest.FixtureRequest, shared_tmp_path: Path) -> Iterator[Communicator]:
    """The plugin's Communicator, a native one of one rank, and one over the plugin's gloo group."""
    if request.param == "torch":
        with resolve(request.getfixturevalue("process_group")) as made:
            yield made
    elif request.param == "native" and request.getfixturevalue("world_of_ours").size == 1:
        with connect(str(shared_tmp_path / "alone"), 0, 1) as native:
            yield native
    else:
        yield request.getfixturevalue("world_of_ours")


@pytest.fixture
def world_of_ours(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with membership.world(request.config.stash[membership.MEMBERSHIP]) as made:
        yield made


def movable_dtypes() -> list[torch.dtype]:
    """Every type of torch's that can be had as a plain tensor of whole bytes."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    named = {str(dtype).removeprefix("torch."): dtype for dtype in found}
    return [
        dtype
        for name, dtype in sorted(named.items())
        if not name.startswith(("bits", "qint", "quint"))
    ]


def parts_of(tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """One contiguous piece of its own for each count."""
    assert tensor.numel() == sum(counts)
    return [piece.clone() for piece in torch.split(tensor, counts)]


def uneven(size: int, scale: int = 1) -> list[int]:
    """A count for each rank, all different where possible, one of them zero."""
    return [(3 * rank % (size + 1)) * scale for rank in range(size)]


# -- reductions --------------------------------------------------------------------------------


def test_all_reduce_does_every_dtype_and_op_that_has_a_meaning(comm: Communicator) -> None:
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(-3), PremulSum(0.3)):
            if not meaningful(dtype, op):
                continue
            for count in COUNTS:
                given = inputs(comm.size, dtype, count)
                tensor = given[comm.rank].clone()
                comm.all_reduce(tensor, op)
                assert_same(tensor, reduced(given, op), (dtype, op, count))


def test_reduce_and_reduce_scatter_know_the_same_ops(comm: Communicator) -> None:
    count, root = 37, comm.size - 1
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(2), PremulSum(-0.7)):
            if not meaningful(dtype, op):
                continue
            given = inputs(comm.size, dtype, count * comm.size)
            result = reduced(given, op)
            tensor = given[comm.rank].clone()
            comm.reduce(tensor, root, op)
            expected = result if comm.rank == root else given[comm.rank]
            assert_same(tensor, expected, (dtype, op, "reduce"))
            output = torch.zeros(count, dtype=dtype)
            comm.reduce_scatter(output, given[comm.rank], op)
            mine = result[comm.rank * count : (comm.rank + 1) * count]
            assert_same(output, mine, (dtype, op, "reduce_scatter"))


def test_reductions_without_a_meaning_are_refused_and_the_group_goes_on(comm: Communicator) -> None:
    whole = [dtype for dtype in movable_dtypes() if not re.search(r"int[1-7]$", str(dtype))]
    for dtype in whole:
        for op in (*OPS, PremulSum(2), PremulSum(0.5)):
            if meaningful(dtype, op):
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
            assert_same(tensor, before, (dtype, op))
    for nonsense in ("total", "", None, 3):
        refused = attempt(comm.all_reduce, torch.ones(3), nonsense)
        assert isinstance(refused, (TypeError, ValueError)), nonsense
        assert "all_reduce" in str(refused)
    comm.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [comm.size] * 3


def test_sizes_around_every_threshold(comm: Communicator) -> None:
    cases = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.complex128, "product"))
    for size_bytes in BYTE_SIZES:
        for dtype, op in cases:
            count = size_bytes // dtype.itemsize
            given = inputs(comm.size, dtype, count)
            result = reduced(given, op)
            tensor = given[comm.rank].clone()
            comm.all_reduce(tensor, op)
            assert_same(tensor, result, (dtype, op, count))
        given = inputs(comm.size, torch.float32, size_bytes // 4)
        root = size_bytes % comm.size
        tensor = given[comm.rank].clone()
        comm.reduce(tensor, root, "max")
        expected = reduced(given, "max") if comm.rank == root else given[comm.rank]
        assert_same(tensor, expected, size_bytes)
        comm.broadcast(tensor, root)
        assert_same(tensor, reduced(given, "max"), size_bytes)
        output = torch.zeros(size_bytes // 4 * comm.size)
        comm.all_gather(output, given[comm.rank])
        assert_same(output, torch.cat(given), size_bytes)


def test_parts_of_sizes_around_every_threshold(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for size_bytes in BYTE_SIZES[::2]:
        for part in sorted({size_bytes // 4, size_bytes // 4 // size}):
            given = inputs(size, torch.float32, part * size)
            mine = slice(rank * part, (rank + 1) * part)
            output = torch.zeros(part)
            comm.reduce_scatter(output, given[rank])
            assert_same(output, reduced(given, "sum")[mine], ("reduce_scatter", part))
            wide = torch.zeros(part * size)
            comm.all_to_all(wide, given[rank])
            assert_same(wide, torch.cat([one[mine] for one in given]), ("all_to_all", part))
            root = part % size
            comm.scatter(output, given[rank] if rank == root else None, root)
            assert_same(output, given[root][mine], ("scatter", part))
            wide = torch.zeros(part * size)
            comm.gather(wide if rank == root else None, given[rank][mine], root)
            own = [one[r * part : (r + 1) * part] for r, one in enumerate(given)]
            expected = torch.cat(own) if rank == root else torch.zeros(part * size)
            assert_same(wide, expected, ("gather", part))


def test_large_tensors(comm: Communicator) -> None:
    rank, size, count = comm.rank, comm.size, LARGE_COUNT
    given = inputs(size, torch.float32, count)
    tensor = given[rank].clone()
    comm.all_reduce(tensor)
    assert_same(tensor, reduced(given, "sum"))
    comm.broadcast(tensor := given[rank].clone(), size - 1)
    assert_same(tensor, given[size - 1])
    part = count // size
    mine = slice(rank * part, (rank + 1) * part)
    output = torch.zeros(part)
    comm.reduce_scatter(output, given[rank][: part * size])
    assert_same(output, reduced([one[mine] for one in given], "sum"))
    wide = torch.zeros(part * size)
    comm.all_to_all(wide, given[rank][: part * size])
    assert_same(wide, torch.cat([one[mine] for one in given]))
    comm.all_gather(wide, given[rank][mine])
    everyone = [one[r * part : (r + 1) * part] for r, one in enumerate(given)]
    assert_same(wide, torch.cat(everyone))
    halves = inputs(size, torch.float16, count)
    tensor = halves[rank].clone()
    comm.all_reduce(tensor, "avg")
    assert_same(tensor, reduced(halves, "avg"))


def test_integers_wrap_around(comm: Communicator) -> None:
    for dtype in INTEGERS:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        span = most - least + 1
        total, product = most * comm.size, most**comm.size
        for op, exact in (("sum", total), ("product", product), (PremulSum(-2), -2 * total)):
            comm.all_reduce(tensor := torch.full((5,), most, dtype=dtype), op)
            assert tensor.tolist() == [(exact - least) % span + least] * 5, (dtype, op)


def test_one_nan_makes_min_and_max_nan(comm: Communicator) -> None:
    for dtype in FLOATS:
        for op in ("min", "max"):
            for count in (comm.size, 500, 20_000):
                given = [one.clone() for one in inputs(comm.size, dtype, count)]
                for rank in range(comm.size):
                    given[rank][rank :: comm.size + 3] = float("nan")
                infinite = [torch.full((1,), (-1.0) ** r * float("inf")) for r in range(comm.size)]
                given = [torch.cat([g, i.to(dtype)]) for g, i in zip(given, infinite, strict=True)]
                tensor = given[comm.rank].clone()
                comm.all_reduce(tensor, op)
                stacked = torch.stack([one.double() for one in given])
                plain = stacked.amin(0) if op == "min" else stacked.amax(0)
                assert_same(tensor, plain.to(dtype), (dtype, op, count))


def test_halves_overflow_to_infinity_and_keep_subnormals(comm: Communicator) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        given = [
            torch.roll(every.view(torch.int16), 257 * rank).view(dtype) for rank in range(comm.size)
        ]
        for op in ("sum", "avg", "product", "min", "max"):
            tensor = given[comm.rank].clone()
            comm.all_reduce(tensor, op)
            assert_same(tensor, reduced(given, op), (dtype, op))


# -- moving ------------------------------------------------------------------------------------


def test_every_dtype_of_torch_is_moved(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    warnings.simplefilter("ignore")  # some types are experimental to torch
    for dtype in movable_dtypes():
        for count in (0, 1, 7, 700):
            root = count % size
            given = inputs(size, dtype, count * size)
            mine = slice(rank * count, (rank + 1) * count)
            comm.broadcast(tensor := copy_of(given[rank]), root)
            assert_same(tensor, given[root], (dtype, count, "broadcast"))
            wide = torch.zeros(count * size * dtype.itemsize, dtype=torch.uint8).view(dtype)
            comm.all_to_all(wide, given[rank])
            expected = numpy.concatenate([raw(one[mine]) for one in given])
            assert numpy.array_equal(raw(wide), expected), (dtype, count, "all_to_all")
            comm.all_gather(wide, given[rank][mine])
            everyone = [raw(one[r * count : (r + 1) * count]) for r, one in enumerate(given)]
            assert numpy.array_equal(raw(wide), numpy.concatenate(everyone)), (dtype, "gather")
            output = torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
            comm.scatter(output, given[rank] if rank == root else None, root)
            assert_same(output, given[root][mine], (dtype, count, "scatter"))


def test_broadcast_and_reduce_from_and_to_every_root(comm: Communicator) -> None:
    for count in COUNTS:
        given = inputs(comm.size, torch.int16, count)
        for root in range(comm.size):
            comm.broadcast(tensor := given[comm.rank].clone(), root)
            assert_same(tensor, given[root])
            comm.reduce(tensor := given[comm.rank].clone(), root)
            left = reduced(given, "sum") if comm.rank == root else given[comm.rank]
            assert_same(tensor, left)
            comm.reduce(tensor := given[comm.rank].clone(), root=root, op="max")
            left = reduced(given, "max") if comm.rank == root else given[comm.rank]
            assert_same(tensor, left)


def test_all_gather_into_a_tensor_a_list_or_uneven_parts(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for count in COUNTS:
        given = inputs(size, torch.float64, count)
        wide = torch.zeros(size, count, dtype=torch.float64)
        comm.all_gather(wide, given[rank])
        assert_same(wide, torch.stack(given))
        parts = [torch.zeros(count, dtype=torch.float64) for _ in range(size)]
        comm.all_gather(parts, given[rank])
        for part, expected in zip(parts, given, strict=True):
            assert_same(part, expected)
    for scale in (1, 11, 3001, 40_001):
        counts = uneven(size, scale)
        given = [values(torch.float32, count, scale, r) for r, count in enumerate(counts)]
        parts = [torch.zeros(count) for count in counts]
        comm.all_gather(parts, given[rank])
        for part, expected in zip(parts, given, strict=True):
            assert_same(part, expected, scale)


def test_reduce_scatter_from_a_tensor_a_list_or_uneven_parts(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for counts in ([count] * size for count in COUNTS):
        check_reduce_scatter(comm, counts)
        given = inputs(size, torch.float32, sum(counts))
        output = torch.zeros(counts[rank])
        comm.reduce_scatter(output, given[rank].reshape(size, -1), "sum")
        start = rank * counts[0]
        assert_same(output, reduced(given, "sum")[start : start + counts[0]])
    for scale in (1, 11, 3001, 40_001):
        check_reduce_scatter(comm, uneven(size, scale))


def check_reduce_scatter(comm: Communicator, counts: list[int]) -> None:
    given = inputs(comm.size, torch.float32, sum(counts))
    output = torch.zeros(counts[comm.rank])
    comm.reduce_scatter(output, parts_of(given[comm.rank], counts), "avg")
    assert_same(output, parts_of(reduced(given, "avg"), counts)[comm.rank], counts)


def test_gather_and_scatter_with_every_root(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for root in range(size):
        scale = 40_001 if root == size - 1 else 1001
        for counts in (*([count] * size for count in COUNTS), uneven(size), uneven(size, scale)):
            given = inputs(size, torch.float32, sum(counts))
            own = [parts_of(one, counts)[r] for r, one in enumerate(given)]
            at_root = rank == root
            parts = [torch.zeros(count) for count in counts] if at_root else None
            comm.gather(parts, own[rank], root)
            for part, expected in zip(parts or [], own, strict=at_root):
                assert_same(part, expected, (root, counts))
            output = torch.zeros(counts[rank])
            comm.scatter(output, parts_of(given[root], counts) if at_root else None, root)
            assert_same(output, parts_of(given[root], counts)[rank], (root, counts))
            if len(set(counts)) == 1:
                wide = torch.zeros(sum(counts)) if at_root else None
                comm.gather(wide, own[rank], root)
                if wide is not None:
                    assert_same(wide, torch.cat(own), (root, counts))
                comm.scatter(output, given[root] if at_root else None, root)
                assert_same(output, parts_of(given[root], counts)[rank])


def test_all_to_all_with_even_uneven_and_empty_parts(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for scale in (0, 1, 5, 60, 2001, 30_001):
        counts = [[(2 * i + 3 * j) % 4 * scale for j in range(size)] for i in range(size)]
        given = [
            parts_of(values(torch.int32, sum(row), scale, r), row) for r, row in enumerate(counts)
        ]
        taken = [torch.zeros(counts[r][rank], dtype=torch.int32) for r in range(size)]
        comm.all_to_all(taken, given[rank])
        for r in range(size):
            assert_same(taken[r], given[r][rank], (scale, r))
    for count in COUNTS:
        given = inputs(size, torch.int32, count * size)
        wide = torch.zeros(count * size, dtype=torch.int32)
        comm.all_to_all(wide, given[rank])
        mine = slice(rank * count, (rank + 1) * count)
        assert_same(wide, torch.cat([one[mine] for one in given]))
        wide.zero_()
        comm.all_to_all(list(wide.reshape(size, count)), parts_of(given[rank], [count] * size))
        assert_same(wide, torch.cat([one[mine] for one in given]))


def test_nobody_leaves_a_barrier_before_all_have_come(comm: Communicator) -> None:
    for _ in range(5):
        moments = torch.zeros(20, 2, dtype=torch.float64)
        for nth in range(20):
            moments[nth, 0] = time.monotonic()
            comm.barrier()
            moments[nth, 1] = time.monotonic()
        everyones = torch.zeros(comm.size, 20, 2, dtype=torch.float64)
        comm.all_gather(everyones, moments)
        entered, left = everyones.unbind(2)
        assert (entered.amax(0) <= left.amin(0)).all()


# -- how tensors lie in memory -----------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "contiguous": ((6, 7), lambda base: base),
    "zero-dimensional": ((3,), lambda base: base[1, ...]),
    "every second": ((50,), lambda base: base[::2]),
    "a column": ((9, 5), lambda base: base[:, 2]),
    "transposed": ((12, 7), lambda base: base.T),
    "a window": ((8, 9), lambda base: base[2:6, 3:8]),
    "a window's transpose": ((8, 9), lambda base: base[1:6, 3:8].T),
    "three strides": ((5, 8, 6), lambda base: base[::2, 1:7:3, ::2]),
    "a large window": ((300, 900), lambda base: base[5:295, 11:890]),
    "a large transpose": ((700, 300), lambda base: base[::2].T),
    "nothing of something": ((4, 6), lambda base: base[:, 3:3]),
}
ARRAY_LAYOUTS = {
    **LAYOUTS,
    "backwards": ((40,), lambda base: base[::-1]),
    "backwards by three": ((40, 10), lambda base: base[::-3, ::-1]),
}


def laid_out(layout: str, dtype: torch.dtype, content: torch.Tensor | None, array: bool) -> Any:
    """A base and a view of it in this layout, which holds `content`."""
    shape, view_of = ARRAY_LAYOUTS[layout]
    base: Any = values(dtype, int(numpy.prod(shape)), 99, 0).reshape(shape)
    if array:
        base = base.numpy().copy()
    view = view_of(base)
    if content is not None:
        filled = content.reshape(tuple(view.shape))
        view[...] = filled.numpy() if array else filled
    return base, view


def elements_of(layout: str) -> int:
    shape, view_of = ARRAY_LAYOUTS[layout]
    return int(view_of(numpy.zeros(shape, numpy.uint8)).size)


@pytest.mark.parametrize("array", [False, True], ids=["torch", "numpy"])
def test_any_layout_receives_its_result_and_its_neighbours_stay(
    comm: Communicator, array: bool
) -> None:
    rank, size = comm.rank, comm.size

    def check(base: Any, content: torch.Tensor, what: object) -> None:
        expected, _ = laid_out(layout, dtype, content, array)
        assert_same(base, expected, (layout, dtype, what))

    for layout in ARRAY_LAYOUTS if array else LAYOUTS:
        count = elements_of(layout)
        few = (torch.float32,) if count > 10_000 else (torch.float32, torch.int8, torch.complex128)
        for dtype in few:
            given = inputs(size, dtype, count)
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.all_reduce(view)
            check(base, reduced(given, "sum"), "all_reduce")
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.reduce(view, size - 1)
            check(base, reduced(given, "sum") if rank == size - 1 else given[rank], "reduce")
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.broadcast(view, size // 2)
            check(base, given[size // 2], "broadcast")

            wide = inputs(size, dtype, count * size)
            mine = slice(rank * count, (rank + 1) * count)
            base, view = laid_out(layout, dtype, None, array)
            comm.reduce_scatter(view, wide[rank])
            check(base, reduced(wide, "sum")[mine], "reduce_scatter")
            base, view = laid_out(layout, dtype, None, array)
            comm.scatter(view, wide[rank] if rank == 0 else None, 0)
            check(base, wide[0][mine], "scatter")

            _, view = laid_out(layout, dtype, given[rank], array)
            outputs = [laid_out(layout, dtype, None, array) for _ in range(size)]
            comm.all_gather([output for _, output in outputs], view)
            for r, (base, _) in enumerate(outputs):
                check(base, given[r], ("all_gather", r))
            outputs = [laid_out(layout, dtype, None, array) for _ in range(size)]
            comm.gather([output for _, output in outputs] if rank == 0 else None, view, 0)
            for r, (base, _) in enumerate(outputs if rank == 0 else []):
                check(base, given[r], ("gather", r))
            sent = [one.reshape(size, count)[rank] for one in wide]
            pieces = [
                laid_out(layout, dtype, piece, array)[1]
                for piece in wide[rank].reshape(size, count)
            ]
            outputs = [laid_out(layout, dtype, None, array) for _ in range(size)]
            comm.all_to_all([output for _, output in outputs], pieces)
            for r, (base, _) in enumerate(outputs):
                check(base, sent[r], ("all_to_all", r))


def test_a_wide_side_may_be_strided_and_is_cut_along_its_elements(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for rows in (3, 700):
        count = rows * 5
        given = inputs(size, torch.float32, count)
        base = torch.zeros(5, rows * size)
        comm.all_gather(base.T, given[rank])
        assert_same(base.T.flatten(), torch.cat(given))
        base = torch.full((2 * size * count,), -1.0)
        comm.all_gather(base[::2], given[rank])
        assert_same(base[::2].contiguous(), torch.cat(given))
        assert base[1::2].eq(-1).all()
        wide = inputs(size, torch.float32, count * size)
        strided = wide[rank].reshape(rows * size, 5).T.contiguous().T
        assert not strided.is_contiguous()
        output = torch.zeros(count)
        comm.reduce_scatter(output, strided)
        assert_same(output, reduced(wide, "sum")[rank * count : (rank + 1) * count])
        base = torch.zeros(5, rows * size)
        comm.all_to_all(base.T, strided)
        sent = [one[rank * count : (rank + 1) * count] for one in wide]
        assert_same(base.T.flatten(), torch.cat(sent))


def test_arrays_that_are_not_aligned(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.int16):
        for count in (5, 4001, 100_001):
            given = inputs(comm.size, dtype, count)
            memory = bytearray(count * dtype.itemsize + 1)
            kind = given[0].numpy().dtype
            tensor = numpy.frombuffer(memory, kind, count, offset=1)
            assert not tensor.flags.aligned
            tensor[:] = given[comm.rank].numpy()
            comm.all_reduce(tensor)
            assert_same(tensor.copy(), reduced(given, "sum"), (dtype, count))


def test_a_group_mixes_arrays_and_tensors(comm: Communicator) -> None:
    for dtype in (torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint32):
        given = inputs(comm.size, dtype, 1001)
        tensor: Any = given[comm.rank].clone()
        if comm.rank % 2:
            tensor = tensor.numpy()
        comm.all_reduce(tensor)
        assert_same(tensor, reduced(given, "sum"), dtype)
        output = numpy.zeros(1001 * comm.size, given[0].numpy().dtype)
        comm.all_gather(output, given[comm.rank])
        assert_same(output, torch.cat(given), dtype)


def test_shapes_may_differ_where_counts_agree(comm: Communicator) -> None:
    given = inputs(comm.size, torch.int32, 24)
    shapes = ((24,), (2, 12), (4, 3, 2))
    tensor = given[comm.rank].reshape(shapes[comm.rank % 3]).clone()
    comm.all_reduce(tensor)
    assert_same(tensor.flatten(), reduced(given, "sum"))
    output = torch.zeros(24 * comm.size, dtype=torch.int32)
    comm.all_gather(output, tensor)
    assert_same(output, reduced(given, "sum").repeat(comm.size))


# -- several tensors in one call, and results that lie where the inputs were --------------------


def test_coalesced_tensors_of_mixed_dtypes_travel_together(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    kinds = [
        (torch.float32, 5),
        (torch.int64, 0),
        (torch.float32, 0),
        (torch.bfloat16, 1001),
        (torch.float32, 70_001),
        (torch.int64, 33),
        (torch.float32, 1),
        (torch.bfloat16, 2),
    ]
    given = [inputs(size, dtype, count, seed) for seed, (dtype, count) in enumerate(kinds)]
    tensors = [one[rank].clone() for one in given]
    tensors[4] = torch.zeros(70_001, 2)[:, 1].copy_(tensors[4])
    comm.all_reduce(tensors)
    for tensor, one in zip(tensors, given, strict=True):
        assert_same(tensor, reduced(one, "sum"))

    tensors = [one[rank].clone() for one in given]
    comm.reduce(tuple(tensors), size - 1, "max")
    for tensor, one in zip(tensors, given, strict=True):
        assert_same(tensor, reduced(one, "max") if rank == size - 1 else one[rank])
    tensors = [one[rank].clone() for one in given]
    comm.broadcast(tensors, size // 2)
    for tensor, one in zip(tensors, given, strict=True):
        assert_same(tensor, one[size // 2])

    wides = [torch.zeros(count * size, dtype=dtype) for dtype, count in kinds]
    comm.all_gather(wides, [one[rank] for one in given])
    for wide, one in zip(wides, given, strict=True):
        assert_same(wide, torch.cat(one))

    given = [inputs(size, dtype, count * size, 9) for dtype, count in kinds]
    outputs = [torch.zeros(count, dtype=dtype) for dtype, count in kinds]
    comm.reduce_scatter(outputs, [one[rank] for one in given], "sum")
    for (_, count), output, one in zip(kinds, outputs, given, strict=True):
        assert_same(output, reduced(one, "sum")[rank * count : (rank + 1) * count])


def test_an_empty_list_is_a_call_about_nothing(comm: Communicator) -> None:
    comm.all_reduce([])
    comm.broadcast([])
    comm.all_gather([], [])
    comm.reduce_scatter([], [])
    comm.barrier()


def test_many_coalesced_tensors(comm: Communicator) -> None:
    counts = [(7 * index) % 401 for index in range(500)]
    given = inputs(comm.size, torch.float32, sum(counts))
    tensors = parts_of(given[comm.rank], counts)
    comm.all_reduce(tensors, "avg")
    assert_same(torch.cat(tensors), reduced(given, "avg"))


def test_results_may_lie_where_the_inputs_were(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for count in (0, 1, 5, 1001, 30_001, 300_001 // size):
        mine = slice(rank * count, (rank + 1) * count)
        given = inputs(size, torch.float32, count * size)
        wide = given[rank].clone()
        comm.all_gather(wide, wide[mine])
        own = torch.cat([one[r * count : (r + 1) * count] for r, one in enumerate(given)])
        assert_same(wide, own, ("all_gather", count))
        wide = given[rank].clone()
        parts = [wide[r * count : (r + 1) * count] for r in range(size)]
        comm.all_gather(parts, parts[rank])
        assert_same(wide, own, ("all_gather of a list", count))
        for output, source in ((wide, wide), (wide, wide.view(-1))):
            wide.copy_(given[rank])
            comm.all_to_all(output, source)
            sent = torch.cat([one[mine] for one in given])
            assert_same(wide, sent, ("all_to_all", count))
        wide.copy_(given[rank])
        comm.all_to_all(parts, parts)
        assert_same(wide, sent, ("all_to_all of lists", count))
        wide = given[rank].clone()
        comm.reduce_scatter(wide[mine], wide)
        assert_same(wide[mine], reduced(given, "sum")[mine], ("reduce_scatter", count))
        others = torch.cat([wide[: rank * count], wide[(rank + 1) * count :]])
        left = torch.cat([given[rank][: rank * count], given[rank][(rank + 1) * count :]])
        assert_same(others, left, ("reduce_scatter", count))
        wide = given[rank].clone()
        comm.gather(wide if rank == 0 else None, wide[mine], 0)
        assert_same(wide, own if rank == 0 else given[rank], ("gather", count))
        wide = given[rank].clone()
        comm.scatter(wide[mine], wide if rank == 0 else None, 0)
        assert_same(wide[mine], given[0][mine], ("scatter", count))


# -- what is refused ---------------------------------------------------------------------------


def refused_by(call: Callable[..., Any], *args: Any) -> BaseException:
    error = attempt(call, *args)
    assert isinstance(error, (TypeError, ValueError)), f"{call.__name__}: {error!r}"
    assert len(str(error).splitlines()[0]) > 10
    return error


def assert_usable(comm: Communicator) -> None:
    comm.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [comm.size] * 2


def test_a_tensor_that_cannot_receive_is_refused(comm: Communicator) -> None:
    fixed = numpy.ones(4)
    fixed.flags.writeable = False
    assert "read-only" in str(refused_by(comm.all_reduce, fixed))
    refused_by(comm.all_gather, numpy.broadcast_to(numpy.ones(1), 4 * comm.size), fixed)
    assert "expanded" in str(refused_by(comm.all_reduce, torch.ones(1).expand(4)))
    refused_by(comm.broadcast, torch.ones(3, 1).expand(3, 4))
    refused_by(comm.reduce_scatter, torch.ones(1).expand(2), torch.ones(2 * comm.size))
    assert fixed.tolist() == [1.0] * 4
    assert_usable(comm)


def test_a_read_only_or_expanded_input_is_as_good_as_any(comm: Communicator) -> None:
    fixed = numpy.full(3, comm.rank)
    fixed.flags.writeable = False
    output = numpy.zeros(3 * comm.size, fixed.dtype)
    comm.all_gather(output, fixed)
    assert output.tolist() == [rank for rank in range(comm.size) for _ in range(3)]
    summed = torch.zeros(2)
    comm.reduce_scatter(summed, torch.full((1,), comm.rank + 1.0).expand(2 * comm.size))
    assert summed.tolist() == [sum(range(1, comm.size + 1))] * 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_that_is_not_plain_memory_is_refused(comm: Communicator) -> None:
    strange = {
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "sparse row": torch.eye(3).to_sparse_csr(),
        "big-endian": numpy.ones(3, numpy.dtype(">f4")),
        "objects": numpy.array([object()]),
        "records": numpy.zeros(2, numpy.dtype([("a", "f4"), ("b", "i4")])),
        "words": numpy.array(["word"]),
        "dates": numpy.array(["2020-01-01"], dtype="M8[s]"),
        "a number": 3.0,
        "a list of numbers": [1.0, 2.0],
        "text": "tensor",
    }
    for name, tensor in strange.items():
        for call in (comm.all_reduce, comm.broadcast):
            error = attempt(call, tensor)
            assert isinstance(error, (TypeError, ValueError)), (name, call.__name__, error)
            assert "Exception raised from" not in str(error), "a C++ stack is no help"
        error = attempt(comm.all_gather, torch.zeros(3 * comm.size), tensor)
        assert isinstance(error, (TypeError, ValueError)), (name, error)
    assert_usable(comm)


def test_types_that_no_plain_tensor_has_are_refused(comm: Communicator) -> None:
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    refused_by(comm.all_reduce, bits)
    assert_usable(comm)


@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
                  "all_to_all", "gather", "scatter"]
)  # fmt: skip
def test_nothing_in_place_of_a_tensor_is_refused(comm: Communicator, operation: str) -> None:
    comm.timeout_s = 3.0
    call = getattr(comm, operation)
    if operation in ("all_reduce", "reduce", "broadcast"):
        refused_by(call, None)
    elif operation in ("all_gather", "reduce_scatter", "all_to_all"):
        refused_by(call, None, None)
        refused_by(call, torch.zeros(comm.size), None)
        refused_by(call, None, torch.zeros(comm.size))
    elif operation == "gather":
        refused_by(call, torch.zeros(comm.size) if comm.rank == 0 else None, None)
    else:
        refused_by(call, None, torch.zeros(comm.size) if comm.rank == 0 else None)
    assert_usable(comm)


def test_a_tensor_of_zeros_without_memory_is_right_or_refused(comm: Communicator) -> None:
    comm.timeout_s = 3.0
    output = torch.ones(4 * comm.size)
    error = attempt(comm.all_gather, output, torch._efficientzerotensor(4))
    if error is None:
        assert output.eq(0).all()
    else:
        assert isinstance(error, (TypeError, ValueError))


def test_roots_ops_and_parts_that_make_no_sense_are_refused(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    tensor, wide = torch.ones(2), torch.full((2 * size,), 7.0)
    for root in (-1, size, size + 5):
        assert str(root) in str(refused_by(comm.broadcast, tensor, root))
        refused_by(comm.reduce, tensor, root)
        refused_by(comm.gather, None, tensor, root)
        refused_by(comm.scatter, tensor, None, root)
    refused_by(comm.all_gather, torch.zeros(2 * size + 1), tensor)
    refused_by(comm.all_gather, torch.zeros(3 * size), tensor)
    refused_by(comm.all_gather, [tensor] * (size + 1), tensor)
    refused_by(comm.all_gather, wide.double(), tensor)
    refused_by(
        comm.all_gather,
        [tensor.double() if r == rank else tensor.clone() for r in range(size)],
        tensor,
    )
    refused_by(comm.all_gather, [wide], [tensor, tensor])
    refused_by(comm.all_gather, wide, [tensor])
    refused_by(comm.reduce_scatter, [tensor], wide)
    refused_by(comm.reduce_scatter, torch.zeros(3), wide)
    refused_by(comm.reduce_scatter, tensor.double(), wide)
    refused_by(comm.reduce_scatter, tensor, [tensor] * (size + 1))
    refused_by(comm.all_to_all, wide, wide.int())
    refused_by(comm.all_to_all, wide, [tensor] * (size + 1))
    assert tensor.tolist() == [1, 1]
    assert wide.eq(7).all()
    assert_usable(comm)


def test_arguments_of_the_wrong_type_are_refused(comm: Communicator) -> None:
    tensor = torch.ones(2)
    refused_by(comm.all_reduce, tensor, ["sum"])
    refused_by(comm.all_reduce, tensor, PremulSum("half"))  # type: ignore[arg-type]
    refused_by(comm.broadcast, tensor, "0")
    refused_by(comm.broadcast, tensor, 0.5)
    refused_by(comm.split, ["0"])
    refused_by(comm.split, [])
    refused_by(comm.split, [0, 0])
    refused_by(comm.split, [comm.size])
    assert tensor.tolist() == [1, 1]
    assert_usable(comm)


def test_a_coalesced_call_is_refused_as_a_whole(comm: Communicator) -> None:
    floats, whole = torch.full((2,), 2.0), torch.tensor([4, 6])
    for op in ("avg", "band", PremulSum(0.5)):
        for tensors in ([floats, whole], [whole, floats]):
            refused_by(comm.all_reduce, tensors, op)
            refused_by(comm.reduce, tensors, 0, op)
    refused_by(comm.all_reduce, [floats, 3])
    refused_by(comm.broadcast, [floats, None])
    output = [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]
    wide = [torch.ones(comm.size), torch.ones(comm.size, dtype=torch.int64)]
    refused_by(comm.reduce_scatter, output, wide, PremulSum(0.5))
    refused_by(comm.reduce_scatter, output, wide, "avg")
    refused_by(comm.reduce_scatter, output[1], wide[1], "avg")
    assert floats.tolist() == [2, 2]
    assert whole.tolist() == [4, 6]
    assert [one.item() for one in output] == [0, 0]
    assert_usable(comm)


def test_a_factor_that_an_integer_type_cannot_hold_is_refused(comm: Communicator) -> None:
    for factor in (0.5, 1e30, float("inf"), float("nan")):
        refused_by(comm.all_reduce, torch.ones(2, dtype=torch.int32), PremulSum(factor))
    assert_usable(comm)


# -- what autograd and complex numbers add -------------------------------------------------------


def test_conjugated_and_negated_views_are_right_or_refused(comm: Communicator) -> None:
    for view_of in (
        lambda plain: plain.conj(),
        lambda plain: plain.conj().imag,
        lambda plain: plain.conj()[::2],
    ):
        given = [view_of(one.clone()) for one in inputs(comm.size, torch.complex64, 10)]
        resolved = [one.resolve_conj().resolve_neg() for one in given]
        mine = given[comm.rank]
        output = torch.zeros(mine.numel() * comm.size, dtype=mine.dtype)
        error = attempt(comm.all_gather, output, mine)
        assert error is None or isinstance(error, (TypeError, ValueError)), error
        if error is None:
            assert_same(output, torch.cat(resolved), "gathered")
        error = attempt(comm.all_reduce, mine)
        assert error is None or isinstance(error, (TypeError, ValueError)), error
        if error is None:
            assert_same(mine.resolve_conj().resolve_neg(), reduced(resolved, "sum"), "reduced")


def test_tensors_that_require_grad_are_moved(comm: Communicator) -> None:
    size = comm.size
    parameter = torch.nn.Parameter(torch.full((3,), comm.rank + 1.0))
    comm.broadcast(parameter, size - 1)
    assert parameter.tolist() == [size] * 3
    comm.all_reduce(parameter)
    assert parameter.tolist() == [size * size] * 3
    comm.all_reduce(parameter, PremulSum(0.5))
    assert parameter.tolist() == [size**3 / 2] * 3
    gathered = torch.zeros(3 * size)
    comm.all_gather(gathered, parameter * 2)
    assert gathered.tolist() == [size**3] * 3 * size
    outputs = [torch.nn.Parameter(torch.zeros(3)) for _ in range(size)]
    comm.all_gather(outputs, parameter)
    assert all(output.tolist() == [size**3 / 2] * 3 for output in outputs)
    assert parameter.requires_grad
    assert parameter.is_leaf


# -- what a Communicator says of itself ----------------------------------------------------------


def test_a_communicator_knows_its_place(comm: Communicator) -> None:
    assert comm.rank == int(os.environ["UNISONO_RANK"])
    assert comm.size == int(os.environ["UNISONO_SIZE"])
    assert comm.global_ranks == tuple(range(comm.size))
    text = repr(comm)
    assert f"rank {comm.rank} of {comm.size}" in text
    assert comm.name in text
    comm.timeout_s = 12.5
    assert comm.timeout_s == 12.5


def test_complex_types_have_no_order(comm: Communicator) -> None:
    for dtype in COMPLEXES:
        error = refused_by(comm.all_reduce, torch.ones(2, dtype=dtype), "max")
        assert "max" in str(error)
        assert str(dtype).removeprefix("torch.") in str(error)
    assert_usable(comm)
