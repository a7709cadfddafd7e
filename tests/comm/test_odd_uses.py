"""Unplanned uses that do occur: aliases, signals, forks and threads in odd places."""

from __future__ import annotations

import os
import signal
import threading
import time
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ranks import RankPool, attempt, in_a_fork, raised, signalled_while_waiting, subgroup
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.reductions import PremulSum
from unisono.errors import CollectiveMismatch, GroupAborted, PeerLost, RendezvousError
from user_programs import eventually


@pytest.mark.ranks([2, 3])
def test_one_tensor_on_both_sides_is_refused_where_the_sides_differ(comm: Communicator) -> None:
    for call in (comm.all_gather, comm.reduce_scatter):
        tensor = torch.arange(6.0)
        assert isinstance(attempt(call, tensor, tensor), (TypeError, ValueError))
        assert torch.equal(tensor, torch.arange(6.0))
    tensor = torch.arange(6.0)
    output = tensor if comm.rank == 0 else None
    error = attempt(comm.gather, output, tensor)
    assert error is not None
    assert torch.equal(tensor, torch.arange(6.0))


@pytest.mark.ranks(2)
def test_the_tensors_of_a_coalesced_call_fit_pair_by_pair(comm: Communicator) -> None:
    wide = [torch.zeros(4), torch.zeros(8)]
    narrow = [torch.ones(4), torch.ones(2)]  # together they match, one by one they do not
    assert isinstance(attempt(comm.all_gather, wide, narrow), ValueError)
    assert isinstance(attempt(comm.reduce_scatter, narrow, wide), ValueError)
    assert all(tensor.eq(0).all() for tensor in wide)
    comm.barrier()


class Made(list[Any]):
    """A list whose items live only while they are referenced."""

    def __getitem__(self, index: Any) -> Any:
        return torch.full((3000,), 7.0)


@pytest.mark.ranks([1, 2, 3])
def test_a_list_whose_tensors_share_memory_is_not_reduced(comm: Communicator) -> None:
    """Each would be reduced into the other: wrong numbers, which differ from rank to rank."""
    row, square = torch.full((6,), 1.0 + comm.rank), torch.ones(3, 3)
    overlapping = [[row, row], [square, row, square]]
    overlapping += [[row[2:], row[:4]], [square, square[:, 1]], [square[:, 0], square[0]]]
    for tensors in overlapping:
        for async_op in (False, True):
            with pytest.raises(ValueError, match="share memory"):
                comm.all_reduce(tensors, async_op=async_op)
    assert row.tolist() == [1.0 + comm.rank] * 6
    many = [torch.full((2,), float(number)) for number in range(50)]
    comm.all_reduce([square[:, 0], square[:, 2], row[3:], row[:3], row[:0], row[:0], *many[::-1]])
    total = comm.size * (comm.size + 1) / 2
    assert row.tolist() == [total] * 6
    assert square.tolist() == [[comm.size, 1.0, comm.size]] * 3
    assert [tensor.tolist() for tensor in many] == [[comm.size * n] * 2 for n in range(50)]


@pytest.mark.ranks(2)
def test_items_that_a_list_makes_on_demand_stay_alive(comm: Communicator) -> None:
    for _ in range(20):
        outputs = [torch.zeros(3000) for _ in range(comm.size)]
        comm.all_to_all(outputs, Made([0] * comm.size))
        assert all(output.eq(7).all() for output in outputs)


class Broken:
    """An object that cannot even be inspected."""

    @property
    def device(self) -> Any:
        raise RuntimeError("broken")


@pytest.mark.ranks(2)
def test_peers_learn_of_every_argument_that_breaks(comm: Communicator) -> None:
    nested: list[Any] = []
    nested.append(nested)
    x = torch.ones(2)
    calls: list[tuple[Any, ...]] = [
        (comm.all_reduce, nested),
        (comm.all_reduce, Broken()),
        (comm.all_reduce, numpy.ndarray),
        (comm.all_reduce, numpy.ones(2, numpy.clongdouble)),
        (comm.all_reduce, x, PremulSum(10**400)),
        (comm.all_reduce, x, PremulSum(torch.ones((), device="meta"))),  # type: ignore[arg-type]
        (comm.broadcast, x, 2**32),
        (comm.broadcast, x, -(2**63)),
        (partial(comm.broadcast, src=torch.arange(2)), x, 0),
        (partial(comm.all_reduce, algorithm=torch.ones(2)), x),
        (partial(comm.barrier, timeout_s="soon"),),
        (partial(comm.barrier, timeout_s=float("nan")),),
    ]
    for number, call in enumerate(calls):
        raised((ValueError, TypeError, RuntimeError), *call)  # on all ranks; the group stays usable
        comm.barrier()
        with subgroup(comm, [0, 1], label=str(number)) as pair:
            function, *arguments = call
            if comm.rank == 0:
                keywords = getattr(function, "keywords", {})
                name = getattr(function, "func", function).__name__
                method = partial(getattr(pair, name), **keywords)
                raised((ValueError, TypeError, RuntimeError), method, *arguments)
            else:
                raised(CollectiveMismatch, pair.all_reduce, x)
            comm.barrier()


