"""Faults of ranks that share a GPU: everybody hears of them, and nobody waits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from ranks import RankPool, attempt
from unisono.comm.rendezvous.announcements import FileAnnouncements
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.errors import CollectiveTimeout, GroupAborted, PeerLost

LARGE = 64 << 20
LONG = 40_000_000_000  # cycles of a GPU: about 20 s


@pytest.mark.parametrize("victim", [0, 2], ids=["the conductor", "another rank"])
@pytest.mark.parametrize("count", [16, LARGE], ids=["small", "large"])
def test_a_killed_rank(fresh_pool: RankPool, victim: int, count: int) -> None:
    outcomes = fresh_pool.outcomes(lose_one, 3, victim, count, connected=False)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error is None, outcomes[rank].error
        text, seconds = outcomes[rank].value
        assert f"rank {victim} " in text
        assert seconds < 2.0


def lose_one(rank: int, size: int, path: str, victim: int, count: int) -> tuple[str, float]:
    comm = SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size)
    tensor = torch.ones(count, device="cuda")
    for _ in range(3):
        comm.all_reduce(tensor, "max")
    died = Path(f"{path}-died")
    if rank == victim:
        if count == LARGE:
            torch.cuda._sleep(LONG)
            comm.all_reduce(tensor, "max", async_op=True)  # to which its GPU will not come
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(comm.all_reduce, tensor, "max")
    error = error or attempt(comm.all_reduce, tensor, "max")
    raised_s = time.monotonic() - float(died.read_text())
    assert isinstance(error, PeerLost), repr(error)
    torch.cuda.synchronize()  # nobody's stream is awaited in vain
    assert tensor.eq(1).all()
    over_s = time.monotonic() - float(died.read_text())
    comm.close()
    print(f"rank {rank}: PeerLost after {raised_s:.3f} s, the GPU was idle after {over_s:.3f} s")
    return str(error), over_s


def test_a_stopped_rank(fresh_pool: RankPool) -> None:
    pids = fresh_pool.pids(2)
    outcomes = fresh_pool.outcomes(stop_one, 2, pids[0], connected=False)
    assert outcomes[0].error is None, outcomes[0].error
    assert "rank 1" in outcomes[0].value


def stop_one(rank: int, size: int, path: str, first_pid: int) -> str:
    comm = SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size, timeout_s=20)
    tensor = torch.ones(LARGE, device="cuda")
    comm.all_reduce(tensor)
    if rank == 1:
        attempt(comm.recv, torch.empty(1), 0)  # until the other has given up
        return ""
    comm.timeout_s = 1
    error = attempt(comm.all_reduce, tensor)
    assert isinstance(error, CollectiveTimeout), repr(error)
    return str(error)


def test_out_of_memory_on_one_rank(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(run_out, 2, connected=False)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert "memory" in outcome.value


def run_out(rank: int, size: int, path: str) -> str:
    comm = SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size)
    comm.all_reduce(torch.ones(4, device="cuda"))
    tensor = torch.ones(LARGE, 2, device="cuda")[:, 0]  # its row is a copy
    if rank == 1:
        torch.cuda.set_per_process_memory_fraction(0.004)
    error = attempt(comm.all_reduce, tensor)
    kind = torch.OutOfMemoryError if rank == 1 else GroupAborted
    assert isinstance(error, kind), repr(error)
    return str(error)


def test_expandable_segments_are_staged(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(use_expandable_segments, 2, connected=False) == [3.0, 3.0]


def use_expandable_segments(rank: int, size: int, path: str) -> float:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size) as comm:
        tensor = torch.full((LARGE // 4,), float(rank + 1), device="cuda")
        comm.all_reduce(tensor)
        assert tensor.eq(3).all()
        part = torch.empty(LARGE // 8, device="cuda")
        comm.reduce_scatter(part, tensor, "max")
        return float(part[0])
