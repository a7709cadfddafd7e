"""After a death the survivors continue in a smaller group: all in the same one, or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from ranks import RankPool, attempt, connect, raised, subgroup
from resources import assert_given_back, held_resources
from unisono import GroupAborted, GroupClosed, NoQuorum, PeerLost
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone
from unisono.comm.meeting import survivors
from unisono.comm.meeting.membership import JoinRequest
from user_programs import eventually


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def about(comm: Communicator) -> tuple[str, int, tuple[int, ...] | None, float]:
    """A group's properties, and the result of its all_reduce of global ranks."""
    assert comm.global_ranks is not None
    x = torch.full((50_000,), float(comm.global_ranks[comm.rank]))
    comm.all_reduce(x)
    assert x.eq(x[0]).all()
    return comm.name, comm.rank, comm.global_ranks, float(x[0])


@pytest.mark.parametrize("dead", [[3], [0], [1, 2], [0, 3], [0, 1, 2]], ids=str)
def test_survivors_go_on(fresh_pool: RankPool, dead: list[int]) -> None:
    outcomes = fresh_pool.outcomes(lose_and_go_on, 4, dead, connected=False)
    left = tuple(rank for rank in range(4) if rank not in dead)
    for number, rank in enumerate(left):
        assert outcomes[rank].value == ("world~1", number, left, float(sum(left))), outcomes[rank]


def lose_and_go_on(rank: int, size: int, path: str, dead: list[int]) -> object:
    before = held_resources()
    with connect(path, rank, size) as comm:
        comm.timeout_s = 50.0
        about(comm)
        if rank in dead:
            die()
        raised(PeerLost, comm.barrier)
        with comm.shrink() as left:
            found = about(left)
            assert left.timeout_s == 50.0
            assert comm.shrink() is left
        error = raised(PeerLost, comm.barrier)  # the old group raises the same error as before
    assert error.peer in dead
    assert_given_back(before)
    return found


