"""After every kind of fault the same processes can make a new world, and nothing has leaked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from ranks import RankPool, attempt, connect, raised, signalled_while_waiting, subgroup
from resources import assert_given_back, held_resources
from unisono import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    MessageMismatch,
    PeerLost,
)
from unisono.comm.communicator import Communicator
from user_programs import eventually


def mismatch(comm: Communicator) -> BaseException | None:
    return attempt(comm.all_reduce, torch.ones(4 + comm.rank // 2))


def timeout(comm: Communicator) -> BaseException | None:
    comm.timeout_s = 0.2
    if comm.rank == 2:
        assert eventually(lambda: comm.errored is not None)
    return attempt(comm.barrier)


def lost(comm: Communicator) -> BaseException | None:
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.irecv(torch.zeros(3), 2)
    error = attempt(comm.barrier)
    assert isinstance(attempt(work.wait), PeerLost)
    return error


def aborted(comm: Communicator) -> BaseException | None:
    if comm.rank == 2:
        comm.abort()
    return attempt(comm.barrier)


def interrupted(comm: Communicator) -> BaseException | None:
    if comm.rank != 2:
        return attempt(comm.barrier)
    with signalled_while_waiting():
        error = attempt(comm.recv, torch.ones(1), 0)
    assert isinstance(error, KeyboardInterrupt), error
    return attempt(comm.barrier)


def deadlock(comm: Communicator) -> BaseException | None:
    return attempt(comm.send, torch.ones(2), (comm.rank + 1) % comm.size)


def unfit(comm: Communicator) -> BaseException | None:
    if comm.rank == 0:
        attempt(comm.send, torch.ones(3), 1)
    elif comm.rank == 1:
        attempt(comm.recv, torch.ones(4), 0)
    return attempt(comm.recv, torch.ones(4), 0)


FAULTS: dict[str, tuple[Callable[[Communicator], BaseException | None], type]] = {
    "a mismatch": (mismatch, CollectiveMismatch),
    "a timeout": (timeout, CollectiveTimeout),
    "a death": (lost, PeerLost),
    "an abort": (aborted, GroupAborted),
    "an interrupt": (interrupted, GroupAborted),
    "a deadlock": (deadlock, DeadlockError),
    "a message that does not fit": (unfit, MessageMismatch),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_new_world_after(fresh_pool: RankPool, fault: str) -> None:
    outcomes = fresh_pool.outcomes(fail_and_start_anew, 3, fault, connected=False)
    for outcome in outcomes[: 2 if fault == "a death" else 3]:
        assert outcome.value == "as before", outcome.error


def fail_and_start_anew(rank: int, size: int, path: str, fault: str) -> str:
    before = held_resources()
    happen, expected = FAULTS[fault]
    world = connect(path, rank, size)
    work_in(world)
    error = happen(world)
    assert isinstance(error, expected), error
    world.close()
    left = size - 1 if fault == "a death" else size
    with connect(f"{path}-anew", rank, left) as world:
        work_in(world)
    assert_given_back(before)
    return "as before"


def work_in(world: Communicator) -> None:
    """Everything that a group creates on first use: a slice, a worker, a channel, a progress
    thread."""
    work = world.all_reduce(small := torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    world.all_reduce(large := torch.ones(100_000))
    assert small.eq(world.size).all()
    assert large.eq(world.size).all()
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = world.isend(torch.full((50_000,), float(world.rank)), after)
    world.irecv(got := torch.zeros(50_000), before).wait()
    sent.wait()
    assert got.eq(before).all()
    world.barrier()  # no rank fails before all have come this far


# A call that waited for its turn, because a work of its group was in progress, left its peers
# waiting.
def test_an_interrupt_while_a_call_waits_for_its_turn_ends_the_group(fresh_pool: RankPool) -> None:
    first, second = fresh_pool.run(interrupted_behind_a_work, 2, deadline_s=10)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, GroupAborted)


def interrupted_behind_a_work(comm: Communicator) -> BaseException | None:
    bystander = subgroup(comm, [0, 1])
    with bystander:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(3), async_op=True)
            time.sleep(0.1)  # the group's thread runs it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            error = attempt(comm.barrier)
        else:
            error = attempt(comm.recv, torch.ones(1), 0)
        bystander.barrier()  # neither leaves, which would tell the other
    return error


@pytest.mark.ranks(2)
def test_works_of_a_group_that_was_closed_say_so(comm: Communicator) -> None:
    group = subgroup(comm, [0, 1])
    sent = [torch.full((200_000,), float(tag)) for tag in range(5)]  # these do finish
    if comm.rank == 0:
        works = [group.irecv(torch.zeros(3), 1, 7), group.isend(torch.ones(3), 1, 8)]
        for tag, tensor in enumerate(sent):
            group.isend(tensor, 1, tag)
        group.close()
        for work in works:
            assert "is closed: rank 1 never joined what rank 0 had begun" in str(attempt(work.wait))
    else:
        got = [group.irecv(torch.zeros(200_000), 0, tag) for tag in range(5)]
        for work in got:
            work.wait()
    comm.barrier()
    if comm.rank == 1:
        error = raised(GroupAborted, group.barrier)
        assert "rank 0 ended group world[0,1]: it closed the group: rank 1 never joined" in str(
            error
        )


# A rank that is delayed is not stuck: what it has requested may still arrive.
@pytest.mark.ranks(2)
def test_a_receiver_that_is_held_up_is_no_deadlock(comm: Communicator) -> None:
    x = torch.zeros(2)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.4)  # rank 0 has waited for a long time, and is stopped
        comm.send(torch.ones(2), 0)
        return
    child = os.fork()
    if child == 0:
        time.sleep(0.25)
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    comm.recv(x, 1)
    os.waitpid(child, 0)
    assert x.eq(1).all()


@pytest.mark.ranks(2)
def test_ranks_that_another_thread_will_help_are_no_deadlock(comm: Communicator) -> None:
    def help_out() -> None:
        if comm.rank == 0:
            comm.isend(torch.ones(1), 1, tag=5).wait(timeout_s=20)
            comm.send(torch.ones(1), 1, tag=2)
        else:
            time.sleep(0.8)
            comm.recv(torch.ones(1), 0, tag=5)

    thread = threading.Thread(target=help_out)
    thread.start()
    if comm.rank == 0:
        comm.recv(torch.ones(1), 1, tag=1)
    else:
        comm.recv(torch.ones(1), 0, tag=2)
        comm.send(torch.ones(1), 0, tag=1)
    thread.join()
