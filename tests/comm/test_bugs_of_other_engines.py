"""Bugs of other shared-memory collectives must not occur here.

Each test is named after the bug. The comments say in which projects it was found.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from expected import assert_same, inputs, reduced, values
from ranks import RankPool, attempt, connect
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting import announcements as boards
from unisono.comm.meeting.board import FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.errors import RendezvousError
from user_programs import eventually


# sglang 13397, 35435: all_gather and all_reduce shared their buffers and flags
@pytest.mark.ranks(4)
def test_different_operations_share_no_state(comm: Communicator) -> None:
    for step in range(60):
        count = (1, 300, 5000)[step % 3]
        given = inputs(comm.size, torch.float32, count, step)
        mine = given[comm.rank]
        gathered = torch.zeros(count * comm.size)
        comm.all_gather(gathered, mine)
        comm.all_reduce(total := mine.clone())
        comm.all_gather(again := torch.zeros(count * comm.size), total)
        assert_same(gathered, torch.cat(given), step)
        assert_same(total, reduced(given, "sum"), step)
        assert_same(again, total.repeat(comm.size), step)


# sglang 35435: the group was mistaken for the world
@pytest.mark.ranks(4)
def test_a_subgroup_is_not_taken_for_the_world(comm: Communicator) -> None:
    pair = comm.split([3, 1])
    for _ in range(20):
        if pair is not None:
            pair.all_reduce(tensor := torch.full((1000,), float(comm.rank)))
            assert tensor.eq(4).all()
        comm.all_reduce(tensor := torch.full((1000,), float(comm.rank)))
        assert tensor.eq(6).all()


# sglang 36908: int64 took another path; DeepSpeed: an unknown dtype returned without reducing
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.int8, torch.float64])
@pytest.mark.ranks(3)
def test_no_dtype_is_returned_unreduced(comm: Communicator, dtype: torch.dtype) -> None:
    for count in (1, 1000, 70_000):
        given = inputs(comm.size, dtype, count)
        comm.all_reduce(tensor := given[comm.rank].clone())
        assert_same(tensor, reduced(given, "sum"))


# sglang 37179: names built from address and port collided between two jobs
def test_jobs_with_the_same_name_and_ranks_do_not_collide(pool: RankPool) -> None:
    pool.run(three_jobs_at_once, 6, connected=False)


def three_jobs_at_once(rank: int, size: int, path: str) -> None:
    job = rank % 3
    with connect(f"{path}-{job}", rank // 3, 2) as comm:
        for _ in range(50):
            comm.all_reduce(tensor := torch.full((3000,), 10.0**job))
            assert tensor.eq(2 * 10.0**job).all()


# sglang 38638, 40723; vllm 51317: killed jobs left segments that filled /dev/shm
def test_killed_ranks_leave_no_segment(fresh_pool: RankPool) -> None:
    before = our_shared_files()
    fresh_pool.run(sum_something, 3)
    outcomes = fresh_pool.outcomes(die_with_segments_open, 3)
    assert all(outcome.error == "the process ended with -9" for outcome in outcomes)
    assert our_shared_files() <= before
    fresh_pool.run(sum_something, 3)


def our_shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "unisono" in name}


def sum_something(comm: Communicator) -> None:
    comm.all_reduce(tensor := torch.ones(200_000))
    assert tensor.eq(comm.size).all()


def die_with_segments_open(comm: Communicator) -> None:
    groups = [comm.split(range(comm.size)) for _ in range(5)]
    for group in groups:
        assert group is not None
        group.all_reduce(torch.ones(200_000))
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


# vllm 46716; gloo 458: shared memory was chosen across hosts, because of an environment variable
def test_the_environment_is_no_proof_of_a_shared_host(fresh_pool: RankPool) -> None:
    errors = fresh_pool.run(claim_to_be_local, 2, connected=False)
    assert "host" in str(errors[1])


def claim_to_be_local(rank: int, size: int, path: str) -> str:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    if rank == 1:
        boards.boot_id = lambda: "another machine's"  # type: ignore[assignment]
    error = attempt(connect_on_host, FileBoard(path, deadline=Deadline(1.0)), rank, size)
    assert isinstance(error, RendezvousError), error
    return str(error)


# vllm 27858: missing memory ordering showed as stale data on Arm
@pytest.mark.ranks([2, 3])
def test_what_was_written_before_a_barrier_is_seen_after_it(comm: Communicator) -> None:
    for step in range(1500):
        wide = torch.full((comm.size * 40,), -1, dtype=torch.int64)
        comm.all_gather(wide, torch.full((40,), step * comm.size + comm.rank))
        expected = [step * comm.size + rank for rank in range(comm.size) for _ in range(40)]
        assert wide.tolist() == expected


# DeepSpeed 4048: deadlock, or overwritten buffers, when one rank runs ahead
@pytest.mark.ranks(4)
def test_a_rank_that_runs_ahead_overwrites_nothing(comm: Communicator) -> None:
    """A broadcast's root need not wait for the others: it gets as far ahead as it can."""
    for count in (5, 3000, 200_000):
        for step in range(25):
            if comm.rank == comm.size - 1 and step % 5 == 0:
                time.sleep(0.003)
            tensor = torch.full((count,), float(step if comm.rank == 0 else -1))
            comm.broadcast(tensor, 0)
            assert tensor.eq(step).all(), (count, step)
        for step in range(25):
            if comm.rank == step % comm.size:
                time.sleep(0.001)
            output = torch.zeros(count)
            comm.scatter(
                output, torch.full((count * comm.size,), 1.0 + step) if comm.rank == 1 else None, 1
            )
            assert output.eq(1 + step).all(), (count, step)


