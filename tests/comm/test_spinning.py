"""How long a rank spins before it sleeps: UNISONO_SPIN_US."""

from __future__ import annotations

import os
import time

import pytest
import torch

from ranks import RankPool, connect
from unisono import variables

LATE_S, TIMES = 0.01, 10


def processor_time_of_waiting(rank: int, size: int, path: str, spin_us: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variables.SPIN.name, str(spin_us))
        comm = connect(path, rank, size)
    spent_s = 0.0
    for _ in range(TIMES):
        if rank == 0:
            time.sleep(LATE_S)
        before_s = time.thread_time()
        comm.all_reduce(torch.ones(1))
        spent_s += time.thread_time() - before_s
    comm.close()
    return spent_s


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core yield it")
def test_a_rank_spins_for_as_long_as_it_may(pool: RankPool) -> None:
    sleeping_s, spinning_s = (
        pool.run(processor_time_of_waiting, 2, spin_us, connected=False)[1]
        for spin_us in (20, 50_000)
    )
    assert spinning_s > 0.1 * LATE_S * TIMES
    assert sleeping_s < spinning_s / 3
