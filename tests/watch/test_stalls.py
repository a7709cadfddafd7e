"""A rank that reaches a call and stops in the middle of it is named, and so is the line."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.record_reader import read_process
from unisono.errors import CollectiveTimeout
from unisono.processes import state_of

STOPPED = 1


@contextlib.contextmanager
def stopping(comm: Communicator) -> Iterator[None]:
    """Rank 0 stops another rank as soon as it has moved enough data, and continues it later."""
    if comm.rank != 0:
        yield
        return

    def stop_when_it_moves() -> None:
        while not over.is_set():
            group = next(known for known in read_process(os.getpid(), 1) if known.name == comm.name)
            if group.ranks[STOPPED].progress > 200:
                os.kill(group.ranks[STOPPED].pid, signal.SIGSTOP)
                if is_in_a_call():
                    return
                os.kill(group.ranks[STOPPED].pid, signal.SIGCONT)

    def is_in_a_call() -> bool:
        """Whether it was stopped during a call, and not between two."""
        group = next(known for known in read_process(os.getpid(), 1) if known.name == comm.name)
        pid = group.ranks[STOPPED].pid
        return state_of(pid).is_stopped and group.ranks[STOPPED].records[-1].state == "moving"

    over = threading.Event()
    group = next(known for known in read_process(os.getpid(), 1) if known.name == comm.name)
    thread = threading.Thread(target=stop_when_it_moves)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(group.ranks[STOPPED].pid, signal.SIGCONT)


def all_reduce_until_it_fails(comm: Communicator) -> CollectiveTimeout:
    data = numpy.ones(4 << 20, numpy.float32)
    while True:
        try:
            comm.all_reduce(data)
        except CollectiveTimeout as error:
            return error


CALL_LINE = all_reduce_until_it_fails.__code__.co_firstlineno + 4


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_the_exception_names_the_rank_that_stopped_moving(comm: Communicator) -> None:
    comm.barrier()
    comm.timeout_s = 1.5
    with stopping(comm):
        error = all_reduce_until_it_fails(comm)
    assert error.stalled == (STOPPED,)
    assert error.missing == ()
    first, second = str(error).splitlines()[:2]
    assert first.endswith(f"although all ranks arrived: rank {STOPPED} stopped moving data")
    assert f"rank {STOPPED} (pid " in second
    if comm.rank != 2:  # by the time that one checks, it may already have been continued
        state = "is this one" if comm.rank == STOPPED else "is stopped and did not answer"
        assert f") {state}; the call is at " in second
    assert second.endswith(f"{Path(__file__).name}:{CALL_LINE} in all_reduce_until_it_fails")


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_the_watch_names_it_too(comm: Communicator) -> None:
    comm.barrier()
    watch.start(hang_s=0.5)
    comm.timeout_s = 3.0
    with stopping(comm):
        error = all_reduce_until_it_fails(comm)
    if comm.rank != STOPPED:
        # Before, a busy machine may have delayed a rank for half a second.
        seen = next(report for report in watch.reports() if report.kind == "stalled")
        assert seen.culprits == (STOPPED,)
        assert seen.site.endswith(f"{Path(__file__).name}:{CALL_LINE}")
        assert seen.verdict.endswith("and stopped moving data: it is stopped")
        assert error.report.culprits == (STOPPED,)
