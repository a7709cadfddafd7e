"""Faults of ranks that share a GPU: all ranks learn of them, and none waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ranks import RankPool, attempt
from unisono.comm.cuda.conducting import mappings_of_this_process
from unisono.comm.cuda.driver import Driver, DriverError
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.errors import CollectiveTimeout, GroupAborted, PeerLost
from user_programs import eventually

LARGE = 64 << 20
LONG = 10_000_000_000  # GPU cycles: about 5 s


TOLD_S = 0.2
"""How soon a rank must learn of another's death."""


@pytest.mark.parametrize("victim", [0, 2], ids=["the conductor", "another rank"])
@pytest.mark.parametrize("count", [16, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle GPU", "busy GPU"])
def test_a_killed_rank(
    fresh_pool: RankPool,
    record_property: Callable[[str, object], None],
    victim: int,
    count: int,
    is_busy: bool,
) -> None:
    """It dies while the others wait for it and, if it `is_busy`, with work of an earlier call still
    on its GPU. The others learn of it, and their GPU waits for nothing."""
    outcomes = fresh_pool.outcomes(lose_one, 3, victim, count, is_busy, connected=False)
    told = {}
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error is None, outcomes[rank].error
        text, told[rank], done, closed, still_mapped = outcomes[rank].value
        assert f"rank {victim} " in text
        assert still_mapped == 0
        record_property(f"rank {rank}: PeerLost after", f"{1e3 * told[rank]:.0f} ms")
        record_property("its GPU was done after", f"{1e3 * done:.0f} ms")
        record_property("the group was closed after", f"{1e3 * closed:.0f} ms")
        assert done < 2.0
    assert max(told.values()) < TOLD_S, told


def lose_one(
    rank: int, size: int, path: str, victim: int, count: int, is_busy: bool
) -> tuple[str, float, float, float, int]:
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(count, device="cuda")
    for _ in range(3):
        comm.all_reduce(tensor, "max")
    torch.cuda.synchronize()
    comm.barrier()
    died, waiting = Path(f"{path}-died"), Path(f"{path}-waiting-{rank}")
    if rank == victim:
        if is_busy:  # followed by a call that its GPU will never reach
            torch.cuda._sleep(LONG)
            if count == LARGE:
                comm.all_reduce(tensor, "max", async_op=True)
        others = [Path(f"{path}-waiting-{other}") for other in range(size) if other != victim]
        assert eventually(lambda: all(other.exists() for other in others))
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if is_busy and count == LARGE:
        comm.all_reduce(tensor, "max")  # returns once all have called
    waiting.touch()
    error = attempt(comm.all_reduce, tensor, "max")
    told = time.monotonic()
    assert isinstance(error, PeerLost), repr(error)
    torch.cuda.synchronize()  # work that will never happen is not waited for
    done = time.monotonic()
    comm.close()
    closed = time.monotonic()
    still_mapped = len(mappings_of_this_process())
    torch.ones(4, device="cuda").sum().item()  # the GPU still works
    died_at = float(died.read_text())
    return str(error), told - died_at, done - died_at, closed - died_at, still_mapped


@pytest.mark.parametrize("count", [16, LARGE], ids=["small", "large"])
def test_a_death_is_heard_by_a_rank_whose_own_gpu_is_busy(fresh_pool: RankPool, count: int) -> None:
    """A small call waits until the GPU has done what the program queued before it: for seconds,
    here. A death ends that wait."""
    outcomes = fresh_pool.outcomes(lose_one_beside_work, 2, count, connected=False)
    assert outcomes[0].error is None, outcomes[0].error
    text, told_s = outcomes[0].value
    assert "rank 1 " in text
    assert told_s < TOLD_S, told_s


def lose_one_beside_work(rank: int, size: int, path: str, count: int) -> tuple[str, float]:
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(count, device="cuda")
    comm.all_reduce(tensor, "max")
    torch.cuda.synchronize()
    comm.barrier()
    died, waiting = Path(f"{path}-died"), Path(f"{path}-waiting")
    if rank == 1:
        assert eventually(waiting.exists)
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda._sleep(LONG)
    waiting.touch()
    error = attempt(comm.all_reduce, tensor, "max")
    told = time.monotonic()
    assert isinstance(error, PeerLost), repr(error)
    comm.close()
    return str(error), told - float(died.read_text())


def test_survivors_give_the_memory_of_the_dead_back(fresh_pool: RankPool) -> None:
    """The conductor has mapped it: the dead rank's memory is free once the group is closed."""
    outcomes = fresh_pool.outcomes(lose_memory, 2, connected=False)
    assert outcomes[0].error is None, outcomes[0].error
    before, dead, closed = outcomes[0].value
    assert closed - before > 1 << 30, (before, dead, closed)


def lose_memory(rank: int, size: int, path: str) -> tuple[int, int, int]:
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(512 << 20, device="cuda")  # 2 GiB
    comm.all_reduce(tensor, "max")
    torch.cuda.synchronize()
    comm.barrier()
    before, _ = torch.cuda.mem_get_info()
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(comm.all_reduce, tensor, "max")
    assert isinstance(error, PeerLost), repr(error)
    dead, _ = torch.cuda.mem_get_info()
    del error
    comm.close()
    eventually(lambda: torch.cuda.mem_get_info()[0] - before > 1 << 30)
    return before, dead, torch.cuda.mem_get_info()[0]


def test_a_stopped_rank(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(stop_one, 2, connected=False)
    assert outcomes[0].error is None, outcomes[0].error
    assert "rank 1" in outcomes[0].value


def stop_one(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size, timeout_s=20)
    tensor = torch.ones(LARGE, device="cuda")
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    pid = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        pid.fill_(os.getpid())
        comm.send(pid, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    comm.recv(pid, 1)
    comm.timeout_s = 1
    error = attempt(comm.all_reduce, tensor)
    os.kill(int(pid.item()), signal.SIGCONT)
    assert isinstance(error, CollectiveTimeout), repr(error)
    assert error.missing == (1,)
    torch.cuda.synchronize()
    return str(error)


def test_out_of_memory_on_one_rank(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(run_out, 2, connected=False)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert "memory" in outcome.value


def run_out(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size)
    comm.all_reduce(torch.ones(4, device="cuda"))
    tensor = torch.ones(LARGE, 2, device="cuda")[:, 0]  # its row is a copy
    if rank == 1:
        torch.cuda.set_per_process_memory_fraction(0.004)
    error = attempt(comm.all_reduce, tensor)
    kind = torch.OutOfMemoryError if rank == 1 else GroupAborted
    assert isinstance(error, kind), repr(error)
    return str(error)


@pytest.mark.parametrize("refuses", [False, True], ids=["expandable segments", "nothing is shared"])
def test_memory_that_cuda_ipc_does_not_take(fresh_pool: RankPool, refuses: bool) -> None:
    assert fresh_pool.run(use_expandable_segments, 2, refuses, connected=False) == [3.0, 3.0]


def use_expandable_segments(rank: int, size: int, path: str, refuses: bool) -> float:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    if refuses:
        refuse_to_share()
    with connect_on_host(FileBoard(path), rank, size) as comm:
        tensor = torch.full((LARGE // 4,), float(rank + 1), device="cuda")
        comm.all_reduce(tensor)
        assert tensor.eq(3).all()
        part = torch.empty(LARGE // 8, device="cuda")
        comm.reduce_scatter(part, tensor, "max")
        rows = [torch.full((n,), float(rank), device="cuda") for n in (3, 9 << 20, 1, 5 << 20)]
        comm.broadcast(rows, 1)  # fills pinned buffers more than once
        assert all(row.eq(1).all() for row in rows)
        opened = len(mappings_of_this_process())
        assert (opened > 0) == (rank == 0 and not refuses), opened
        return float(part[0])


def refuse_to_share() -> None:
    """Like MIG and sandboxes."""

    def refuse(driver: Driver, base: int) -> NoReturn:
        raise DriverError("export", "refused")

    Driver.export_memory = refuse  # type: ignore[assignment]
    Driver.has_descriptors = lambda driver, base: False  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", [0, 2], ids=["the conductor", "another rank"])
def test_survivors_go_on_with_their_gpu(fresh_pool: RankPool, victim: int) -> None:
    outcomes = fresh_pool.outcomes(shrink_with_a_gpu, 3, victim, connected=False)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].value == (2.0, 2.0), outcomes[rank].error


def shrink_with_a_gpu(rank: int, size: int, path: str, victim: int) -> tuple[float, float]:
    """The mean of a small and of a large all_reduce on the smaller group."""
    comm = connect_on_host(FileBoard(path), rank, size)
    for count in (16, LARGE):
        comm.all_reduce(torch.ones(count, device="cuda"))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    assert isinstance(attempt(comm.all_reduce, torch.ones(LARGE, device="cuda")), PeerLost)
    left = comm.shrink()
    small, large = torch.ones(16, device="cuda"), torch.ones(LARGE, device="cuda")
    left.all_reduce(small)
    left.all_reduce(large)
    return float(small.mean()), float(large.mean())
