"""Works: the same results as blocking calls, in any order of waits, and errors at wait."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from ranks import RankPool, attempt, raised, signalled_while_waiting, subgroup
from resources import held_resources
from unisono.comm.communicator import Communicator
from unisono.comm.engine import end_abandoned_groups
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.reductions import PremulSum
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.work import Work
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    PeerLost,
)
from user_programs import eventually

SIZES = [1, 2, 3, 4, 8]


def begun(work: Work | None) -> Work:
    assert work is not None
    return work


@pytest.mark.ranks(SIZES)
def test_every_collective_gives_what_its_blocking_form_gives(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    root = size - 1
    at_root = rank == root
    for count in (0, 1, 7, 1000, 70_000):
        mine = torch.arange(count, dtype=torch.float32) + rank
        wide = torch.arange(count * size, dtype=torch.float32) * (rank + 1)
        for name, arguments in {
            "all_reduce": lambda out, m=mine: (out.copy_(m), "max"),
            "reduce": lambda out, m=mine: (out.copy_(m), root),
            "broadcast": lambda out, m=mine: (out.copy_(m), root),
            "reduce_scatter": lambda out, w=wide: (out, w, PremulSum(2.0)),
            "scatter": lambda out, w=wide: (out, w if at_root else None, root),
        }.items():
            outputs = [torch.full((count,), -1.0) for _ in range(2)]
            getattr(comm, name)(*arguments(outputs[0]))
            begun(getattr(comm, name)(*arguments(outputs[1]), async_op=True)).wait()
            assert torch.equal(*outputs), f"{name} of {count}"
        for name, arguments in {
            "all_gather": lambda out, m=mine: (out, m),
            "gather": lambda out, m=mine: (out if at_root else None, m, root),
            "all_to_all": lambda out, w=wide: (out, w),
        }.items():
            outputs = [torch.full((count * size,), -1.0) for _ in range(2)]
            getattr(comm, name)(*arguments(outputs[0]))
            begun(getattr(comm, name)(*arguments(outputs[1]), async_op=True)).wait()
            assert torch.equal(*outputs), f"{name} of {count}"
    begun(comm.barrier(async_op=True)).wait()


@pytest.mark.ranks(SIZES[1:])
def test_works_may_be_waited_for_in_any_order_or_not_at_all(comm: Communicator) -> None:
    random = np.random.default_rng(7 + comm.rank)  # every rank waits in its own order
    for _ in range(5):
        tensors = [torch.full((step * 997,), comm.rank + 1.0) for step in range(40)]
        works = [begun(comm.all_reduce(tensor, async_op=True)) for tensor in tensors]
        for index in random.permutation(40)[:25]:
            works[index].wait()
            assert works[index].is_completed()
            assert works[index].exception() is None
        del works  # the rest is dropped, and still finishes
        comm.barrier()
        expected = comm.size * (comm.size + 1) / 2
        assert all(tensor.eq(expected).all() for tensor in tensors)


@pytest.mark.ranks(3)
def test_a_blocking_call_does_not_overtake(comm: Communicator) -> None:
    for step in range(50):
        tensor = torch.full((20_000,), float(comm.rank))
        comm.broadcast(tensor, step % comm.size, async_op=True)
        comm.all_reduce(tensor)
        assert tensor.eq(step % comm.size * comm.size).all()


@pytest.mark.ranks(4)
def test_works_of_two_groups_interleave(comm: Communicator) -> None:
    other = subgroup(comm, [3, 1, 0, 2])
    for step in range(30):
        a, b = torch.full((3000,), comm.rank + 1.0), torch.full((3000,), other.rank + 1.0)
        works = [
            begun(comm.all_reduce(a, async_op=True)),
            begun(other.all_reduce(b, async_op=True)),
        ]
        for work in works if step % 2 else reversed(works):
            work.wait()
        assert a.eq(10).all()
        assert b.eq(10).all()
    other.close()


@pytest.mark.ranks(2)
def test_a_work_may_be_waited_for_in_another_thread(comm: Communicator) -> None:
    tensors = [torch.ones(50_000) for _ in range(8)]
    works = [begun(comm.all_reduce(tensor, async_op=True)) for tensor in tensors]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda work: work.wait(20), works))
    assert all(tensor.eq(2).all() for tensor in tensors)


@pytest.mark.ranks(2)
def test_a_group_may_be_closed_as_soon_as_one_of_two_waiting_threads_goes_on(
    comm: Communicator,
) -> None:
    """The other thread is still returning from the engine: the peer's send has succeeded."""
    with ThreadPoolExecutor(1) as other:
        for _ in range(100):
            group = subgroup(comm, [0, 1])
            if comm.rank == 0:
                work = group.irecv(torch.ones(3), 1)
                waiting = other.submit(work.wait)
                work.wait()
                group.close()
                waiting.result()
            else:
                time.sleep(0.01)  # until both sleep
                group.send(torch.ones(3), 0)
                group.close()


