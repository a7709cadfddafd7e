"""Records of calls and messages, read by a process that is not in the group."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time

import pytest
import torch

from ranks import attempt, in_a_fork
from unisono.comm.communicator import Communicator
from unisono.comm.engine import Operation
from unisono.comm.shared_memory.record_reader import read_process
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.errors import UnisonoError

READER = """
import sys, pickle
from unisono.comm.shared_memory.record_reader import read_process
sys.stdout.buffer.write(pickle.dumps(read_process(int(sys.argv[1]))))
"""


def read_from_outside(pid: int) -> list[GroupRecords]:
    """The records of a process, read by a new one."""
    command = [sys.executable, "-c", READER, str(pid)]
    groups: list[GroupRecords] = pickle.loads(subprocess.check_output(command))
    return groups


def shape_of(record: Record) -> tuple[object, ...]:
    """The fields that are the same in every run."""
    return (
        record.operation,
        record.dtype,
        record.count,
        record.reduction,
        record.root,
        record.peer,
        record.tag,
        record.state,
    )


@pytest.mark.ranks(3)
def test_every_call_leaves_a_record_that_another_process_reads(comm: Communicator) -> None:
    before = time.monotonic()
    comm.barrier()
    comm.all_reduce(torch.ones(5), "max")
    comm.broadcast(torch.ones(7, dtype=torch.bfloat16), root=2)
    comm.reduce_scatter(torch.ones(100_000).double(), torch.ones(300_000).double())
    comm.all_gather(torch.ones(0, dtype=torch.int32), torch.ones(0, dtype=torch.int32))
    message = torch.zeros(200_000, dtype=torch.uint8)
    if comm.rank == 0:
        comm.send(message, 1, tag=-7)
        (group,) = read_from_outside(os.getpid())  # the others reach the barrier long before
        check_records(group, before, time.monotonic())
    elif comm.rank == 1:
        comm.recv(message, 0, tag=-7)
    comm.barrier()


def check_records(group: GroupRecords, before: float, after: float) -> None:
    message = ("uint8", 200_000, None, None)
    messages = {
        0: [("send", *message, 1, -7, "finished")],
        1: [("recv", *message, 0, -7, "finished")],
    }
    waiting = [("barrier", "", 0, None, None, None, None, "waiting")]
    assert group.size == 3
    assert group.ranks[0].pid == os.getpid()
    for rank, rank_records in enumerate(group.ranks):
        assert (rank_records.rank, rank_records.global_rank) == (rank, rank)
        assert [shape_of(record) for record in rank_records.records] == [
            ("barrier", "", 0, None, None, None, None, "finished"),
            ("all_reduce", "float32", 5, "max", None, None, None, "finished"),
            ("broadcast", "bfloat16", 7, None, 2, None, None, "finished"),
            ("reduce_scatter", "float64", 300_000, "sum", None, None, None, "finished"),
            ("all_gather", "int32", 0, None, None, None, None, "finished"),
            *messages.get(rank, []),
            *(waiting if rank else []),
        ]
        calls = [record.call for record in rank_records.records if record.tag is None]
        assert calls == [1, 2, 3, 4, 5, 6][: len(calls)]
        for record in rank_records.records:
            if record.state == "finished":
                assert record.started_s is not None
                assert record.ended_s is not None
                assert record.arrived_s <= record.started_s <= record.ended_s < after
                assert rank or before < record.arrived_s


@pytest.mark.ranks(2)
def test_the_ring_keeps_the_last_thousand(comm: Communicator) -> None:
    for _ in range(3000):
        comm.barrier()
    (group,) = read_process(os.getpid())
    numbers = [record.number for record in group.ranks[comm.rank].records]
    assert numbers == list(range(3000 - 1024 + 1, 3001))
    comm.barrier()


@pytest.mark.ranks(2)
def test_what_ends_after_a_thousand_others_leaves_their_records_alone(comm: Communicator) -> None:
    works = [comm.irecv(torch.empty(1), 0, tag=0)] if comm.rank else []
    for _ in range(1023):
        comm.barrier()
    if comm.rank == 0:
        comm.send(torch.ones(1), 1, tag=0)
        comm.recv(torch.empty(1), 1)
        comm.send(torch.ones(1), 1, tag=1)
        return
    works.append(comm.irecv(torch.empty(1), 0, tag=1))  # its record replaces the first one's
    works[0].wait()
    (group,) = read_process(os.getpid())
    assert [record.state for record in group.ranks[1].records if record.tag == 1] == ["waiting"]
    comm.send(torch.ones(1), 0)
    works[1].wait()


@pytest.mark.ranks(2)
def test_a_queued_work_is_seen(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.recv(torch.ones(1), 0)
        for _ in range(3):
            comm.all_reduce(torch.ones(3))
        return
    works = [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    states: list[str] = []
    deadline = time.monotonic() + 10
    while "waiting" not in states and time.monotonic() < deadline:
        (group,) = read_process(os.getpid())
        states = [record.state for record in group.ranks[0].records]
    assert states == ["waiting", "queued", "queued"]
    comm.send(torch.ones(1), 1)
    for work in works:
        assert work is not None
        work.wait()


@pytest.mark.ranks(2)
def test_a_failed_call_says_how(comm: Communicator) -> None:
    attempt(comm.all_reduce, torch.ones(3 + comm.rank))
    (group,) = read_process(os.getpid())
    last = group.ranks[comm.rank].records[-1]
    assert (last.state, last.status) == ("failed", "MISMATCH")


@pytest.mark.ranks(3)
def test_groups_are_told_apart(comm: Communicator) -> None:
    part = comm.split([2, 0])
    if part is not None:
        part.barrier()
    comm.barrier()
    groups = {group.name: group for group in read_process(os.getpid())}
    assert set(groups) == {comm.name} | ({part.name} if part is not None else set())
    if part is not None:
        assert [records_of.global_rank for records_of in groups[part.name].ranks] == [2, 0]
    comm.barrier()
    if part is not None:
        part.close()


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(UnisonoError, match="there is no process"):
        read_process(2**22 + 1)
    assert read_process(os.getpid()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_read() -> None:
    me = os.getpid()

    def read_as_nobody() -> str:
        os.setgid(65534)
        os.setuid(65534)
        return str(attempt(read_process, me))

    assert "belongs to another user" in in_a_fork(read_as_nobody)


@pytest.mark.ranks(2)
def test_a_call_that_is_recorded_as_a_whole_leaves_one_record(comm: Communicator) -> None:
    group = comm.transport.group  # type: ignore[attr-defined]
    comm.barrier()
    record = group.record_open(
        Operation.REDUCE_SCATTER, 0, -1, 0x12002, 4096, group.state()["calls"] + 1
    )
    group.record_cover(True)
    comm.all_gather(torch.empty(2, 3), torch.ones(3))  # parts of it
    comm.broadcast(torch.ones(7), 0)
    group.record_cover(False)
    group.record_end(record, 0)
    comm.all_reduce(torch.ones(5))
    (known,) = read_process(os.getpid())
    newest = list(known.ranks[comm.rank].records)[-3:]
    assert [made.operation for made in newest] == ["barrier", "reduce_scatter", "all_reduce"]
    assert (newest[1].dtype, newest[1].count, newest[1].state) == ("float32", 1024, "finished")
    comm.barrier()
