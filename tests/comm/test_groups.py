"""Groups: their members, their lifetime, and what they leave behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest
import torch

from ranks import RankPool, attempt, connect, in_a_fork, raised, subgroup
from unisono import GroupClosed, GroupError, PeerLost
from unisono.comm.communicator import Communicator
from unisono.comm.meeting.unix_socket import RendezvousServer
from user_programs import eventually


def assert_sums(group: Communicator, count: int = 3) -> None:
    """The result is the sum of the members' global ranks, and the members are in order."""
    assert group.global_ranks is not None
    mine = group.global_ranks[group.rank]
    group.all_reduce(tensor := torch.full((count,), float(mine)))
    assert tensor.tolist() == [sum(group.global_ranks)] * count
    members = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(members, torch.tensor([mine]))
    assert tuple(members.tolist()) == group.global_ranks


# -- members -----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_groups_have_any_shape_and_order(comm: Communicator) -> None:
    for length in (2, 3, 4):
        for members in permutations(range(4), length):
            group = comm.split(members)
            if comm.rank not in members:
                assert group is None
                continue
            assert group is not None
            with group:
                assert group.size == length
                assert group.rank == members.index(comm.rank)
                assert group.global_ranks == members
                assert_sums(group)


@pytest.mark.ranks(8)
def test_disjoint_and_overlapping_groups_live_side_by_side(comm: Communicator) -> None:
    rows = [comm.split(range(start, start + 4)) for start in (0, 4)]
    columns = [comm.split(range(start, 8, 4)) for start in range(4)]
    odd = comm.split([7, 5, 3, 1])
    groups = [group for group in (*rows, *columns, odd) if group is not None]
    for count in (1, 1000, 50_000):
        for group in groups:
            assert_sums(group, count)
        assert_sums(comm, count)
        for group in reversed(groups):
            assert_sums(group, count)
    for group in groups:
        group.close()


@pytest.mark.ranks(3)
def test_two_groups_with_the_same_members_do_not_mix(comm: Communicator) -> None:
    first, second = subgroup(comm, [0, 1, 2]), subgroup(comm, [0, 1, 2])
    assert first.name != second.name
    for step in range(50):
        one, two = torch.full((2000,), float(step)), torch.full((2000,), -1.0)
        if step % 2:
            first.all_reduce(one)
            second.all_reduce(two, "max")
        else:
            second.all_reduce(two, "max")
            first.all_reduce(one)
        assert one.eq(3.0 * step).all()
        assert two.eq(-1).all()
    first.close()
    assert_sums(second)
    second.close()


def test_threads_that_make_groups_at_once_free_their_own_descriptors() -> None:
    server = RendezvousServer()

    def keep_and_use() -> None:
        for _ in range(5000):
            server.keep_spare()
            server.use_spare()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for thread in [threads.submit(keep_and_use) for _ in range(4)]:
                thread.result()
    finally:
        sys.setswitchinterval(before)
        server.close_socket()


@pytest.mark.ranks(2)
def test_labels_tell_groups_apart_whichever_is_made_first(comm: Communicator) -> None:
    labels = ["red", "blue"]
    with ThreadPoolExecutor() as threads:
        found = {
            label: threads.submit(subgroup, comm, [0, 1], label)
            for label in (labels if comm.rank else reversed(labels))
        }
    for number, label in enumerate(labels):
        group = found[label].result()
        assert group.name == f"world.{label}[0,1]"
        group.all_reduce(tensor := torch.tensor([float(number)]))
        assert float(tensor) == 2 * number
        group.close()


@pytest.mark.ranks(3)
def test_two_groups_are_used_by_a_thread_each(comm: Communicator) -> None:
    groups = [subgroup(comm, [0, 1, 2]), subgroup(comm, [2, 1, 0])]

    def work(group: Communicator, amount: int) -> None:
        with group:
            for step in range(100):
                group.all_reduce(tensor := torch.full((amount,), float(step)))
                assert tensor.eq(3.0 * step).all()

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, groups, (5, 3000)))


@pytest.mark.ranks(2)
def test_threads_that_use_a_group_take_turns(comm: Communicator) -> None:
    """All threads do the same, so any order of turns works."""

    def work(steps: int) -> None:
        for _ in range(steps):
            comm.all_reduce(tensor := torch.ones(700))
            assert tensor.eq(2).all()

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, [50] * 4))


