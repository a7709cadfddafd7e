"""Every collective on tensors of a GPU that the ranks share: bit for bit the CPU engine's result.

Sizes are on both sides of the staging threshold; the expected result is computed on the CPU from
all ranks' inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expected import OPS, REDUCIBLE, assert_same, copy_of, inputs, meaningful, reduced
from unisono import Message, PremulSum
from unisono.comm.communicator import Communicator
from unisono.comm.cuda.calls import STAGED_BYTES

pytestmark = pytest.mark.ranks(2)
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
SIZES = (1, 3, 7, 1000, 4096, 40_001, STAGED_BYTES, 4 * STAGED_BYTES + 1)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return copy_of(tensor).cuda()


def check_reductions(comm: Communicator, count: int) -> None:
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(-3), PremulSum(0.3)):
            if not meaningful(dtype, op):
                continue
            given = inputs(comm.size, dtype, count)
            tensor = on_gpu(given[comm.rank])
            comm.all_reduce(tensor, op)
            assert_same(tensor.cpu(), reduced(given, op), (dtype, op))


def test_every_small_reduction(comm: Communicator) -> None:
    check_reductions(comm, 37)


def test_every_large_reduction(comm: Communicator) -> None:
    check_reductions(comm, STAGED_BYTES + 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("count", [5, STAGED_BYTES + 1])
def test_four_ranks_in_their_order(comm: Communicator, count: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in ("sum", "avg", "max"):
            given = inputs(4, dtype, count)
            tensor = on_gpu(given[comm.rank])
            comm.all_reduce(tensor, op)
            assert_same(tensor.cpu(), reduced(given, op), (dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_of_every_size(comm: Communicator, dtype: torch.dtype, async_op: bool) -> None:
    for count in SIZES:
        given = inputs(comm.size, dtype, count)
        tensor = on_gpu(given[comm.rank])
        work = comm.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
        assert_same(tensor.cpu(), reduced(given, "sum"), (dtype, count))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("count", [6, 3 * STAGED_BYTES])
@pytest.mark.parametrize("async_op", [False, True])
def test_every_way_to_move(comm: Communicator, count: int, async_op: bool) -> None:
    rank, size = comm.rank, comm.size

    def done(work: Any) -> None:
        if work is not None:
            work.wait()

    given = inputs(size, torch.float32, count)
    parts = [row.chunk(size) for row in given]

    tensor = on_gpu(given[rank])
    done(comm.broadcast(tensor, 1, async_op=async_op))
    assert_same(tensor.cpu(), given[1], "broadcast")

    tensor = on_gpu(given[rank])
    done(comm.reduce(tensor, 2, "max", async_op=async_op))
    assert_same(tensor.cpu(), reduced(given, "max") if rank == 2 else given[rank], "reduce")

    wide = torch.empty(size * count, device="cuda")
    done(comm.all_gather(wide, on_gpu(given[rank]), async_op=async_op))
    assert_same(wide.cpu(), torch.cat(given), "all_gather")

    listed = [torch.empty(count + each, device="cuda") for each in range(size)]
    mine = torch.cat([given[rank], torch.ones(rank)]).cuda()
    done(comm.all_gather(listed, mine, async_op=async_op))
    for each, row in enumerate(listed):
        assert_same(row.cpu(), torch.cat([given[each], torch.ones(each)]), "all_gather, ragged")

    part = torch.empty(count // size, device="cuda")
    done(comm.reduce_scatter(part, on_gpu(given[rank]), async_op=async_op))
    assert_same(part.cpu(), reduced(given, "sum").chunk(size)[rank], "reduce_scatter")

    swapped = torch.empty(count, device="cuda")
    done(comm.all_to_all(swapped, on_gpu(given[rank]), async_op=async_op))
    assert_same(swapped.cpu(), torch.cat([part[rank] for part in parts]), "all_to_all")

    wide_or_none = torch.empty(size * count, device="cuda") if rank == 1 else None
    done(comm.gather(wide_or_none, on_gpu(given[rank]), 1, async_op=async_op))
    if wide_or_none is not None:
        assert_same(wide_or_none.cpu(), torch.cat(given), "gather")

    done(comm.scatter(part, on_gpu(given[0]) if rank == 0 else None, 0, async_op=async_op))
    assert_same(part.cpu(), parts[0][rank], "scatter")


def test_strided_coalesced_and_empty_tensors(comm: Communicator) -> None:
    for count in (10, STAGED_BYTES):
        base = torch.full((count, 2), float(comm.rank + 1), device="cuda")
        strided = base[:, 0]
        comm.all_reduce(strided)
        assert strided.eq(3).all()
        assert base[:, 1].eq(comm.rank + 1).all()
        negated = torch.full((count,), 1 + 2j, device="cuda").conj().imag
        comm.all_reduce(negated, "product")
        assert negated.eq(4).all()
        gathered = torch.empty(2 * count, device="cuda")
        comm.all_gather(gathered, torch._neg_view(torch.ones(count, device="cuda")))
        assert gathered.eq(-1).all()
        many = [torch.ones(count, device="cuda"), torch.ones(3, device="cuda", dtype=torch.int64)]
        comm.all_reduce(many)
        assert all(tensor.eq(2).all() for tensor in many)
    nothing = torch.empty(0, device="cuda")
    comm.all_reduce(nothing)
    comm.all_gather([nothing.clone(), nothing.clone()], nothing)


@pytest.mark.parametrize("first", ["strided", "in inference mode"])
def test_what_the_first_calls_make_serves_in_every_mode(comm: Communicator, first: str) -> None:
    """A group's first calls allocate pinned memory, and torch writes to it if a row has an odd
    number of bytes."""
    with comm.split([0, 1], label=first) as group:
        for is_inference in (first != "strided", False, True, False):
            with torch.inference_mode(is_inference):
                wide = torch.full((8, 2), group.rank + 1.0, device="cuda")
                group.all_reduce(wide[:, 0])
                assert wide[:, 0].eq(3).all()
            for count, dtype in ((17, torch.uint8), (5, torch.float32), (STAGED_BYTES + 1, None)):
                tensor = torch.full((count,), group.rank + 1, device="cuda", dtype=dtype)
                group.all_reduce(tensor)
                assert tensor.eq(3).all()
                work = group.all_reduce(tensor, async_op=True)
                assert work is not None
                work.wait()
                assert tensor.eq(6).all()
                group.broadcast([tensor.fill_(group.rank), tensor.clone()], 1)
                assert tensor.eq(1).all()


def test_messages(comm: Communicator) -> None:
    for count in (1, 100_000, 3_000_000):
        mine = torch.full((count,), float(comm.rank), device="cuda")
        theirs = torch.empty(count, device="cuda")
        works = comm.batch_isend_irecv(
            [Message("send", mine, comm.next), Message("recv", theirs, comm.prev)]
        )
        for work in works:
            work.wait()
        assert theirs.eq(comm.prev).all()
    if comm.rank == 0:
        comm.send(torch.arange(5.0, device="cuda"), 1, tag=3)
    else:
        arrived = torch.empty(5)  # of the CPU
        assert comm.recv(arrived, tag=3) == 0
        assert arrived.tolist() == [0, 1, 2, 3, 4]


def test_groups_beside_the_world(comm: Communicator) -> None:
    with comm.split([1, 0], label="turned") as turned:
        for count in (4, STAGED_BYTES):
            tensor = torch.full((count,), 10.0**turned.rank, device="cuda")
            turned.all_reduce(tensor)
            comm.all_reduce(tensor)
            assert tensor.eq(22).all()


@pytest.mark.ranks(8)
def test_eight_ranks(comm: Communicator) -> None:
    for count in (1, 3000, STAGED_BYTES):
        given = inputs(8, torch.float32, count)
        tensor = on_gpu(given[comm.rank])
        comm.all_reduce(tensor)
        assert_same(tensor.cpu(), reduced(given, "sum"), count)
