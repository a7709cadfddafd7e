"""The same numbers give the same bits: on every rank, in every run, however the tensor is cut."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from expected import assert_same, inputs, raw, reduced
from ranks import subgroup
from unisono.comm.communicator import Communicator

COUNT = 150_001  # several slots of float64, and no multiple of anything
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def digest(tensor: Any) -> str:
    return hashlib.sha256(raw(tensor).tobytes()).hexdigest()


@pytest.mark.ranks([2, 3, 4, 8])
def test_every_rank_and_every_run_has_the_same_bits(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    digests = digests_of_sums(comm)
    (shared_tmp_path / str(comm.rank)).write_text("\n".join(digests))
    again = subgroup(comm, range(comm.size))
    with again:
        assert digests_of_sums(again) == digests
    for rank in range(comm.size):  # the calls above have waited for all ranks
        assert (shared_tmp_path / str(rank)).read_text().split("\n") == digests


def digests_of_sums(comm: Communicator) -> list[str]:
    digests = []
    for dtype in FLOATING:
        for count in (3, 1001, COUNT):
            for op in ("sum", "avg", "product"):
                tensor = inputs(comm.size, dtype, count)[comm.rank].clone()
                comm.all_reduce(tensor, op)
                digests.append(digest(tensor))
    return digests


@pytest.mark.ranks([2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64])
def test_an_average_is_the_sum_divided(comm: Communicator, dtype: type) -> None:
    rows = numpy.random.default_rng(7).normal(size=(comm.size, 1001)).astype(dtype)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    comm.all_reduce(got := rows[comm.rank].copy(), "avg")
    assert numpy.array_equal(got, total / dtype(comm.size))


@pytest.mark.ranks([2, 3, 4, 8])
def test_the_bits_do_not_depend_on_cut_place_or_operation(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    count = COUNT // size * size
    for dtype in FLOATING:
        given = inputs(size, dtype, count)
        mine = given[rank]
        comm.all_reduce(whole := mine.clone())
        assert_same(whole, reduced(given, "sum"), (dtype, "whole"))

        for piece in (997, 4096, 65_536):
            pieces = [part.clone() for part in mine.split(piece)]
            for part in pieces[:40]:
                comm.all_reduce(part)
            assert_same(torch.cat(pieces[:40]), whole[: 40 * piece], (dtype, "pieces", piece))
        pieces = [part.clone() for part in mine.split(9973)]
        comm.all_reduce(pieces)
        assert_same(torch.cat(pieces), whole, (dtype, "coalesced"))

        larger = torch.ones(count + 500, dtype=dtype)
        larger[333 : 333 + count] = mine
        comm.all_reduce(larger)
        assert_same(larger[333 : 333 + count].clone(), whole, (dtype, "part of a larger one"))
        strided = torch.zeros(count, 2, dtype=dtype)
        strided[:, 1] = mine
        comm.all_reduce(strided[:, 1])
        assert_same(strided[:, 1].contiguous(), whole, (dtype, "strided"))
        if dtype is not torch.bfloat16:
            comm.all_reduce(array := mine.clone().numpy())
            assert_same(array, whole, (dtype, "an array"))

        for root in range(size):
            comm.reduce(tensor := mine.clone(), root)
            assert_same(tensor, whole if rank == root else mine, (dtype, "reduce", root))
        part = count // size
        output = torch.zeros(part, dtype=dtype)
        comm.reduce_scatter(output, mine)
        expected = whole[rank * part : (rank + 1) * part]
        assert_same(output, expected, (dtype, "reduce_scatter"))
        odd = [part + (r % 2) - ((r - 1) % 2 if r else 0) for r in range(size)]
        odd[-1] += count - sum(odd)
        start = sum(odd[:rank])
        output = torch.zeros(odd[rank], dtype=dtype)
        comm.reduce_scatter(output, [piece.clone() for piece in mine.split(odd)])
        assert_same(output, whole[start : start + odd[rank]], (dtype, "uneven reduce_scatter"))


@pytest.mark.ranks(4)
def test_a_subgroup_sums_in_the_order_of_its_own_ranks(comm: Communicator) -> None:
    given = inputs(4, torch.float32, 5001)
    seen = set()
    for members in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        group = subgroup(comm, members)
        with group:
            group.all_reduce(tensor := given[comm.rank].clone())
            assert_same(tensor, reduced([given[rank] for rank in members], "sum"), members)
            seen.add(digest(tensor))
    assert len(seen) > 1, "these inputs do not show the order"


@pytest.mark.ranks(4)
def test_results_do_not_depend_on_who_comes_first(comm: Communicator) -> None:
    given = inputs(4, torch.bfloat16, 40_000)
    expected = reduced(given, "sum")
    for late in range(4):
        tensor = given[comm.rank].clone()
        if comm.rank == late:
            torch.randn(200, 200) @ torch.randn(200, 200)
        comm.all_reduce(tensor)
        assert_same(tensor, expected, late)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_a_half_type_is_rounded_once(comm: Communicator, dtype: Any) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    order = torch.Generator().manual_seed(4)
    others = [every[torch.randperm(len(every), generator=order)] for _ in range(comm.size - 1)]
    others.append(every ^ 1)  # neighbours: ties, and the smallest differences
    given = [bits.view(dtype) for bits in [every, *others][: comm.size]]
    wide = [tensor.float() for tensor in given]
    for op in ("sum", "avg", "product", "min", "max"):
        expected = wide[0].clone()
        for tensor in wide[1:]:
            if op in ("sum", "avg"):
                expected += tensor
            elif op == "product":
                expected *= tensor
            else:
                expected = (torch.minimum if op == "min" else torch.maximum)(expected, tensor)
        if op == "avg":
            expected /= comm.size
        comm.all_reduce(tensor := given[comm.rank].clone(), op)
        torch.testing.assert_close(
            tensor, expected.to(dtype), rtol=0, atol=0, equal_nan=True, msg=f"{op} of {dtype}"
        )
