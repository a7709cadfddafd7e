"""Collectives by an algorithm that the caller chooses: every one in the catalog, every
guarantee."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from expected import after, assert_same, inputs, reduced
from implementations import EVERY, on_implementations
from unisono import CollectiveMismatch, PremulSum
from unisono.cases.primitives import PRIMITIVES
from unisono.comm.communicator import Communicator
from unisono.plan import Schedule, Transfer, catalog, find

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")


def call_and_check(comm: Communicator, collective: str, count: int, root: int, **how: Any) -> None:
    """One call with `count` elements per part, compared with NumPy's result from all ranks'
    inputs."""
    rank, size, primitive = comm.rank, comm.size, PRIMITIVES[collective]
    given = inputs(size, torch.int32, count * size if "input" in primitive.wide else count, count)
    wanted, what = after(collective, given, rank, root), (collective, count, root, how)
    output, input = torch.full_like(wanted, 99), given[rank].clone()
    sides = [input] if primitive.is_in_place else [output, input]
    more = {"root": root} if primitive.is_rooted else {}
    assert getattr(comm, collective)(*sides, **more, **how) is None
    assert_same(sides[0], wanted, what)
    if not primitive.is_in_place:
        assert_same(input, given[rank], (what, "the input is untouched"))


@on_implementations([*EVERY, ("torch", 8)])
def test_every_algorithm_of_every_collective(comm: Communicator) -> None:
    for collective in COLLECTIVES:
        for entry in catalog(collective):
            for count in () if entry.only_planned else (0, 5, 1000):
                root = count % comm.size if PRIMITIVES[collective].is_rooted else 0
                call_and_check(comm, collective, count, root, algorithm=entry.name)
            root = 1000 % comm.size if PRIMITIVES[collective].is_rooted else 0
            nodes = 2 if comm.size % 2 == 0 else 1
            schedule = entry.schedule(comm.size, root=root, pieces=2, node_size=nodes)
            call_and_check(comm, collective, 1000, root, algorithm=schedule)


def test_names_in_any_case_of_letters(comm: Communicator) -> None:
    call_and_check(comm, "all_reduce", 10, 0, algorithm="Ring")
    call_and_check(comm, "all_gather", 10, 0, algorithm="RING" if comm.rank else "ring")


def test_lists_travel_together(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    ints, floats = inputs(size, torch.int64, 30), inputs(size, torch.float64, 7)

    def mine() -> list[torch.Tensor]:
        return [ints[rank][:10].clone(), floats[rank].clone(), ints[rank][10:].clone().view(4, 5)]

    for name in ("binomial", "chain"):
        comm.broadcast(tensors := mine(), size - 1, algorithm=name)
        assert_same(torch.cat([tensors[0], tensors[2].view(-1)]), ints[-1])
        assert_same(tensors[1], floats[-1])
        comm.reduce(tensors := mine(), 0, "max", algorithm=name)
        left = (reduced(ints, "max"), reduced(floats, "max")) if rank == 0 else (ints[rank],)
        assert_same(torch.cat([tensors[0], tensors[2].view(-1)]), left[0])
        assert_same(tensors[1], left[1] if rank == 0 else floats[rank])
    comm.broadcast([], algorithm="binomial")

    outputs = [torch.zeros(size * 10, dtype=torch.int64), torch.zeros(size, 7).double()]
    comm.all_gather(outputs, [ints[rank][:10], floats[rank]], algorithm="bruck")
    assert_same(outputs[0], torch.cat([row[:10] for row in ints]))
    assert_same(outputs[1], torch.stack(floats))


def test_parts_in_a_list(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    given = inputs(size, torch.int16, 6 * size)
    parts = [list(row.clone().split(6)) for row in given]
    gathered = [torch.zeros(2, 3, dtype=torch.int16) for _ in range(size)]
    comm.all_gather(gathered, parts[rank][0], algorithm="ring")
    for other in range(size):
        assert_same(gathered[other].view(-1), parts[other][0])
    comm.all_to_all(gathered, parts[rank], algorithm="pairwise")
    for other in range(size):
        assert_same(gathered[other].view(-1), parts[other][rank])
    comm.reduce_scatter(mine := torch.zeros(6).short(), parts[rank], "min", algorithm="ring")
    assert_same(mine, reduced([row[rank] for row in parts], "min"))


def test_strided_arrays_in_place_and_premul(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    array = numpy.arange(40, dtype=numpy.float64).reshape(8, 5) + rank
    untouched = array[:, 1::2].copy()
    comm.broadcast(array[:, ::2], size - 1, algorithm="scatter_all_gather")
    wanted = numpy.arange(40, dtype=numpy.float64).reshape(8, 5)[:, ::2] + size - 1
    assert numpy.array_equal(array[:, ::2], wanted)
    assert numpy.array_equal(array[:, 1::2], untouched)
    tensor = torch.full((9,), rank + 1.0)
    comm.reduce(tensor, 0, PremulSum(2.0), algorithm="binomial")
    assert tensor.tolist() == [size * (size + 1.0) if rank == 0 else rank + 1.0] * 9
    tensor = torch.full((9,), rank + 1.0)
    comm.all_reduce(tensor, PremulSum(2.0), algorithm="ring")
    assert tensor.tolist() == [size * (size + 1.0)] * 9
    wide = torch.arange(size * 2) + 100 * rank
    comm.all_to_all(wide, wide, algorithm="bruck")
    assert wide.tolist() == [2 * rank + i + 100 * peer for peer in range(size) for i in (0, 1)]


@on_implementations([("native", 1), ("native", 2), ("torch", 2)])
def test_what_makes_no_sense_is_refused_and_the_group_goes_on(comm: Communicator) -> None:
    size = comm.size
    tensor, wide = torch.ones(4), torch.ones(4 * size)
    other_root = Schedule.from_steps(
        "broadcast", "mine", size, 1, [[Transfer(size - 1, r, 0, "copy") for r in range(size - 1)]],
        root=size - 1,
    )  # fmt: skip
    refused: list[tuple[str, Callable[..., Any]]] = [
        ("broadcast has no algorithm 'ring', only binary_tree", partial(comm.broadcast, tensor)),
        ("reduce has no algorithm 'ring', only binary_tree", partial(comm.reduce, tensor)),
    ]
    for text, call in refused:
        with pytest.raises(ValueError, match=text):
            call(algorithm="ring")
    gathering = find("all_gather", "ring").schedule(size)
    with pytest.raises(ValueError, match="not a schedule for reduce_scatter"):
        comm.reduce_scatter(tensor, wide, algorithm=gathering)
    with pytest.raises(ValueError, match=f"{size + 1} ranks.*group of {size} ranks"):
        comm.all_gather(wide, tensor, algorithm=find("all_gather", "ring").schedule(size + 1))
    with pytest.raises(ValueError, match=r"binomial.* async_op"):
        comm.reduce(tensor, algorithm="binomial", async_op=True)
    if size > 1:
        with pytest.raises(ValueError, match="root is 0"):
            comm.broadcast(tensor, 0, algorithm=other_root)
        with pytest.raises(ValueError, match="root 9 is not a rank of a group of 2"):
            comm.broadcast(tensor, 9, algorithm="binomial")
        with pytest.raises(ValueError, match=r"\[1, 3\] elements.*leave out algorithm="):
            comm.all_to_all([tensor[:1], tensor[1:]], [wide[:1], wide[1:4]], algorithm="pairwise")
        with pytest.raises(ValueError, match="share memory"):
            comm.reduce([tensor, tensor], algorithm="binomial")
        few = [torch.zeros(n, dtype=torch.uint8).view(torch.int4) for n in (4 * size, 4)]
        with pytest.raises(
            TypeError, match=r"cannot copy elements of int4: pass .view\(torch.uint8"
        ):
            comm.all_gather(*few, algorithm="ring")
    assert comm.errored is None
    comm.broadcast(tensor, size - 1, algorithm=other_root)
    assert tensor.tolist() == [1, 1, 1, 1]


@on_implementations([("native", 3), ("torch", 3)])
def test_ranks_that_choose_differently_raise_before_anything_moves(comm: Communicator) -> None:
    tensor = torch.full((500,), float(comm.rank))
    with pytest.raises(CollectiveMismatch) as caught:
        comm.reduce(tensor, algorithm="chain" if comm.rank == 1 else "binomial")
    assert "by chain" in str(caught.value)
    assert caught.value.culprits == (1,)
    with pytest.raises(CollectiveMismatch):
        comm.reduce(tensor, root=comm.rank // 2, algorithm="binomial")
    assert tensor.eq(comm.rank).all()
    assert comm.errored is None
    with pytest.raises(CollectiveMismatch, match=r"by scatter_all_gather(.|\n)*by chain"):
        comm.broadcast(tensor, algorithm="chain" if comm.rank == 1 else "scatter_all_gather")