@pytest.mark.ranks(2)
def test_a_work_keeps_its_tensors_alive_and_lets_them_go(comm: Communicator) -> None:
    if comm.rank == 0:
        time.sleep(0.2)
    tensor = torch.ones(100_000)
    gone = weakref.ref(tensor)
    work = begun(comm.all_reduce(tensor, async_op=True))
    del tensor
    gc.collect()
    if comm.rank == 1:
        assert gone() is not None
    work.wait()
    del work
    comm.barrier()
    gc.collect()
    assert gone() is None


@pytest.mark.ranks(2)
def test_works_that_nobody_waits_for_do_not_keep_their_group(comm: Communicator) -> None:
    """Whether they finish before the group is dropped, fail, or finish only later."""
    group = subgroup(comm, [0, 1])
    work = group.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    assert eventually(work.is_completed)
    del work, group
    assert eventually(lambda: names_after_a_check() == [comm.name])

    group = subgroup(comm, [0, 1])
    work = group.irecv(torch.ones(3), 1 - comm.rank)
    comm.barrier()
    group.abort("enough")
    assert eventually(work.is_completed)
    del work, group
    assert eventually(lambda: names_after_a_check() == [comm.name])

    group = subgroup(comm, [0, 1])
    if comm.rank == 0:
        result = torch.ones(3)
        group.all_reduce(result, async_op=True)
        del group
        assert len(names_of_groups()) == 2
        comm.barrier()
        assert eventually(lambda: result.tolist() == [2.0] * 3)
    else:
        comm.barrier()
        group.all_reduce(torch.ones(3))
        del group
    is_gone = torch.zeros(1)
    while not is_gone:  # creating the next group releases the last one
        subgroup(comm, [0, 1])
        is_gone[0] = names_of_groups() == [comm.name]
        comm.all_reduce(is_gone, "min")


def names_after_a_check() -> list[str]:
    """The group's thread may still have had a work when the group was dropped."""
    end_abandoned_groups()
    return names_of_groups()


def names_of_groups() -> list[str]:
    return [group.name for group in read_process(os.getpid())]


@pytest.mark.ranks(3)
def test_strided_and_coalesced_works(comm: Communicator) -> None:
    base = torch.zeros(2000)
    base[::2] = comm.rank + 1.0
    mixed = [torch.ones(5), torch.ones(3, dtype=torch.int64), torch.ones(9)]
    works = [
        begun(comm.all_reduce(base[::2], async_op=True)),
        begun(comm.all_reduce(mixed, async_op=True)),
    ]
    for work in works:
        work.wait()
    assert base[::2].eq(6).all()
    assert base[1::2].eq(0).all()
    assert all(tensor.eq(3).all() for tensor in mixed)


