"""Collectives that move data: every dtype, every root, even, uneven and empty parts."""

from __future__ import annotations

import time
import warnings

import numpy
import torch

from expected import (
    assert_reduced,
    assert_same,
    copy_of,
    inputs,
    movable_dtypes,
    parts_of,
    raw,
    reduced,
    values,
)
from implementations import EVERY, QUICK_DTYPES, on_implementations
from unisono.comm.communicator import Communicator

COUNTS = (0, 1, 2, 7, 1001)


def uneven(size: int, scale: int = 1) -> list[int]:
    """A count for each rank, all different if possible, one of them zero."""
    return [(3 * rank % (size + 1)) * scale for rank in range(size)]


@on_implementations(EVERY, quick=QUICK_DTYPES)
def test_every_dtype_of_torch_is_moved(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    warnings.simplefilter("ignore")  # torch calls some types experimental
    for dtype in movable_dtypes():
        for count in (0, 1, 7, 700):
            root = count % size
            given = inputs(size, dtype, count * size)
            mine = slice(rank * count, (rank + 1) * count)
            comm.broadcast(tensor := copy_of(given[rank]), root)
            assert_same(tensor, given[root], (dtype, count, "broadcast"))
            wide = torch.zeros(count * size * dtype.itemsize, dtype=torch.uint8).view(dtype)
            comm.all_to_all(wide, given[rank])
            expected = numpy.concatenate([raw(row[mine]) for row in given])
            assert numpy.array_equal(raw(wide), expected), (dtype, count, "all_to_all")
            comm.all_gather(wide, given[rank][mine])
            everyone = [raw(row[r * count : (r + 1) * count]) for r, row in enumerate(given)]
            assert numpy.array_equal(raw(wide), numpy.concatenate(everyone)), (dtype, "gather")
            output = torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
            comm.scatter(output, given[rank] if rank == root else None, root)
            assert_same(output, given[root][mine], (dtype, count, "scatter"))


def test_broadcast_and_reduce_from_and_to_every_root(comm: Communicator) -> None:
    for count in COUNTS:
        given = inputs(comm.size, torch.int32, count)
        for root in range(comm.size):
            comm.broadcast(tensor := given[comm.rank].clone(), root)
            assert_same(tensor, given[root])
            comm.reduce(tensor := given[comm.rank].clone(), root)
            left = reduced(given, "sum") if comm.rank == root else given[comm.rank]
            assert_reduced(comm, tensor, left)
            comm.reduce(tensor := given[comm.rank].clone(), root=root, op="max")
            left = reduced(given, "max") if comm.rank == root else given[comm.rank]
            assert_reduced(comm, tensor, left)


@on_implementations([*EVERY, ("torch", 8)])
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
        assert_reduced(comm, output, reduced(given, "sum")[start : start + counts[0]])
    for scale in (1, 11, 3001, 40_001):
        check_reduce_scatter(comm, uneven(size, scale))


def check_reduce_scatter(comm: Communicator, counts: list[int]) -> None:
    given = inputs(comm.size, torch.float32, sum(counts))
    output = torch.zeros(counts[comm.rank])
    comm.reduce_scatter(output, parts_of(given[comm.rank], counts), "avg")
    assert_reduced(comm, output, parts_of(reduced(given, "avg"), counts)[comm.rank], counts)


@on_implementations([*EVERY, ("torch", 8)])
def test_gather_and_scatter_with_every_root(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for root in range(size):
        scale = 40_001 if root == size - 1 else 1001
        for counts in (*([count] * size for count in COUNTS), uneven(size), uneven(size, scale)):
            given = inputs(size, torch.float32, sum(counts))
            own = [parts_of(row, counts)[r] for r, row in enumerate(given)]
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


@on_implementations([*EVERY, ("torch", 8)])
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
        assert_same(wide, torch.cat([rows[mine] for rows in given]))
        wide.zero_()
        comm.all_to_all(list(wide.reshape(size, count)), parts_of(given[rank], [count] * size))
        assert_same(wide, torch.cat([rows[mine] for rows in given]))


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
