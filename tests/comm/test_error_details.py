"""What errors say about sizes, shapes, ranks and calls: who was wrong, in numbers that users
know."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import subgroup
from unisono import plan
from unisono.comm import engine
from unisono.comm.communicator import Communicator
from unisono.comm.factory import wrap
from unisono.comm.on_rows.mismatches import PairwiseSizes
from unisono.errors import CollectiveMismatch, CollectiveTimeout


def parts(ranks: int, length: int) -> list[numpy.ndarray]:
    return [numpy.zeros(length) for _ in range(ranks)]


def gather(comm: Communicator, odd: int) -> None:
    wide = parts(comm.size, 3) if comm.rank == 0 else None
    comm.gather(wide, numpy.ones(4 if comm.rank == odd else 3))


def scatter(comm: Communicator, odd: int) -> None:
    wide = parts(comm.size, 3) if comm.rank == 0 else None
    comm.scatter(numpy.ones(4 if comm.rank == odd else 3), wide)


def all_to_all(comm: Communicator, odd: int) -> None:
    output = parts(comm.size, 3)
    if comm.rank == odd:
        output[0] = numpy.zeros(4)
    comm.all_to_all(output, parts(comm.size, 3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("call", "pair"),
    [
        (gather, "rank 2 sends 4 elements to rank 0, which expects 3"),
        (scatter, "rank 0 sends 3 elements to rank 2, which expects 4"),
        (all_to_all, "rank 0 sends 3 elements to rank 2, which expects 4"),
    ],
)
def test_one_wrong_size_is_shown_with_who_brought_it(
    comm: Communicator, call: Callable[[Communicator, int], None], pair: str
) -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        call(comm, 2)
    assert caught.value.culprits == (2,)
    first = str(caught.value).splitlines()[0]
    assert first == f"call #1 of group {comm.name}: rank 2 passed other sizes: {pair}"


def schedules(comm: Communicator, odd: int) -> None:
    name = "binomial" if comm.rank == odd else "chain"
    unisono.run_schedule(plan.find("broadcast", name).schedule(3), comm, numpy.ones(3))


def reduced(comm: Communicator, odd: int) -> None:
    comm.all_reduce(numpy.ones(4 if comm.rank == odd else 3, numpy.int64), "max")


PAIR = "rank 2 passed other sizes: rank 2 sends 4 elements to rank 0, which expects 3"
DIFFER = "rank 2 made a different call than the others"
NO_DATA = "No data was moved. Make every rank {} the same, in the same order."
ON_ENGINE = {
    reduced: f"""{DIFFER} in call #1 of group NAME
  ranks 0 and 1: all_reduce of int64, 3 elements, max at LINE
  rank 2: all_reduce of int64, 4 elements, max at LINE
{NO_DATA.format("call")}""",
    gather: f"""call #1 of group NAME: {PAIR}
  rank 0: gather of float64, root 0, sending 3, expecting 3 each at LINE
  rank 1: gather of float64, root 0, sending 3 at LINE
  rank 2: gather of float64, root 0, sending 4 at LINE
{NO_DATA.format("call")}""",
    schedules: f"""the ranks of group NAME execute different schedules
  rank 0: broadcast by chain: 3 ranks, 8 chunks, 9 steps, root 0, 3 elements of float64 [HASH]
  rank 1: broadcast by chain: 3 ranks, 8 chunks, 9 steps, root 0, 3 elements of float64 [HASH]
  rank 2: broadcast by binomial: 3 ranks, 1 chunk, 2 steps, root 0, 3 elements of float64 [HASH]
{NO_DATA.format("execute")}""",
}
OVER_TORCH = {
    reduced: f"""{DIFFER} (group NAME)
  rank 0: all_reduce max of int64[3]
  rank 1: all_reduce max of int64[3]
  rank 2: all_reduce max of int64[4]""",
    gather: f"""{PAIR} (group NAME)
  rank 0: gather of float64 to rank 0
  rank 1: gather of float64 to rank 0
  rank 2: gather of float64 to rank 0""",
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ON_ENGINE)
def test_the_whole_text(comm: Communicator, call: Callable[[Communicator, int], None]) -> None:
    check_text(comm, call, ON_ENGINE[call])


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("call", OVER_TORCH)
def test_the_whole_text_over_torch(
    process_group: dist.ProcessGroup, call: Callable[[Communicator, int], None]
) -> None:
    check_text(wrap(process_group), call, OVER_TORCH[call])


def check_text(comm: Communicator, call: Callable[[Communicator, int], None], text: str) -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        call(comm, 2)
    found = re.sub(r" at \S+:\d+ in \w+", " at LINE", str(caught.value))
    assert re.sub(r"\[\w{16}\]", "[HASH]", found).replace(comm.name, "NAME") == text
    assert caught.value.culprits == (2,)


def test_who_is_wrong_among_many() -> None:
    def of(gives: list[list[int]], wants: list[list[int]]) -> list[int]:
        return PairwiseSizes(gives, wants).culprits()

    even = [[1] * 4 for _ in range(4)]
    assert of(even, even) == []
    assert of(even, [[1] * 4, [1, 1, 2, 1], [1] * 4, [1] * 4]) == [1]  # expects too much
    assert of([[1] * 4, [1] * 4, [5] * 4, [1] * 4], even) == [2]  # sends too much to all
    uneven = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    other = [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert of(uneven, other) == []
    assert of(uneven, [[1, 4, 7], [9, 9, 9], [3, 6, 9]]) == [1]  # in every differing pair
    assert of([[1, 2], [3, 4]], [[1, 3], [7, 4]]) == []  # with two ranks, it is unknown


@pytest.mark.ranks(4)
def test_errors_of_subgroups_show_the_ranks_of_the_world(comm: Communicator) -> None:
    half = subgroup(comm, [0, 1] if comm.rank < 2 else [2, 3])
    half.timeout_s = 0.3
    if half.rank == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            half.barrier()
        assert caught.value.missing == (1,)
        if comm.rank == 0:  # group and global ranks are the same there
            assert "global" not in str(caught.value)
        else:
            assert "because rank 1 (global 3) never arrived; arrived: 0\n" in str(caught.value)
            assert "\n  rank 1 (global 3) (pid " in str(caught.value)
    comm.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("works", [False, True], ids=["blocking", "async"])
def test_shapes_are_compared_where_all_want_it(comm: Communicator, works: bool) -> None:
    def all_reduce(shape: tuple[int, ...]) -> None:
        work = comm.all_reduce(numpy.ones(shape), async_op=works)
        if work is not None:
            work.wait()

    os.environ["UNISONO_CHECK_SHAPES"] = "0"
    engine.compare_shapes(by_default=True)
    try:
        all_reduce((2, 3) if comm.rank else (3, 2))  # shapes are not compared
        os.environ["UNISONO_CHECK_SHAPES"] = "01"[comm.rank != 0]
        engine.compare_shapes(by_default=False)
        all_reduce((2, 3) if comm.rank else (3, 2))  # rank 0 does not send its shape
        os.environ["UNISONO_CHECK_SHAPES"] = "1"
        engine.compare_shapes(by_default=False)
        all_reduce((2, 1, 3) if comm.rank else (2, 3))  # lengths of 1 do not count
        with pytest.raises(CollectiveMismatch) as caught:
            all_reduce((2, 3) if comm.rank else (3, 2))
    finally:
        del os.environ["UNISONO_CHECK_SHAPES"]
        engine.compare_shapes(by_default=unisono.watch.is_on())
    assert caught.value.culprits == (0,)
    assert "  rank 0: all_reduce of float64, 6 elements, sum, shape (3, 2)" in str(caught.value)
    assert "  ranks 1 and 2: all_reduce of float64, 6 elements, sum, shape (2, 3)" in str(
        caught.value
    )


@pytest.mark.ranks(3)
def test_parts_of_different_shapes_are_no_mismatch(comm: Communicator) -> None:
    os.environ["UNISONO_CHECK_SHAPES"] = "1"
    engine.compare_shapes(by_default=False)
    try:
        shapes = [(2, 3), (3, 2, 1), (5, 1)]
        output = [numpy.zeros(shape) for shape in shapes]
        comm.all_gather(output, numpy.full(shapes[comm.rank], 1.0 + comm.rank))
        assert [part.sum() for part in output] == [6.0, 12.0, 15.0]
    finally:
        del os.environ["UNISONO_CHECK_SHAPES"]
        engine.compare_shapes(by_default=unisono.watch.is_on())


DIFFERENT = "different calls in call #1 of group world"


@pytest.mark.provokes
@pytest.mark.ranks(2)
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize("start", ["unisono.init", "init_process_group"])
def test_the_world_has_one_name_and_calls_count_from_one(
    start: str, watched: bool, request: pytest.FixtureRequest
) -> None:
    if watched:
        request.addfinalizer(unisono.watch.stop)
        unisono.watch.start()
    unisono.init() if start == "unisono.init" else request.getfixturevalue("process_group")
    with pytest.raises(CollectiveMismatch, match=DIFFERENT):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
