"""New processes join a working group."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_shrink import about, die

from ranks import RankPool, attempt, connect, raised
from resources import assert_given_back, held_resources, meeting_files
from unisono import PeerLost, RendezvousError
from unisono.comm.communicator import Communicator
from unisono.comm.hosts import growing
from unisono.comm.meeting import announcements
from unisono.comm.meeting.unix_socket import Departed
from user_programs import eventually, run_python

BENCHMARK = Path(__file__).parents[2] / "benchmarks/shrink.py"


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_a_dead_rank_is_replaced(fresh_pool: RankPool, dead: int) -> None:
    """Ranks 0 to 3 start; rank 4 waits, and takes the dead rank's place."""
    outcomes = fresh_pool.outcomes(replace_one, 5, dead, connected=False)
    for rank in range(5):
        if rank != dead:
            number = dead if rank == 4 else rank
            expected = ("world~2", number, (0, 1, 2, 3), 6.0)
            assert outcomes[rank].value == expected, outcomes[rank].error
    assert not meeting_files(f"{fresh_pool.folder} grows")


def replace_one(rank: int, size: int, path: str, dead: int) -> object:
    before = held_resources()
    if rank == 4:
        comm = Communicator.join(path, dead, generation=2)
        assert comm.timeout_s == 60.0
    else:
        old = connect(path, rank, 4)
        old.barrier()
        if rank == dead:
            die()
        raised(PeerLost, old.barrier)
        left = old.shrink()
        comm = left.grow(path)
        left.barrier()  # it is unchanged
        left.close()
        old.close()
    with comm:
        assert comm.generation == 2
        found = about(comm)
    assert_given_back(before)
    return found


def test_one_rank_grows_to_four(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(grow_from_one, 4, connected=False)
    ranks = [outcome.value for outcome in outcomes]
    assert ranks[0] == 0
    assert ranks[3] == 2
    assert sorted(ranks) == [0, 1, 2, 3], [outcome.error for outcome in outcomes]


def grow_from_one(rank: int, size: int, path: str) -> int:
    if rank:
        comm = Communicator.join(path, 2 if rank == 3 else None)
    else:
        from unisono.comm.factory import alone

        comm = alone().grow(path, 3)
    assert comm.global_ranks == (0, 1, 2, 3)
    about(comm)
    return comm.rank


def test_nobody_comes(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(wait_in_vain, 3) == [3.0] * 3


def wait_in_vain(comm: Communicator) -> float:
    with pytest.raises(RendezvousError, match=r"reached rank 0|did not join within 0\.2 s"):
        comm.grow(f"nobody-{os.getppid()}", timeout_s=0.2)
    x = torch.ones(1)
    comm.all_reduce(x)
    return float(x)


def test_a_newcomer_that_dies_on_the_way(fresh_pool: RankPool) -> None:
    """It has joined, and is killed before it opens the segment: the members continue, and admit the
    next one."""
    outcomes = fresh_pool.outcomes(come_and_die, 4, connected=False)
    for rank in (0, 1, 3):
        assert outcomes[rank].value == 3, outcomes[rank].error


def come_and_die(rank: int, size: int, path: str) -> int:
    if rank == 2:
        growing.connect_once = lambda *_, **__: die()  # type: ignore[assignment]
        Communicator.join(path)
    if rank == 3:
        time.sleep(1.0)
        return Communicator.join(path).size
    with connect(path, rank, 2) as comm:
        assert isinstance(attempt(comm.grow, path), RendezvousError)
        comm.barrier()
        return comm.grow(path).size


@pytest.mark.parametrize("dying", [0, 1])
def test_a_member_that_dies_while_newcomers_are_awaited(fresh_pool: RankPool, dying: int) -> None:
    outcomes = fresh_pool.outcomes(die_waiting, 4, dying, connected=False)
    for rank in {0, 1, 2} - {dying}:
        assert outcomes[rank].value == 2, outcomes[rank].error
    assert outcomes[3].value == "waited"


def die_waiting(rank: int, size: int, path: str, dying: int) -> object:
    if rank == 3:
        error = raised(RendezvousError, lambda: Communicator.join(path, join_timeout_s=3.0))
        assert "within 3 s" in str(error)
        return "waited"
    comm = connect(path, rank, 3)
    comm.barrier()
    if rank == dying:
        signal.signal(signal.SIGALRM, lambda *_: die())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    raised(PeerLost, lambda: comm.grow(path, 2))
    return comm.shrink().size


def test_the_death_of_a_member_is_the_reason_also_for_who_learns_it_late(
    fresh_pool: RankPool,
) -> None:
    """Rank 0 has withdrawn its announcement by then."""
    outcomes = fresh_pool.outcomes(die_before_one_looks, 3, connected=False)
    for rank in (0, 2):
        assert outcomes[rank].value == 2, outcomes[rank].error


def die_before_one_looks(rank: int, size: int, path: str) -> int:
    comm = connect(path, rank, size)
    comm.barrier()

    def look_late(growth: growing.Growth, *_: object) -> None:
        assert eventually(lambda: announcements.look_up(growth._board) is None)
        raise Departed("the meeting is over")

    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: die())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(growing.Growth, "pass_through", look_late)
        raised(PeerLost, lambda: comm.grow(path, 2))
    return comm.shrink().size


def test_members_wait_longer_for_newcomers_than_for_each_other(fresh_pool: RankPool) -> None:
    """The group's own limit is shorter than that of growing."""
    assert fresh_pool.run(wait_longer, 3) == [3.0] * 3


def wait_longer(comm: Communicator) -> float:
    comm.timeout_s = 0.3
    seen_s, is_over = set(), threading.Event()

    def look() -> None:
        while not is_over.wait(0.001):
            seen_s.add(comm.timeout_s)

    other = threading.Thread(target=look)
    other.start()
    with pytest.raises(RendezvousError, match=r"reached rank 0|did not join within 1 s"):
        comm.grow(f"nobody-{os.getppid()}", timeout_s=1)
    is_over.set()
    other.join()
    assert seen_s == {0.3}  # what other threads do meanwhile waits no longer
    comm.timeout_s = 20.0  # the ranks learn it one after the other
    x = torch.ones(1)
    comm.all_reduce(x)
    return float(x)


@pytest.mark.ranks(2)
def test_invalid_arguments_leave_the_group_as_it_is(comm: Communicator) -> None:
    for count in (0, -1, "1", 1.5):
        with pytest.raises(ValueError, match=r"not a number of new processes"):
            comm.grow("a name", count)  # type: ignore[arg-type]
    for limit in (0, -1, "1", float("nan")):
        for call in (comm.shrink, lambda timeout_s: comm.grow("a name", timeout_s=timeout_s)):
            with pytest.raises(ValueError, match=r"not a positive number of seconds"):
                call(timeout_s=limit)  # type: ignore[operator]
    for least in (0, -1, "1", 1.5):
        with pytest.raises(ValueError, match=r"at_least=.* is not a number of ranks"):
            comm.shrink(at_least=least)  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match=r"different counts, \[1, 2\]"):
        comm.grow("a name", 1 + comm.rank)
    comm.barrier()


