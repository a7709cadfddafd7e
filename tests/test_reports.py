"""Reports say where: the source line of every rank's call, and where a missing rank is."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time

import pytest
import torch

from ranks import RankPool, attempt
from unisono.comm.base import Communicator
from unisono.comm.native import NativeCommunicator
from unisono.comm.rendezvous import FileExchange
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupClosed,
)


def line_of(function: object, text: str) -> str:
    """Where in a function of this file the line with this text is, as a report writes it."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    offset = next(index for index, line in enumerate(lines) if text in line)
    return f"test_reports.py:{first + offset} in {function.__name__}"  # type: ignore[attr-defined]


def test_a_mismatch_shows_each_rank_s_line(pool: RankPool) -> None:
    for text, sites, culprits in pool.run(call_from_three_lines, 3):
        expected = [
            line_of(call_from_three_lines, "# blocking"),
            line_of(call_from_three_lines, "# another size"),
            line_of(call_from_three_lines, "# async"),
        ]
        assert [site.rpartition("/")[2] for site in sites] == expected
        assert all(place in text for place in expected)
        assert culprits == (1,)


def call_from_three_lines(comm: Communicator) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    try:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4))  # blocking
        elif comm.rank == 1:
            comm.all_reduce(torch.ones(5))  # another size
        else:
            work = comm.all_reduce(torch.ones(4), async_op=True)  # async
            assert work is not None
            work.wait()
    except CollectiveMismatch as error:
        return str(error), tuple(map(str, error.sites)), error.culprits
    raise AssertionError("nobody noticed")


def test_a_work_that_nobody_waits_for_tells_its_line_too(pool: RankPool) -> None:
    place = line_of(submit_and_compute, "# submitted")
    assert place in pool.run(submit_and_compute, 2)[1]


def submit_and_compute(comm: Communicator) -> str:
    if comm.rank == 0:
        work = comm.barrier(async_op=True)  # submitted
        time.sleep(1.0)  # computes while the other rank finds the fault
        return str(attempt(work.wait)) if work is not None else ""
    return str(attempt(comm.all_reduce, torch.ones(1)))


def test_a_refused_argument_shows_its_line(pool: RankPool) -> None:
    report = pool.run(refuse_on_one, 3)[0]
    assert line_of(refuse_on_one, "# no such root") in report
    assert "refused" in report


def refuse_on_one(comm: Communicator) -> str:
    if comm.rank == 1:
        with pytest.raises(ValueError, match="root 9"):
            comm.broadcast(torch.ones(3), root=9)  # no such root
        return ""
    return str(attempt(comm.broadcast, torch.ones(3)))


def test_a_timeout_says_where_the_missing_are(fresh_pool: RankPool) -> None:
    results = fresh_pool.run(miss_a_call, 3)
    text, arrived, missing = results[0]
    assert (arrived, missing) == ((0,), (1, 2))
    assert line_of(dawdle, "# here it stays") in text
    assert "rank 2" in text
    assert "is stopped and did not answer" in text


def miss_a_call(comm: Communicator) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    comm.timeout_s = 1.5
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(comm.size)]
    comm.all_gather(pids, torch.tensor([os.getpid()]))
    if comm.rank == 1:
        dawdle(2.5)
        os.kill(int(pids[2]), signal.SIGCONT)
        return None
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    error = attempt(comm.all_reduce, torch.ones(4))
    assert isinstance(error, CollectiveTimeout), error
    return str(error), error.arrived, error.missing


def dawdle(seconds: float) -> None:
    time.sleep(seconds)  # here it stays


def test_a_message_in_vain_says_where_the_peer_is(pool: RankPool) -> None:
    assert line_of(dawdle, "# here it stays") in pool.run(never_send, 2)[0]


def never_send(comm: Communicator) -> str:
    comm.timeout_s = 1.0
    if comm.rank == 1:
        dawdle(2.0)
        return ""
    return str(attempt(comm.recv, torch.ones(2), 1))


def test_a_deadlock_shows_the_lines(pool: RankPool) -> None:
    for text in pool.run(send_in_a_circle, 3):
        assert text.count(line_of(send_in_a_circle, "# everybody sends")) == 3


def send_in_a_circle(comm: Communicator) -> str:
    try:
        comm.send(torch.ones(2), (comm.rank + 1) % comm.size)  # everybody sends
    except DeadlockError as error:
        return str(error)
    return "no deadlock"


@pytest.mark.parametrize("ranks", [2, 3])
def test_abort_ends_every_wait_and_says_why(pool: RankPool, ranks: int) -> None:
    for text, errored, later, peer in pool.run(abort_from_a_thread, ranks):
        assert "rank 1 ended group world at call #1: the loss is not a number" in text
        assert errored == later == text
        assert peer == 1


def abort_from_a_thread(comm: Communicator) -> tuple[str, str, str, int]:
    assert comm.errored is None
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.1, comm.abort, ["the loss is not a number"]).start()
    error = attempt(comm.recv, torch.ones(1), (comm.rank + 1) % comm.size)
    assert isinstance(error, GroupAborted), error
    return str(error), str(comm.errored), str(attempt(comm.barrier)), error.peer


def test_a_group_of_one_can_be_aborted_too(pool: RankPool) -> None:
    assert pool.run(abort_alone, 1, make="solo") == ["rank 0 ended group world: enough"]


def abort_alone(comm: Communicator) -> str:
    assert comm.errored is None
    comm.abort("enough")
    error = attempt(comm.barrier)
    assert isinstance(error, GroupAborted)
    assert str(comm.errored) == str(error)
    comm.close()
    assert isinstance(attempt(comm.barrier), GroupClosed)
    return str(error)


def test_a_closed_group_says_so(pool: RankPool) -> None:
    pool.run(close_and_ask, 2)


def close_and_ask(comm: Communicator) -> None:
    comm.barrier()
    comm.close()
    assert isinstance(comm.errored, GroupClosed)


def test_all_sites_are_kept_on_request(fresh_pool: RankPool) -> None:
    """With UNISONO_SITES=1 a peer that is stuck in a blocking call has told its line before."""
    fresh_pool.run(keep_all_sites, 2, make="alone")


def keep_all_sites(rank: int, size: int, path: str) -> None:
    from unisono.comm.records import read_process

    os.environ["UNISONO_SITES"] = "1"
    with NativeCommunicator.connect(FileExchange(path), rank, size) as comm:
        comm.all_reduce(torch.ones(2))  # kept
        comm.barrier()
        (group,) = read_process(os.getpid())
        for one in group.ranks:
            site = one.records[0].site
            assert site is not None
            assert site.endswith(line_of(keep_all_sites, "# kept"))
        comm.barrier()
