"""A rank that reaches a call and stops in the middle of it is named, and so is the line."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy
import pytest

from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import RankRecords
from unisono.errors import CollectiveTimeout
from unisono.processes import state_of

STOPPED = 1


@contextlib.contextmanager
def stopping(comm: Communicator, until: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Rank 0 stops another rank as soon as it has moved enough data, and continues it later: as
    soon as `until`, or at the end."""
    if comm.rank != 0:
        yield
        return

    def members() -> Sequence[RankRecords]:
        return next(
            known for known in read_process(os.getpid(), 1) if known.name == comm.name
        ).ranks

    def stop_when_it_moves() -> None:
        pid = members()[STOPPED].pid
        while not over.is_set():
            if members()[STOPPED].progress > 200:
                os.kill(pid, signal.SIGSTOP)
                if holds_up_the_others():
                    break
                os.kill(pid, signal.SIGCONT)
        while not over.is_set() and not until():
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)

    def holds_up_the_others() -> bool:
        """Whether all others sleep in the call in which it was stopped, and have not gone on."""
        before: list[tuple[str, int, str, int]] = []
        while not over.is_set():
            now = [
                (state_of(rank.pid).letter, last.number, last.state, rank.progress)
                for rank in members()
                for last in rank.records[-1:]
            ]
            letters, calls, states, _ = zip(*now, strict=True)
            is_stopped, others_sleep = letters[STOPPED] == "T", letters.count("S") == 2
            if max(calls) > calls[STOPPED] or (is_stopped and states[STOPPED] != "moving"):
                return False
            if is_stopped and others_sleep and now == before:
                return set(states) == {"moving"}
            before = now
            time.sleep(0.01)
        return False

    over = threading.Event()
    thread = threading.Thread(target=stop_when_it_moves)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def all_reduce_until(comm: Communicator, enough: Callable[[], bool]) -> CollectiveTimeout | None:
    """Stop when all ranks have seen enough; returns the error if one call does not end."""
    data = numpy.ones(1 << 20, numpy.float32)
    while data[0] < comm.size:
        data[:] = enough()
        try:
            comm.all_reduce(data)
        except CollectiveTimeout as error:
            return error
    return None


CALL_LINE = all_reduce_until.__code__.co_firstlineno + 6


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_the_exception_names_the_rank_that_stopped_moving(comm: Communicator) -> None:
    comm.barrier()
    watch.start(hang_s=60)
    comm.timeout_s = 2.0
    with stopping(comm):
        error = all_reduce_until(comm, lambda: False)
    assert error is not None
    assert error.stalled == (STOPPED,)
    assert error.missing == ()
    first, second = str(error).splitlines()[:2]
    assert first.endswith(f"although all ranks arrived: rank {STOPPED} stopped moving data")
    assert f"rank {STOPPED} (pid " in second
    if comm.rank != 2:  # by the time that one checks, it may already have been continued
        state = "is this one" if comm.rank == STOPPED else "is stopped and did not answer"
        assert f") {state}; the call is at " in second
    assert second.endswith(f"{Path(__file__).name}:{CALL_LINE} in all_reduce_until")
    if comm.rank != STOPPED:
        assert error.report.culprits == (STOPPED,)


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_the_watch_names_it_too(comm: Communicator, shared_tmp_path: Path) -> None:
    notes = {rank: shared_tmp_path / f"seen-by-{rank}" for rank in (0, 2)}

    def note_the_report() -> None:
        while not any(report.culprits == (STOPPED,) for report in watch.reports()):
            time.sleep(0.01)
        notes[comm.rank].touch()

    def is_noted() -> bool:
        return all(note.exists() for note in notes.values())

    comm.barrier()
    watch.start(hang_s=0.5)
    if comm.rank != STOPPED:
        threading.Thread(target=note_the_report, daemon=True).start()
    with stopping(comm, until=is_noted):
        assert all_reduce_until(comm, is_noted) is None
    if comm.rank != STOPPED:
        seen = next(report for report in watch.reports() if report.culprits == (STOPPED,))
        assert seen.kind == "stalled"
        assert seen.site.endswith(f"{Path(__file__).name}:{CALL_LINE}")
        assert seen.verdict.endswith("and stopped moving data: it is stopped")