def test_group_after_group(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(lose_one_after_the_other, 5, connected=False)
    assert outcomes[2].value == ("world~4", 0, (2,), 2.0), outcomes[2].error


def lose_one_after_the_other(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    for victim in (4, 0, 3, 1):
        about(comm)
        if rank == victim:
            die()
        raised(PeerLost, comm.barrier)
        comm = comm.shrink()
    return about(comm)


# When a second rank dies: right before one of the protocol's steps, or right after it.
MOMENTS = {
    "it comes": (survivors.SegmentVote, "say"),
    "it chooses": (survivors.SegmentVote, "choose"),
    "it opens the segment": (JoinRequest, "open"),
    "it settles": (survivors.SegmentVote, "settle"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("second", [0, 2], ids=["the first", "another"])
def test_a_death_in_the_middle_of_it(
    fresh_pool: RankPool, moment: str, after: bool, second: int
) -> None:
    outcomes = fresh_pool.outcomes(die_at, 4, moment, after, second, connected=False)
    found = {rank: outcome.value for rank, outcome in enumerate(outcomes) if outcome.value}
    left = [rank for rank in range(3) if rank != second]
    assert set(found) == set(left), [outcome.error for outcome in outcomes]
    assert len({value[1:] for value in found.values()}) == 1
    for rank in left:
        assert found[rank][2] == tuple(left), found


def die_at(rank: int, size: int, path: str, moment: str, after: bool, second: int) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        die()
    raised(PeerLost, comm.barrier)
    if rank == second:
        kind, name = MOMENTS[moment]
        usual = getattr(kind, name)

        def strike(self: object, *args: object) -> object:
            if args[-1] is None:  # it only reads
                return usual(self, *args)
            if after:
                usual(self, *args)
            die()
            return None

        setattr(kind, name, strike)
    left = comm.shrink()
    if rank == second:  # others have decided
        die()
    while True:  # a death after the new group was created ends that group in turn
        error = attempt(about, left)
        if error is None:
            break
        assert isinstance(error, PeerLost), error
        left = left.shrink()
    name, number, members, total = about(left)
    assert members is not None
    assert members[number] == rank
    return name, total, members


def test_a_late_rank_is_waited_for(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(come_late, 3, connected=False)
    assert [outcome.value for outcome in outcomes[:2]] == [(0, 1)] * 2


def come_late(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 2:
        die()
    if rank == 1:
        time.sleep(1.0)  # in its own arithmetic
    raised(PeerLost, comm.barrier)
    return comm.shrink().global_ranks


def test_a_rank_that_never_comes_is_left_out(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(come_too_late, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [(0, 1), (0, 1), "told"], outcomes


def come_too_late(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        die()
    if rank == 2:
        assert eventually(lambda: all(Path(f"{path}-{other}").exists() for other in (0, 1)))
        error = raised(NoQuorum, comm.shrink)
        assert error.members == (0, 1)
        assert "ranks 0 and 1 of group world continued without this rank" in str(error)
        return "told"
    left = comm.shrink(timeout_s=1.5)  # in which both come, also on a busy machine
    Path(f"{path}-{rank}").touch()
    about(left)
    return left.global_ranks


def test_a_stopped_rank_is_left_out_and_told(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(be_stopped, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [(0, 2), "told", (0, 2)], outcomes


def be_stopped(rank: int, size: int, path: str) -> object:
    survivors.STOPPED_S = 0.5
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        die()
    if rank == 1:
        waker = os.fork()
        if waker == 0:  # once the others have a group without it
            eventually(lambda: all(Path(f"{path}-{other}").exists() for other in (0, 2)))
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(waker, 0)
        assert raised(NoQuorum, comm.shrink).members == (0, 2)
        return "told"
    left = comm.shrink()
    Path(f"{path}-{rank}").touch()
    return left.global_ranks


def test_some_close_while_others_shrink(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(close_or_shrink, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == ["closed", (1, 2), (1, 2)], outcomes


def close_or_shrink(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        die()
    raised(PeerLost, comm.barrier)
    if rank == 0:
        time.sleep(0.3)
        comm.close()
        return "closed"
    left = comm.shrink()
    about(left)
    return left.global_ranks


def test_too_few_are_left(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(want_three, 4, connected=False)
    texts = {outcome.value for outcome in outcomes[:2]}
    assert texts == {
        "group world cannot continue: only ranks 0 and 1 of 4 are left, and at_least=3 is required"
    }, outcomes


def want_three(rank: int, size: int, path: str) -> str:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank >= 2:
        die()
    raised(PeerLost, comm.barrier)
    error = raised(NoQuorum, lambda: comm.shrink(at_least=3 if rank else 1))
    assert error.members == ()
    raised(NoQuorum, comm.shrink)  # nor later
    return str(error)


def test_works_messages_and_threads_end_with_the_cause(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(leave_much_under_way, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [(0, 1, 2)] * 3, outcomes


def leave_much_under_way(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        time.sleep(0.2)
        die()
    works = [comm.all_reduce(torch.ones(200_000), async_op=True) for _ in range(3)]
    works.append(comm.irecv(torch.ones(3), 3))
    found: list[Communicator] = []

    def in_a_thread() -> None:
        raised(PeerLost, comm.recv, torch.ones(2), 3)
        found.append(comm.shrink())

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    raised(PeerLost, comm.barrier)
    left = comm.shrink()
    thread.join()
    assert found == [left]
    for work in works:
        assert work is not None
        raised(PeerLost, work.wait)
    about(left)
    return left.global_ranks


@pytest.mark.ranks(3)
def test_a_group_without_a_death_ends_for_all(comm: Communicator) -> None:
    group = subgroup(comm, [2, 0, 1])
    if comm.rank != 1:
        error = raised(GroupAborted, group.barrier)
        assert "it continues in a smaller group" in str(error)
    with group.shrink() as again:
        assert again.name == "world[2,0,1]~1"
        assert again.global_ranks == (2, 0, 1)
        about(again)


def test_subgroups_shrink_by_themselves(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(shrink_subgroups, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [2.0, 1.0, 2.0], outcomes


def shrink_subgroups(rank: int, size: int, path: str) -> float:
    comm = connect(path, rank, size)
    row = subgroup(comm, [0, 2] if rank % 2 == 0 else [1, 3], "row")
    if rank == 3:
        die()
    raised(PeerLost, comm.barrier)
    x = torch.ones(1)
    if rank == 1:
        row = row.shrink()
        assert row.size == 1
    row.all_reduce(x)  # the others' group has lost no rank
    left = comm.shrink()
    assert subgroup(left, [2, 1, 0]).name == "world~1[2,1,0]"
    return float(x)


def test_shared_tensors_stay_readable(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(read_the_dead, 3, connected=False)
    assert [outcome.value for outcome in outcomes[:2]] == [2.0, 2.0], outcomes


def read_the_dead(rank: int, size: int, path: str) -> float:
    comm = connect(path, rank, size)
    mine = comm.empty(1000)
    mine.fill_(rank)
    comm.barrier()
    if rank == 2:
        die()
    raised(PeerLost, comm.barrier)
    theirs = comm.get_peer_tensor(mine, 2)
    left = comm.shrink()
    about(left)
    del comm
    mine.fill_(7)  # nothing is unmapped while it is in use
    left.all_reduce(mine)
    assert mine.eq(14).all()
    return float(theirs.mean())


def test_an_interrupted_rank_is_not_waited_for(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(interrupt_one, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [(0, 2), "interrupted", (0, 2)], outcomes


def interrupt_one(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 3:
        die()
    raised(PeerLost, comm.barrier)
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert isinstance(attempt(comm.shrink), KeyboardInterrupt)
        Path(f"{path}-over").touch()
        return "interrupted"
    if rank == 0:
        assert eventually(Path(f"{path}-over").exists)
    return comm.shrink().global_ranks


def test_a_group_closed_by_another_thread_ends_shrink(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(close_while_shrinking, 3, connected=False)
    assert [outcome.value for outcome in outcomes] == ["closed", (1, 2), (1, 2)], outcomes


def close_while_shrinking(rank: int, size: int, path: str) -> object:
    comm = connect(path, rank, size)
    comm.barrier()
    if rank == 0:
        threading.Timer(0.3, comm.close).start()
        begin = time.monotonic()
        assert "is closed" in str(raised(GroupClosed, comm.shrink))
        assert time.monotonic() - begin < 5
        Path(f"{path}-over").touch()
        return "closed"
    if rank == 1:
        assert eventually(Path(f"{path}-over").exists)
    return comm.shrink().global_ranks


def test_a_group_of_one_that_is_closed_does_not_shrink() -> None:
    comm = alone()
    comm.close()
    with pytest.raises(GroupClosed):
        comm.shrink()


def test_whoever_drops_the_new_group_is_told_so(fresh_pool: RankPool) -> None:
    fresh_pool.run(drop_it, 2)


def drop_it(comm: Communicator) -> None:
    pair = comm.split([0, 1])
    assert pair is not None
    pair.shrink()
    error = raised(GroupClosed, pair.shrink)
    assert "which was dropped: keep what shrink() returns" in str(error)
