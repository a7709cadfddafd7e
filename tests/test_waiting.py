"""Waiting costs little, and few cores or unlike ranks do not stop anybody."""

from __future__ import annotations

import os
import time

import pytest
import torch

from ranks import RankPool
from unisono.comm.base import Communicator


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_waits_leaves_the_core_to_others(pool: RankPool, ranks: int) -> None:
    for waited_s, used_s in pool.run(wait_for_the_last, ranks)[:-1]:
        assert waited_s > 0.9
        assert used_s < 0.1 * waited_s


def wait_for_the_last(comm: Communicator) -> tuple[float, float]:
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(1.0)
    start, used = time.monotonic(), time.process_time()
    comm.all_reduce(torch.ones(10))
    return time.monotonic() - start, time.process_time() - used


def test_an_idle_group_uses_no_core(pool: RankPool) -> None:
    assert max(pool.run(do_nothing_for_a_while, 3)) < 0.05


def do_nothing_for_a_while(comm: Communicator) -> float:
    comm.all_reduce(torch.ones(100_000))
    used = time.process_time()
    time.sleep(0.7)
    return time.process_time() - used


def test_ranks_with_different_thread_counts_work_together(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_threads_of_your_own, 4)


def use_threads_of_your_own(comm: Communicator) -> None:
    torch.set_num_threads(comm.rank + 1)
    for step in range(20):
        product = torch.ones(120, 120) @ torch.full((120, 120), float(step))
        comm.all_reduce(product)
        assert product.eq(4 * 120 * step).all()


def test_more_ranks_than_cores_make_progress(pool: RankPool) -> None:
    took = pool.run(many_calls_on_one_core, 8)
    assert max(took) < 20


def many_calls_on_one_core(comm: Communicator) -> float:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        start = time.monotonic()
        for step in range(300):
            comm.all_reduce(tensor := torch.full((1 + step * 20,), float(comm.rank)))
            assert tensor.eq(28).all()
        return time.monotonic() - start
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


def test_a_rank_computes_while_its_thread_waits(pool: RankPool) -> None:
    """A wait gives the interpreter lock away."""
    first, *_ = pool.run(count_while_waiting, 2)
    assert first > 20


def count_while_waiting(comm: Communicator) -> int:
    import threading

    if comm.rank == 1:
        time.sleep(0.6)
        comm.barrier()
        return 0
    counted, over = 0, threading.Event()
    waiter = threading.Thread(target=lambda: (comm.barrier(), over.set()))
    waiter.start()
    while not over.is_set():
        time.sleep(0.01)
        counted += 1
    waiter.join()
    return counted