# DeepSpeed's shared-memory op: a non-contiguous result was never copied back
@pytest.mark.ranks(2)
def test_a_strided_result_is_copied_back(comm: Communicator) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    comm.all_reduce(base.T)
    assert base.tolist() == (2 * torch.arange(12.0).reshape(3, 4)).tolist()


# DeepSpeed's shared-memory op: op and group were ignored
@pytest.mark.ranks(3)
def test_the_op_is_not_ignored(comm: Communicator) -> None:
    for count in (2, 10_000):
        comm.all_reduce(tensor := torch.full((count,), float(comm.rank)), "max")
        assert tensor.eq(2).all()


# DeepSpeed's shared-memory op: byte counts were ints
@pytest.mark.slow
@pytest.mark.ranks(2, timeout_s=300)
def test_a_tensor_of_more_than_two_gibibytes(comm: Communicator) -> None:
    count = (1 << 31) + 4096 + 7
    tensor = numpy.full(count, comm.rank + 1, numpy.uint8)
    comm.all_reduce(tensor)
    assert tensor[0] == 3
    assert tensor[-1] == 3
    assert int(tensor.sum(dtype=numpy.int64)) == 3 * count


# vLLM: sums in an order that depended on the rank had different bits on different ranks
@pytest.mark.ranks(3)
def test_the_order_of_a_sum_does_not_turn_with_the_rank(comm: Communicator) -> None:
    given = [values(torch.bfloat16, 4001, 3, rank) for rank in range(3)]
    comm.all_reduce(tensor := given[comm.rank].clone())
    assert_same(tensor, reduced(given, "sum"))
    bits = torch.zeros(3, 4001, dtype=torch.int16)
    comm.all_gather(bits, tensor.view(torch.int16))
    assert bits[0].equal(bits[1])
    assert bits[0].equal(bits[2])


# gloo: all_reduce and broadcast of base[::2] overwrote the elements in between
@pytest.mark.ranks(2)
def test_the_neighbours_of_a_strided_view_are_not_overwritten(comm: Communicator) -> None:
    for count in (10, 100_000):
        base = torch.full((count,), comm.rank + 1.0)
        comm.all_reduce(base[::2])
        assert base[::2].eq(3).all()
        assert base[1::2].eq(comm.rank + 1).all()
        comm.broadcast(base[1::2], 1)
        assert base[1::2].eq(2).all()
        assert base[::2].eq(3).all()


# gloo: 10 elements on one rank and 12 on the other aborted the process
@pytest.mark.ranks(2)
def test_different_counts_raise_and_do_not_abort(comm: Communicator) -> None:
    error = attempt(comm.all_reduce, torch.ones(10 + 2 * comm.rank))
    assert "10 elements" in str(error)
    assert "12 elements" in str(error)


# gloo: an all_gather of different sizes was rejected
@pytest.mark.ranks(3)
def test_ragged_parts_are_gathered(comm: Communicator) -> None:
    parts = [torch.zeros(4 * rank) for rank in range(3)]
    comm.all_gather(parts, torch.full((4 * comm.rank,), float(comm.rank)))
    assert [part.tolist() for part in parts] == [[float(r)] * 4 * r for r in range(3)]


# pytorch 130515: was a root a rank of the group or of the world?
@pytest.mark.ranks(4)
def test_a_root_is_a_rank_of_the_group(comm: Communicator) -> None:
    group = comm.split([3, 2, 0])
    if group is None:
        return
    with group:
        group.broadcast(tensor := torch.tensor([comm.rank]), 0)
        assert tensor.item() == 3
        group.broadcast(tensor := torch.tensor([comm.rank]), 2)
        assert tensor.item() == 0


# ranks that had died left a rendezvous file behind, and the next job waited for them
def test_a_job_after_a_killed_one_meets_at_the_same_path(
    fresh_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "meeting")
    outcomes = fresh_pool.outcomes(die_while_meeting, 1, path, connected=False)
    assert outcomes[0].error is not None
    assert Path(path).exists(), "the killed job has left its file"
    fresh_pool.run(meet_again, 2, path, connected=False)


def die_while_meeting(rank: int, size: int, _: str, path: str) -> None:
    def die() -> None:
        if eventually(Path(path).exists):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()
    connect(path, 0, 2)


def meet_again(rank: int, size: int, _: str, path: str) -> None:
    if rank == 0:
        time.sleep(0.1)
    with connect(path, rank, size) as comm:
        comm.barrier()
