"""Ranks that wait for each other in calls that make different groups: each is told at once."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable

import numpy
import pytest

import unisono
from random_scenarios.group_programs import Programs, draw, foresee, run_programs
from ranks import RankPool, attempt, connect, subgroup
from unisono import Communicator, RendezvousError
from unisono.errors import GroupsDiffer

SOON_S = 20.0
"""On a busy machine; the groups' own limit is 60 s."""


def make_one_more(comm: Communicator) -> None:
    subgroup(comm, [0, 1])
    comm.split([0, 1], label="" if comm.rank else "other")


def make_managers(comm: Communicator) -> None:
    tp_size = 2 if comm.rank == 0 else 4
    manager = unisono.ProcessGroupManager(tp_size=tp_size, dp_size=4 // tp_size, group=comm)
    _ = manager.tp


Calls = Callable[[Communicator], object]
CASES: dict[str, tuple[int, Calls, list[str]]] = {
    "order": (
        2,
        lambda comm: comm.split([[0, 1], [1, 0]][comm.rank]),
        ["split([0, 1])", "split([1, 0])"],
    ),
    "label": (
        2,
        lambda comm: comm.split([0, 1], label=["red", "blue"][comm.rank]),
        ["split([0, 1], label='red')", "split([0, 1], label='blue')"],
    ),
    "overlap": (
        3,
        lambda comm: comm.split([[0, 1, 2], [1, 2], [0, 1, 2]][comm.rank]),
        ["split([0, 1, 2])", "split([1, 2])"],
    ),
    "chain": (
        3,
        lambda comm: comm.split([[0, 1], [1, 2], [2, 0]][comm.rank]),
        ["split([0, 1])", "split([1, 2])", "split([2, 0])"],
    ),
    "one more": (2, make_one_more, ["split([0, 1])", "split([0, 1], label='other')"]),
    "managers": (
        4,
        make_managers,
        ["split([0, 1], label='tp')", "split([0, 1, 2, 3], label='tp')"],
    ),
    "shrink": (
        2,
        lambda comm: comm.shrink() if comm.rank else comm.split([0, 1]),
        ["split([0, 1]) of group world", "rank 1 in shrink() of group world"],
    ),
    "shrink, split by a follower": (
        2,
        lambda comm: comm.split([0, 1]) if comm.rank else comm.shrink(),
        ["rank 0 in shrink() of group world", "split([0, 1]) of group world"],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.provokes
def test_each_rank_names_both_groups(pool: RankPool, case: str) -> None:
    ranks, _, parts = CASES[case]
    for error, text, took_s in pool.run(fail_to_make, ranks, case, connected=False):
        assert error == "GroupsDiffer", (error, text)
        assert took_s < SOON_S
        for part in parts:
            assert part in text, text
        assert len(re.findall(r" at \S*test_groups_that_differ.py:\d+ in ", text)) == len(parts)


def fail_to_make(rank: int, size: int, path: str, case: str) -> tuple[str, str, float]:
    with connect(path, rank, size) as comm:
        comm.barrier()
        began_s = time.monotonic()
        error = attempt(CASES[case][1], comm)
        took_s = time.monotonic() - began_s
        if "shrink" not in case:  # the group they come from goes on, and so does its numbering
            comm.barrier()
            with subgroup(comm, range(size)) as whole:
                whole.barrier()
        return type(error).__name__, str(error), took_s


@pytest.mark.provokes
def test_a_rank_that_comes_when_the_others_have_given_up(pool: RankPool) -> None:
    error, text = pool.run(come_late, 3, connected=False)[2]
    assert error == "GroupsDiffer", (error, text)
    assert "rank 2 in split([0, 1, 2])" in text
    assert "rank 0 in split([0, 1])" in text


def come_late(rank: int, size: int, path: str) -> tuple[str, str]:
    with connect(path, rank, size) as comm:
        word = numpy.zeros(1)
        for other in range(2 if rank == 2 else 0):
            comm.recv(word, other)
        error = attempt(comm.split, [[0, 1], [1, 0], [0, 1, 2]][rank])
        if rank < 2:
            comm.send(word, 2)
        return type(error).__name__, str(error)


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_a_rank_that_another_thread_may_serve_is_not_blamed(comm: Communicator) -> None:
    """Both ranks wait in one group for longer than it takes to tell; then threads make the other,
    and with it the first one."""
    labels = ["red", "blue"] if comm.rank else ["blue", "red"]
    go, made = threading.Event(), []

    def make_later() -> None:
        go.wait(SOON_S)
        made.append(subgroup(comm, [0, 1], labels[1]))

    thread = threading.Thread(target=make_later)
    thread.start()
    timer = threading.Timer(1.5, go.set)
    timer.start()
    made.append(subgroup(comm, [0, 1], labels[0]))
    thread.join()
    assert sorted(group.name for group in made) == ["world.blue[0,1]", "world.red[0,1]"]


@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.provokes
def test_a_rank_that_has_closed_the_group_does_not_come(pool: RankPool, waits: int) -> None:
    found = pool.run(wait_for_one_that_closed, 2, waits, connected=False)
    assert found[waits] is not None
    assert "closed" in found[waits]


def wait_for_one_that_closed(rank: int, size: int, path: str, waits: int) -> str | None:
    with connect(path, rank, size) as comm:
        subgroup(comm, [0, 1])
        if rank != waits:
            return None
        error = attempt(comm.split, [0, 1])
        assert isinstance(error, RendezvousError), error
        return str(error)


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_a_group_whose_split_failed_ends_with_its_last_reference(comm: Communicator) -> None:
    """It waits for no collector: a rank that dropped the group would look as if it could come."""
    pair = subgroup(comm, [0, 1])
    gc.collect()
    gc.disable()
    try:
        attempt(pair.split, [[0, 1], [1, 0]][comm.rank])
        known = weakref.ref(pair)
        del pair
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.provokes
def test_a_split_can_be_tried_again_after_one_that_nobody_joined(pool: RankPool) -> None:
    assert pool.run(try_again, 2, connected=False) == [2, 2]


def try_again(rank: int, size: int, path: str) -> int:
    with connect(path, rank, size) as comm:
        limit_s, comm.timeout_s = comm.timeout_s, 0.2
        error = attempt(comm.split, [0, 1]) if rank == 0 else None
        assert rank or "rank 1 of 2 did not join" in str(error)
        comm.timeout_s = limit_s
        comm.barrier()
        with subgroup(comm, [0, 1]) as pair:
            pair.barrier()
            return pair.size


# -- random programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(4), range(4, 8)], ids=str)
@pytest.mark.provokes
def test_random_programs(pool: RankPool, seeds: range) -> None:
    for seed in seeds:
        check(pool, draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(at, at + 30) for at in range(0, 300, 30)], ids=str)
@pytest.mark.provokes
def test_many_random_programs(pool: RankPool, seeds: range) -> None:
    test_random_programs(pool, seeds)


def check(pool: RankPool, programs: Programs) -> None:
    fate = foresee(programs)
    ends = pool.run(run_programs, len(programs.of_rank), programs, connected=False)
    for rank, end in enumerate(ends):
        if rank in fate.done:
            assert not end.error, (programs, fate, rank, end)
        elif rank in fate.differ:
            assert end.error == GroupsDiffer.__name__, (programs, fate, rank, end)
        else:
            assert end.error, (programs, fate, rank, end)
            assert "wait for each other" not in end.text, (programs, fate, rank, end)
