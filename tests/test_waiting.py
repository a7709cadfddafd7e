"""Waiting costs little, and few cores or unlike ranks do not stop anybody."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from ranks import RankPool
from unisono.comm.base import Communicator


@pytest.mark.ranks([2, 4])
def test_a_rank_that_waits_leaves_the_core_to_others(comm: Communicator) -> None:
    comm.barrier()
    last = comm.rank == comm.size - 1
    if last:
        time.sleep(1.0)
    start, used = time.monotonic(), time.process_time()
    comm.all_reduce(torch.ones(10))
    waited_s, used_s = time.monotonic() - start, time.process_time() - used
    if not last:
        assert waited_s > 0.9
        assert used_s < 0.1 * waited_s


@pytest.mark.ranks(3)
def test_an_idle_group_uses_no_core(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(100_000))
    used = time.process_time()
    time.sleep(0.7)
    assert time.process_time() - used < 0.05


@pytest.mark.ranks(4)
def test_ranks_with_different_thread_counts_work_together(comm: Communicator) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(comm.rank + 1)
    try:
        for step in range(20):
            product = torch.ones(120, 120) @ torch.full((120, 120), float(step))
            comm.all_reduce(product)
            assert product.eq(4 * 120 * step).all()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.ranks(8)
def test_more_ranks_than_cores_make_progress(comm: Communicator) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        start = time.monotonic()
        for step in range(300):
            comm.all_reduce(tensor := torch.full((1 + step * 20,), float(comm.rank)))
            assert tensor.eq(28).all()
        assert time.monotonic() - start < 20
    finally:
        os.sched_setaffinity(0, cores)


def test_ranks_that_are_pinned_to_one_core_from_the_start_make_progress(
    fresh_pool: RankPool,
) -> None:
    assert max(fresh_pool.run(meet_on_one_core, 4, make="alone")) < 10


def meet_on_one_core(rank: int, size: int, path: str) -> float:
    from ranks import connect

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    start = time.monotonic()
    with connect(path, rank, size) as comm:
        for _ in range(500):
            comm.all_reduce(tensor := torch.ones(300))
            assert tensor.eq(size).all()
    return time.monotonic() - start


@pytest.mark.ranks(2)
def test_a_rank_computes_while_its_thread_waits(comm: Communicator) -> None:
    """A wait gives the interpreter lock away."""
    if comm.rank == 1:
        time.sleep(0.6)
        comm.barrier()
        return
    counted, over = 0, threading.Event()
    waiter = threading.Thread(target=lambda: (comm.barrier(), over.set()))
    waiter.start()
    while not over.is_set():
        time.sleep(0.01)
        counted += 1
    waiter.join()
    assert counted > 20
