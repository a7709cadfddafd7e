"""Memory layouts: strides, lists in one call, results in place, autograd's views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from expected import assert_reduced, assert_same, inputs, parts_of, promised, reduced, values
from implementations import EVERY, QUICK_DTYPES, on_implementations
from unisono.comm.communicator import Communicator
from unisono.comm.engine import compare_shapes

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
    """A base tensor, and a view of it with this layout that holds `content`."""
    shape, view_of = ARRAY_LAYOUTS[layout]
    base: Any = values(dtype, int(numpy.prod(shape)), 99, 0).reshape(shape)
    if array:
        base = base.numpy().copy()
    view = view_of(base)
    if content is not None:
        filled = content.reshape(tuple(view.shape))
        view[...] = filled.numpy() if array else filled
    return base, view


def whole_numbers(size: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """The inputs of all ranks; their sums are exact in any order."""
    rows = [row.to(dtype) for row in inputs(size, torch.int8, count)]
    return [row * (1 + 2j) for row in rows] if dtype.is_complex else rows


def elements_of(layout: str) -> int:
    shape, view_of = ARRAY_LAYOUTS[layout]
    return int(view_of(numpy.zeros(shape, numpy.uint8)).size)


@on_implementations(EVERY, quick=QUICK_DTYPES)
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
            given = whole_numbers(size, dtype, count)
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.all_reduce(view)
            check(base, reduced(given, "sum"), "all_reduce")
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.reduce(view, size - 1)
            check(base, reduced(given, "sum") if rank == size - 1 else given[rank], "reduce")
            base, view = laid_out(layout, dtype, given[rank], array)
            comm.broadcast(view, size // 2)
            check(base, given[size // 2], "broadcast")

            wide = whole_numbers(size, dtype, count * size)
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
            sent = [row.reshape(size, count)[rank] for row in wide]
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
        assert_reduced(comm, output, reduced(wide, "sum")[rank * count : (rank + 1) * count])
        base = torch.zeros(5, rows * size)
        comm.all_to_all(base.T, strided)
        sent = [row[rank * count : (rank + 1) * count] for row in wide]
        assert_same(base.T.flatten(), torch.cat(sent))


def test_arrays_that_are_not_aligned(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.int32):
        for count in (5, 4001, 100_001):
            given = inputs(comm.size, dtype, count)
            memory = bytearray(count * dtype.itemsize + 1)
            kind = given[0].numpy().dtype
            tensor = numpy.frombuffer(memory, kind, count, offset=1)
            assert not tensor.flags.aligned
            tensor[:] = given[comm.rank].numpy()
            comm.all_reduce(tensor)
            assert_reduced(comm, tensor.copy(), reduced(given, "sum"), (dtype, count))


def test_a_group_mixes_arrays_and_tensors(comm: Communicator) -> None:
    for dtype in (torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint32):
        given = inputs(comm.size, dtype, 1001)
        tensor: Any = given[comm.rank].clone()
        if comm.rank % 2:
            tensor = tensor.numpy()
        if promised(comm, dtype, "sum"):
            comm.all_reduce(tensor)
            assert_reduced(comm, tensor, reduced(given, "sum"), dtype)
        output = numpy.zeros(1001 * comm.size, given[0].numpy().dtype)
        comm.all_gather(output, given[comm.rank])
        assert_same(output, torch.cat(given), dtype)


def test_shapes_may_differ_where_counts_agree(comm: Communicator) -> None:
    compare_shapes(by_default=False)  # until the next test
    given = inputs(comm.size, torch.int32, 24)
    shapes = ((24,), (2, 12), (4, 3, 2))
    tensor = given[comm.rank].reshape(shapes[comm.rank % 3]).clone()
    comm.all_reduce(tensor)
    assert_reduced(comm, tensor.flatten(), reduced(given, "sum"))
    output = torch.zeros(24 * comm.size, dtype=torch.int32)
    comm.all_gather(output, tensor)
    assert_reduced(comm, output, reduced(given, "sum").repeat(comm.size))


# -- several tensors in one call, and results in place --------------------------------------------


def test_coalesced_tensors_of_mixed_dtypes_travel_together(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    third = torch.bfloat16 if promised(comm, torch.bfloat16, "sum") else torch.float64
    kinds = [
        (torch.float32, 5),
        (torch.int64, 0),
        (torch.float32, 0),
        (third, 1001),
        (torch.float32, 70_001),
        (torch.int64, 33),
        (torch.float32, 1),
        (third, 2),
    ]
    given = [inputs(size, dtype, count, seed) for seed, (dtype, count) in enumerate(kinds)]
    tensors = [rows[rank].clone() for rows in given]
    tensors[4] = torch.zeros(70_001, 2)[:, 1].copy_(tensors[4])
    comm.all_reduce(tensors)
    for tensor, rows in zip(tensors, given, strict=True):
        assert_reduced(comm, tensor, reduced(rows, "sum"))

    tensors = [rows[rank].clone() for rows in given]
    comm.reduce(tuple(tensors), size - 1, "max")
    for tensor, rows in zip(tensors, given, strict=True):
        assert_reduced(comm, tensor, reduced(rows, "max") if rank == size - 1 else rows[rank])
    tensors = [rows[rank].clone() for rows in given]
    comm.broadcast(tensors, size // 2)
    for tensor, rows in zip(tensors, given, strict=True):
        assert_same(tensor, rows[size // 2])

    wides = [torch.zeros(count * size, dtype=dtype) for dtype, count in kinds]
    comm.all_gather(wides, [rows[rank] for rows in given])
    for wide, rows in zip(wides, given, strict=True):
        assert_same(wide, torch.cat(rows))

    given = [inputs(size, dtype, count * size, 9) for dtype, count in kinds]
    outputs = [torch.zeros(count, dtype=dtype) for dtype, count in kinds]
    comm.reduce_scatter(outputs, [rows[rank] for rows in given], "sum")
    for (_, count), output, rows in zip(kinds, outputs, given, strict=True):
        assert_reduced(comm, output, reduced(rows, "sum")[rank * count : (rank + 1) * count])


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
    assert_reduced(comm, torch.cat(tensors), reduced(given, "avg"))


def test_results_may_lie_where_the_inputs_were(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for count in (0, 1, 5, 1001, 30_001, 300_001 // size):
        mine = slice(rank * count, (rank + 1) * count)
        given = inputs(size, torch.float32, count * size)
        wide = given[rank].clone()
        comm.all_gather(wide, wide[mine])
        own = torch.cat([row[r * count : (r + 1) * count] for r, row in enumerate(given)])
        assert_same(wide, own, ("all_gather", count))
        wide = given[rank].clone()
        parts = [wide[r * count : (r + 1) * count] for r in range(size)]
        comm.all_gather(parts, parts[rank])
        assert_same(wide, own, ("all_gather of a list", count))
        for output, source in ((wide, wide), (wide, wide.view(-1))):
            wide.copy_(given[rank])
            comm.all_to_all(output, source)
            sent = torch.cat([row[mine] for row in given])
            assert_same(wide, sent, ("all_to_all", count))
        wide.copy_(given[rank])
        comm.all_to_all(parts, parts)
        assert_same(wide, sent, ("all_to_all of lists", count))
        wide = given[rank].clone()
        comm.reduce_scatter(wide[mine], wide)
        assert_reduced(comm, wide[mine], reduced(given, "sum")[mine], ("reduce_scatter", count))
        others = torch.cat([wide[: rank * count], wide[(rank + 1) * count :]])
        left = torch.cat([given[rank][: rank * count], given[rank][(rank + 1) * count :]])
        assert_same(others, left, ("reduce_scatter", count))
        wide = given[rank].clone()
        comm.gather(wide if rank == 0 else None, wide[mine], 0)
        assert_same(wide, own if rank == 0 else given[rank], ("gather", count))
        wide = given[rank].clone()
        comm.scatter(wide[mine], wide if rank == 0 else None, 0)
        assert_same(wide[mine], given[0][mine], ("scatter", count))


# -- what autograd and complex numbers add -------------------------------------------------------


LAZY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda plain: plain.conj(),
    lambda plain: plain.conj()[::2],
    lambda plain: plain.conj().imag,
    lambda plain: plain.conj().imag[:1],
    lambda plain: torch._neg_view(plain.real.half()[::2]),
]
"""Views of complex numbers whose values differ from what is in memory."""


@pytest.mark.parametrize("async_op", [False, True])
def test_conjugated_and_negated_views_read_as_they_are(comm: Communicator, async_op: bool) -> None:
    rank, size = comm.rank, comm.size
    numbers = torch.arange(1.0, 1 + 10 * size).chunk(size)
    rows = [torch.complex(row, row.flip(0)) for row in numbers]

    def done(work: Any) -> None:
        while work is not None and not work.is_completed():
            pass  # a thread that sees it completed has the numbers
        assert work is None or work.exception() is None

    def resolved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.resolve_conj().resolve_neg()

    for number, view_of in enumerate(LAZY):
        lazy = [[view_of(row.clone()) for row in rows] for _ in range(6)]
        plain = [resolved(view).clone() for view in lazy[0]]
        assert lazy[0][0].is_conj() or lazy[0][0].is_neg()
        output = torch.cat(plain) * 0
        done(comm.all_gather(output, lazy[0][rank], async_op=async_op))
        assert_same(output, torch.cat(plain), ("all_gather", number))
        done(comm.all_gather(lazy[0], plain[rank], async_op=async_op))
        for part, wanted in zip(lazy[0], plain, strict=True):
            assert_same(resolved(part), wanted, ("all_gather into them", number))
        for op, views in (("sum", lazy[1]), ("product", lazy[2])):  # which distinguishes -1 from 1
            if not promised(comm, plain[0].dtype, op):
                continue
            done(comm.all_reduce(views[rank], op, async_op=async_op))
            assert_reduced(comm, resolved(views[rank]), reduced(plain, op), (op, number))
        both = [lazy[3][rank], torch.ones_like(plain[0])]
        done(comm.broadcast(both, size - 1, async_op=async_op))
        assert_same(resolved(both[0]), plain[-1], ("broadcast", number))
        if size > 1:
            sent, taken = lazy[4][rank], lazy[5][rank]
            for work in [comm.irecv(taken, comm.prev), comm.isend(sent, comm.next)]:
                done(work) if async_op else work.wait()
            assert_same(resolved(taken), plain[comm.prev], ("recv", number))
            assert_same(resolved(sent), plain[rank], ("send", number))


def test_tensors_that_require_grad_are_moved(comm: Communicator) -> None:
    size = comm.size
    parameter = torch.nn.Parameter(torch.full((3,), comm.rank + 1.0))
    comm.broadcast(parameter, size - 1)
    assert parameter.tolist() == [size] * 3
    comm.all_reduce(parameter)
    assert parameter.tolist() == [size * size] * 3
    gathered = torch.zeros(3 * size)
    comm.all_gather(gathered, parameter * 2)
    assert gathered.tolist() == [2 * size * size] * 3 * size
    outputs = [torch.nn.Parameter(torch.zeros(3)) for _ in range(size)]
    comm.all_gather(outputs, parameter)
    assert all(output.tolist() == [size * size] * 3 for output in outputs)
    assert parameter.requires_grad
    assert parameter.is_leaf