@pytest.mark.ranks(2)
def test_a_wait_that_is_too_short_may_be_repeated(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    tensor = torch.ones(4)
    waited = shared_tmp_path / "waited"
    if comm.rank == 0:
        work = begun(comm.all_reduce(tensor, async_op=True))
        assert isinstance(attempt(work.wait, 0.1), CollectiveTimeout)
        assert not work.is_completed()
        assert work.exception() is None
        waited.touch()
        work.wait()
    else:
        assert eventually(waited.exists)
        comm.all_reduce(tensor)
    assert tensor.eq(2).all()


@pytest.mark.ranks(3)
def test_errors_surface_at_wait(comm: Communicator) -> None:
    tensor = torch.ones(4 if comm.rank else 5)
    work = begun(comm.all_reduce(tensor, async_op=True))
    later = begun(comm.all_reduce(tensor, async_op=True))
    error = raised(CollectiveMismatch, work.wait)
    assert error.culprits == (0,)
    assert isinstance(work.exception(), CollectiveMismatch)
    assert isinstance(attempt(later.wait), CollectiveMismatch)
    assert tensor.eq(1).all()


@pytest.mark.ranks(2)
def test_arguments_that_make_no_sense_raise_at_once(comm: Communicator) -> None:
    tensor = torch.ones(70_000)
    work = begun(comm.all_reduce(tensor, async_op=True))
    assert isinstance(attempt(comm.all_reduce, None, async_op=True), TypeError)
    assert isinstance(attempt(comm.broadcast, tensor, 5, async_op=True), ValueError)
    work.wait()
    begun(comm.all_reduce(tensor, async_op=True)).wait()
    assert tensor.eq(4).all()


def test_a_group_that_closes_ends_what_is_under_way(fresh_pool: RankPool) -> None:
    fresh_pool.run(close_meanwhile, 2, connected=False)


def close_meanwhile(rank: int, size: int, path: str) -> None:
    threads = held_resources()[1]
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(4)
    if rank == 0:
        work = begun(comm.all_reduce(tensor, async_op=True))
        comm.close()
        assert isinstance(attempt(work.wait), (GroupAborted, GroupClosed))
        assert isinstance(attempt(comm.all_reduce, tensor, async_op=True), GroupClosed)
    else:
        while not Path(f"{path}-closed").exists():
            time.sleep(0.01)
        raised((GroupAborted, PeerLost), comm.all_reduce, tensor)
        comm.close()
    Path(f"{path}-closed").touch()
    assert eventually(lambda: held_resources()[1] <= threads)  # one may still be exiting
    assert tensor.eq(1).all()


class Impatient(Exception):
    """What a signal handler raises."""


def test_an_interrupt_ends_a_wait_and_the_work_goes_on(fresh_pool: RankPool) -> None:
    """Only a blocking call cannot be finished by another thread: if it is interrupted, the peers
    learn why the group has ended."""
    interrupts, _ = fresh_pool.run(interrupt_waits, 2)
    assert min(interrupts[:5]) >= 1, interrupts


def interrupt_waits(comm: Communicator) -> list[int]:
    first, second, third, fourth = (
        torch.full((n,), 1.0 + comm.rank) for n in (2, 400_000, 3, 90_000)
    )
    calls = [
        lambda: comm.all_reduce(first, async_op=True),
        lambda: comm.all_reduce(second, async_op=True),
        lambda: comm.irecv(third, 1) if comm.rank == 0 else comm.isend(third, 0),
        lambda: comm.isend(fourth, 1) if comm.rank == 0 else comm.irecv(fourth, 0),
    ]
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lose_patience)
        interrupts = [wait_with_interrupts(begun(call())) for call in calls]
        works = [begun(call()) for call in calls]  # again, and wait for the last one first
        interrupts += [wait_with_interrupts(work) for work in reversed(works)]
    else:
        for call in calls * 2:
            time.sleep(0.3)
            begun(call()).wait()
        interrupts = []
    assert first.eq(6).all()  # 1 + 2, doubled
    assert second.eq(6).all()
    assert third.eq(2).all()
    assert fourth.eq(1).all()
    comm.barrier()
    if comm.rank == 0:
        with signalled_while_waiting(signal.SIGALRM, lose_patience):
            raised(Impatient, comm.barrier)
    else:
        error = raised(GroupAborted, comm.recv, torch.ones(1), 0)
        assert "rank 0 ended group world at call #6: it was interrupted by" in str(error)
    return interrupts


def lose_patience(*_: object) -> None:
    raise Impatient


def wait_with_interrupts(work: Work) -> int:
    """Wait until it finishes, whatever interrupts it; returns how often that happened."""
    times = 0
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            work.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return times
        except Impatient:
            times += 1