@pytest.mark.ranks(8)
def test_groups_are_made_of_groups(comm: Communicator) -> None:
    group: Communicator | None = comm
    while group is not None and group.size > 1:
        assert_sums(group, 100)
        half = list(reversed(range(group.size)))[: group.size // 2]
        group = group.split(half)
    assert (group is not None) == (comm.rank in nested_ranks(list(range(8))))
    if group is not None:
        assert group.global_ranks == (comm.rank,)
        assert_sums(group)


def nested_ranks(ranks: list[int]) -> list[int]:
    while len(ranks) > 1:
        ranks = list(reversed(ranks))[: len(ranks) // 2]
    return ranks


@pytest.mark.ranks(3)
def test_a_child_outlives_its_parent(comm: Communicator) -> None:
    parent = subgroup(comm, [0, 1, 2])
    child = subgroup(parent, [2, 0, 1])
    parent.close()
    assert_sums(child)
    grandchild = child.split([1, 2])
    if grandchild is not None:
        with grandchild:
            assert_sums(grandchild)
    child.close()


@pytest.mark.ranks(3)
def test_a_group_of_one_needs_nobody(comm: Communicator) -> None:
    own = subgroup(comm, [comm.rank])
    with own:
        assert (own.rank, own.size, own.global_ranks) == (0, 1, (comm.rank,))
        assert_sums(own)
    for other in range(3):
        assert (comm.split([other]) is None) == (other != comm.rank)


@pytest.mark.ranks(3)
def test_only_members_take_part_in_making_a_group(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    """Rank 2 makes no call at all while the others create and use a group."""
    over = shared_tmp_path / "over"
    if comm.rank == 2:
        assert eventually(over.exists)
    else:
        group = subgroup(comm, [1, 0])
        with group:
            assert_sums(group)
            group.barrier()
        over.touch()
    comm.barrier()


@pytest.mark.ranks(4)
def test_groups_are_made_in_different_orders(comm: Communicator) -> None:
    """A rank that joins a group before its leader has started it waits."""
    plans = {0: [(0, 1), (0, 2), (0, 3)], 1: [(0, 1)], 2: [(0, 2)], 3: [(0, 3)]}
    if comm.rank == 0:
        time.sleep(0.2)  # let all three arrive first
    for members in plans[comm.rank]:
        group = subgroup(comm, members)
        with group:
            assert_sums(group)


@pytest.mark.ranks(3)
def test_a_member_that_does_not_come_is_named(comm: Communicator) -> None:
    if comm.rank == 2:
        time.sleep(0.8)
        return
    comm.timeout_s = 0.4
    error = attempt(comm.split, [0, 1, 2])
    assert error is not None
    assert "2" in str(error)
    if comm.rank == 0:
        assert "did not join" in str(error)


# -- life and death ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_groups_leave_nothing_behind(fresh_pool: RankPool, count: int) -> None:
    for before, after in fresh_pool.run(make_many_groups, 2, count, deadline_s=60):
        assert after["descriptors"] == before["descriptors"]
        assert after["threads"] == before["threads"]
        assert after["mappings"] <= before["mappings"] + 8
        assert after["resident_mib"] - before["resident_mib"] < 8


def make_many_groups(comm: Communicator, count: int) -> tuple[dict[str, float], dict[str, float]]:
    def use_a_group(number: int) -> None:
        group = subgroup(comm, [number % 2, 1 - number % 2])
        with group:
            assert_sums(group, 1000 if number % 10 else 100_000)

    for number in range(20):
        use_a_group(number)
    before = belongings()
    for number in range(count):
        use_a_group(number)
    return before, belongings()


def belongings() -> dict[str, float]:
    """What this process holds right now."""
    gc.collect()
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    numbers = {line[0].rstrip(":"): line[1] for line in lines if len(line) > 1}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(numbers["Threads"]),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident_mib": int(numbers["VmRSS"]) / 1024,
    }


def test_worlds_leave_nothing_behind(fresh_pool: RankPool) -> None:
    fresh_pool.run(just_a_sum, 3)
    before = fresh_pool.run(what_this_process_holds, 3, connected=False)
    for _ in range(30):
        fresh_pool.run(just_a_sum, 3)
    after = fresh_pool.run(what_this_process_holds, 3, connected=False)
    for early, late in zip(before, after, strict=True):
        assert late["descriptors"] == early["descriptors"]
        assert late["threads"] == early["threads"]
        assert late["mappings"] <= early["mappings"] + 4


def just_a_sum(comm: Communicator) -> None:
    assert_sums(comm, 100_000)


def what_this_process_holds(rank: int, size: int, path: str) -> dict[str, float]:
    return belongings()


@pytest.mark.ranks(2)
def test_a_group_that_is_dropped_without_close_is_given_back(comm: Communicator) -> None:
    before = belongings()["descriptors"]
    for _ in range(20):
        group = subgroup(comm, [0, 1])
        assert_sums(group)
        comm.barrier()
        del group
    comm.barrier()
    assert belongings()["descriptors"] == before


@pytest.mark.ranks([1, 2])
def test_closing_twice_does_nothing_and_use_after_it_raises(comm: Communicator) -> None:
    group = subgroup(comm, range(comm.size))
    assert_sums(group)
    with group:
        group.close()
        group.close()
    tensor, wide = torch.ones(2), torch.ones(2 * comm.size)
    root = group.rank == 0
    for use in (
        lambda: group.barrier(),
        lambda: group.all_reduce(tensor),
        lambda: group.all_reduce([tensor]),
        lambda: group.reduce(tensor),
        lambda: group.broadcast(tensor),
        lambda: group.all_gather(wide, tensor),
        lambda: group.reduce_scatter(tensor, wide),
        lambda: group.gather(wide if root else None, tensor),
        lambda: group.scatter(tensor, wide if root else None),
        lambda: group.all_to_all(wide, wide.clone()),
        lambda: group.split(range(comm.size)),
    ):
        error = raised(GroupClosed, use)
        assert "closed" in str(error)
        assert error.group == group.name
    assert tensor.tolist() == [1, 1]
    assert wide.eq(1).all()
    assert_sums(comm)


@pytest.mark.ranks(4)
def test_those_who_wait_for_a_peer_that_closed_learn_who_it_was(comm: Communicator) -> None:
    group = subgroup(comm, range(comm.size))
    with group:
        group.barrier()
        if comm.rank == 2:
            time.sleep(0.2)
            return
        start = time.monotonic()
        error = attempt(group.all_reduce, torch.ones(10))
        assert repr(attempt(group.barrier)) == repr(error), "the first cause stays"
        assert time.monotonic() - start < 10.0
    assert isinstance(error, PeerLost), error
    assert error.peer == 2
    assert error.call == 2
    assert error.rank == comm.rank


@pytest.mark.ranks(4)
def test_a_peer_may_close_as_soon_as_its_own_call_is_done(comm: Communicator) -> None:
    for count in (1, 1000, 100_000) * 10:
        group = subgroup(comm, range(comm.size))
        with group:
            group.all_reduce(tensor := torch.ones(count))
        assert tensor.eq(comm.size).all()


@pytest.mark.ranks(3)
def test_abort_ends_the_calls_of_every_member(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.1)
        comm.abort()  # type: ignore[attr-defined]
    error = raised(GroupError, comm.barrier)
    assert "rank 1" in str(error)


# -- fork --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["all_reduce", "barrier", "list", "split", "close"])
@pytest.mark.ranks(2, timeout_s=10)
def test_a_forked_child_cannot_use_its_parents_group(comm: Communicator, use: str) -> None:
    uses = {
        "all_reduce": lambda: comm.all_reduce(torch.ones(3)),
        "barrier": comm.barrier,
        "list": lambda: comm.all_reduce([torch.ones(3)]),
        "split": lambda: comm.split([0, 1]),
        "close": comm.close,
    }
    comm.timeout_s = 3.0
    assert_sums(comm, 100_000)
    assert in_a_fork(uses[use]) == ("None" if use == "close" else "GroupClosed")
    assert_sums(comm, 100_000)
    group = subgroup(comm, [1, 0])
    with group:
        assert_sums(group)


@pytest.mark.ranks(2)
def test_a_forked_child_makes_a_world_of_its_own(comm: Communicator, shared_tmp_path: Path) -> None:
    def join() -> None:
        with connect(str(shared_tmp_path / "meet"), comm.rank, 2) as own:
            assert_sums(own, 5000)

    assert in_a_fork(join) == "None"
    assert_sums(comm)


@pytest.mark.ranks(2)
def test_a_forked_child_that_ends_closes_nothing(comm: Communicator) -> None:
    for end in (lambda: None, comm.close):
        child = os.fork()
        if child == 0:
            end()
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert_sums(comm)


@pytest.mark.ranks(2)
def test_nothing_has_a_name_in_shared_memory(comm: Communicator) -> None:
    group = subgroup(comm, [0, 1])
    with group:
        assert_sums(group, 200_000)
        maps = Path("/proc/self/maps").read_text()
        assert "unisono" in maps, "the segment is mapped"
        named = [line for line in maps.splitlines() if "/dev/shm/" in line]
        assert all(line.endswith("(deleted)") for line in named), named
        group.barrier()


@pytest.mark.ranks(2)
def test_a_barriers_own_limit_is_not_the_groups(comm: Communicator) -> None:
    """Another thread never sees it, and so cannot wait by it."""
    usual_s, seen_s, is_over = comm.timeout_s, set(), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen_s.add(comm.timeout_s)

    other = threading.Thread(target=look)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other.start()
        for _ in range(300):
            comm.barrier(timeout_s=usual_s + 1)
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        other.join()
    assert seen_s == {usual_s}


@pytest.mark.ranks(2)
def test_a_group_inherits_its_parents_deadline(comm: Communicator) -> None:
    comm.timeout_s = 7.0
    group = subgroup(comm, [0, 1])
    with group:
        assert group.timeout_s == 7.0
        group.timeout_s = 3.0
        assert comm.timeout_s == 7.0