def test_invalid_arguments_of_a_newcomer_do_not_reach_the_members() -> None:
    with pytest.raises(ValueError, match="-1 is not a rank"):
        Communicator.join("a name", rank=np.int64(-1))  # type: ignore[arg-type]
    for bad in ({"rank": "1"}, {"rank": 1.5}, {"generation": None}, {"generation": "1"}):
        with pytest.raises(TypeError, match=r"(rank|generation) must be a whole number, not "):
            Communicator.join("a name", **bad)


def test_a_newcomer_of_a_later_generation_is_told_what_it_waited_for(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(join_too_early, 3, connected=False)
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0, "told"], outcomes


def join_too_early(rank: int, size: int, path: str) -> object:
    if rank == 2:
        join = partial(Communicator.join, path, generation=9, join_timeout_s=1)
        assert "of generation 9 or later, did not admit" in str(raised(RendezvousError, join))
        return "told"
    with connect(path, rank, 2) as comm:
        raised(RendezvousError, lambda: comm.grow(path, timeout_s=1))
        comm.all_reduce(x := torch.ones(1))
        return float(x)


@pytest.mark.ranks(2)
def test_numbers_of_newcomers(comm: Communicator) -> None:
    assert growing.places_after(3, [-1]) == [0, 1, 2, 3]
    assert growing.places_after(3, [0]) == [1, 2, 3, 0]
    assert growing.places_after(2, [-1, 1]) == [0, 2, 3, 1]
    assert growing.number_newcomers((0, 3), [0, 2, 1]) == (0, 1, 3)
    assert growing.number_newcomers(None, [0, 1]) is None


@pytest.mark.slow
def test_a_thousand_kills_at_random_moments() -> None:
    """During calls, between them, while others shrink or grow, two at once: see the benchmark."""
    ran = run_python(BENCHMARK, "--soak", "1000", timeout_s=900)
    assert "nothing stuck, no wrong number, nothing leaked" in ran.stdout, ran