@pytest.mark.ranks(2)
def test_reductions_have_many_spellings(comm: Communicator) -> None:
    spelled = "".join(["m", "e", "a", "n"])
    for op, wanted in ((spelled, 1.5), ("prod", 2.0), (torch.distributed.ReduceOp.MAX, 2.0)):
        x = torch.full((2,), 1.0 + comm.rank)
        comm.all_reduce(x, op)  # type: ignore[arg-type]
        assert x.tolist() == [wanted] * 2
    with subgroup(comm, [0, 1]) as pair:
        error = raised(CollectiveMismatch, pair.all_reduce, torch.ones(2 + comm.rank), spelled)
        assert "avg" in str(error)
        comm.barrier()


class Rank(IntEnum):
    FIRST = 0


@pytest.mark.ranks([1, 2])
def test_a_root_may_be_of_an_enumeration(comm: Communicator) -> None:
    for root in (Rank.FIRST, False):
        x = torch.full((2,), float(comm.rank))
        comm.broadcast(x, root)
        assert not x.any()


@pytest.mark.ranks(2)
def test_a_message_that_the_engine_cannot_read_is_refused(comm: Communicator) -> None:
    for tensor in (torch.ones((1,) * 64 + (2,)), numpy.ones(2, numpy.clongdouble)):
        for call in (comm.send, comm.isend, comm.irecv, comm.recv):
            raised((ValueError, TypeError), call, tensor, comm.next)


@pytest.mark.ranks([1, 2])
def test_decisions_have_numbers(comm: Communicator) -> None:
    for serial, value in ((0, 1), (2**32, 1), (1, -1), (1, 2**32)):
        raised(ValueError, comm.decide, serial, value)


def test_ctrl_c_on_every_rank_at_once(fresh_pool: RankPool) -> None:
    for _ in range(5):
        fresh_pool.run(all_are_interrupted, 3, connected=False)


def all_are_interrupted(rank: int, size: int, path: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = connect_on_host(FileBoard(path), rank, size)
    # none can finish: each waits in a group for a rank that is elsewhere
    pairs = [comm.split([0, 1]), comm.split([1, 2]), comm.split([2, 0])]
    mine = pairs[rank]
    assert mine is not None
    comm.barrier()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    raised((KeyboardInterrupt, GroupAborted), mine.barrier)
    attempt(time.sleep, 0.4)  # an interrupt may still be pending
    for pair in pairs:
        if pair is not None:
            pair.close()


@pytest.mark.ranks(2)
def test_a_call_from_a_signal_handler_does_not_wait_for_itself(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    said: list[BaseException | None] = []

    def call(*_: object) -> None:
        said.append(attempt(comm.barrier))
        (shared_tmp_path / "said").touch()

    if comm.rank == 0:
        with signalled_while_waiting(signal.SIGUSR1, call):
            comm.barrier()
    else:
        assert eventually((shared_tmp_path / "said").exists)
        comm.barrier()
    if comm.rank == 0:
        assert len(said) == 1
        assert isinstance(said[0], RuntimeError)
        assert "already" in str(said[0])


@pytest.mark.ranks(2)
def test_a_work_is_not_waited_for_in_a_forked_child(comm: Communicator) -> None:
    tensor = torch.ones(10)
    if comm.rank == 0:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        assert in_a_fork(work.wait) == "GroupClosed"
        comm.broadcast(torch.ones(1), 0, async_op=True)
        work.wait()
    else:
        time.sleep(0.4)
        comm.all_reduce(tensor)
        comm.broadcast(torch.ones(1), 0)
    assert tensor.eq(2).all()
    comm.barrier()  # no rank leaves while the broadcast is in progress


def test_children_forked_around_a_death_can_make_groups(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(fork_around_a_death, 2, connected=False)
    assert outcomes[0].value == "done"


def fork_around_a_death(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(15):
        said = in_a_fork(lambda step=step: alone_in_a_new_world(f"{path}-{step}"))  # type: ignore[misc]
        assert said == "True", said
    comm.close()
    return "done"


def alone_in_a_new_world(path: str) -> bool:
    error = attempt(connect_on_host, FileBoard(path, deadline=Deadline(0.05)), 0, 2)
    return isinstance(error, RendezvousError)


@pytest.mark.ranks(3)
def test_threads_may_split_one_world_at_the_same_time(comm: Communicator) -> None:
    members = [[0, 1, 2], [0, 2, 1], [1, 0, 2]]
    made: dict[int, float] = {}

    def split(which: int) -> None:
        for _ in range(5):
            group = subgroup(comm, members[which])
            tensor = torch.ones(4)
            group.all_reduce(tensor)
            made[which] = made.get(which, 0.0) + float(tensor[0])
            group.close()

    threads = [threading.Thread(target=split, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert made == {0: 15.0, 1: 15.0, 2: 15.0}


def test_a_leader_that_died_is_not_waited_for(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(the_leader_dies, 2, connected=False)
    assert outcomes[1].value < 2.0


def the_leader_dies(rank: int, size: int, path: str) -> float:
    comm = connect_on_host(FileBoard(path), rank, size, timeout_s=20)
    comm.barrier()
    if rank == 0:
        if os.fork() == 0:  # a child that lives on must not keep the socket open
            time.sleep(3)
            os._exit(0)
        Path(f"{path}-dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path(f"{path}-dead").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    start = time.monotonic()
    assert raised(PeerLost, comm.split, [0, 1]).peer == 0
    return time.monotonic() - start
