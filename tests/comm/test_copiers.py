"""Large calls in which several threads of a rank take part: every collective and kind of memory."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from ranks import RankPool, attempt, connect
from resources import held_resources
from unisono import PeerLost, variables
from unisono.comm.communicator import Communicator
from user_programs import eventually

COUNT = 300_001  # floats: more than the threshold, and not a whole number of pieces
THREADS = 4


def connect_with(threads: int, path: str, rank: int, size: int) -> Communicator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variables.COPY_THREADS.name, str(threads))
        return connect(path, rank, size)


def row(rank: int, number: int, count: int = COUNT) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 4093 + 5000 * rank + number


def kinds_of(comm: Communicator, given: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers in ordinary memory, strided, and in memory that all ranks have mapped."""
    shared = comm.empty(given.shape)
    return [given.clone(), torch.stack([given, given], -1)[..., 1], shared.copy_(given)]


@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_have_the_same_results(pool: RankPool, size: int) -> None:
    pool.run(run_all, size, connected=False)


def run_all(rank: int, size: int, path: str) -> None:
    comm = connect_with(THREADS, path, rank, size)
    before = held_resources()[1]
    ranks = range(size)
    rows = torch.stack([row(source, 0) for source in ranks])
    for mine in kinds_of(comm, row(rank, 0)):
        out = torch.zeros(size, COUNT)
        comm.all_gather(out, mine)
        assert torch.equal(out, rows)
        total = mine.clone() if mine.is_contiguous() else mine
        comm.all_reduce(total)
        assert torch.equal(total, rows.sum(0))
    for number, mine in enumerate(kinds_of(comm, row(rank, 1))):
        comm.all_reduce(mine)
        assert torch.equal(mine, (rows + 1).sum(0))
        comm.broadcast(mine.fill_(rank + number), size - 1)
        assert torch.equal(mine, torch.full_like(mine, size - 1 + number))
    given = torch.stack([row(rank, 10 * to) for to in ranks])
    for wide in kinds_of(comm, given):
        part = torch.zeros(COUNT)
        comm.reduce_scatter(part, list(wide))
        assert torch.equal(part, (rows + 10 * rank).sum(0))
        taken = torch.zeros(size, COUNT)
        comm.all_to_all(list(taken), list(wide))
        assert torch.equal(taken, rows + 10 * rank)
    assert held_resources()[1] - before == {"unisono:copier": THREADS - 1}
    comm.close()
    assert eventually(lambda: held_resources()[1] <= before)  # one may still be exiting


def test_one_thread_is_the_caller_alone(pool: RankPool) -> None:
    pool.run(run_alone, 2, connected=False)


def run_alone(rank: int, size: int, path: str) -> None:
    comm = connect_with(1, path, rank, size)
    before = held_resources()[1]
    total = row(rank, 0)
    comm.all_reduce(total)
    assert torch.equal(total, row(0, 0) + row(1, 0))
    assert held_resources()[1] <= before
    comm.close()


def test_works_are_shared_too(pool: RankPool) -> None:
    pool.run(run_works, 2, connected=False)


def run_works(rank: int, size: int, path: str) -> None:
    comm = connect_with(THREADS, path, rank, size)
    totals = [row(rank, number) for number in range(8)]
    works = [comm.all_reduce(total, async_op=True) for total in totals]
    for work in works:
        assert work is not None
        work.wait()
    for number, total in enumerate(totals):
        assert torch.equal(total, row(0, number) + row(1, number))
    comm.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_death_in_the_middle_is_no_number(fresh_pool: RankPool, shared: bool) -> None:
    outcomes = fresh_pool.outcomes(reduce_until_death, 3, shared, connected=False)
    assert [outcome.value for outcome in outcomes[:2]] == ["lost", "lost"], outcomes
    assert outcomes[2].exit_code == -signal.SIGKILL


def reduce_until_death(rank: int, size: int, path: str, shared: bool) -> str:
    comm = connect_with(THREADS, path, rank, size)
    total = comm.empty(COUNT) if shared else torch.empty(COUNT)
    wanted = torch.stack([row(source, 0) for source in range(size)]).sum(0)

    def reduce() -> None:
        comm.all_reduce(total.copy_(row(rank, 0)))
        assert torch.equal(total, wanted)

    reduce()
    if rank == 2:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGKILL]).start()
    error = None
    while error is None:
        error = attempt(reduce)
    assert isinstance(error, PeerLost), error
    comm.close()
    return "lost"
