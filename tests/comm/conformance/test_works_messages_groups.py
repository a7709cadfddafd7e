"""Works, messages and groups, and a Communicator's own properties."""

from __future__ import annotations

import os
import re

import numpy
import torch

import unisono
from implementations import EVERY, QUICK, RESOLVED, on_implementations, ranks_from
from ranks import attempt, subgroup
from unisono import Message
from unisono.comm.communicator import Communicator


@on_implementations([*EVERY, *RESOLVED], quick={*QUICK, *RESOLVED})
def test_a_communicator_knows_its_rank_and_group(comm: Communicator) -> None:
    assert comm.rank == int(os.environ["UNISONO_RANK"])
    assert comm.size == int(os.environ["UNISONO_SIZE"])
    assert comm.global_ranks == tuple(range(comm.size))
    text = repr(comm)
    assert f"rank {comm.rank} of {comm.size}" in text
    assert comm.name in text
    comm.timeout_s = 12.5
    assert comm.timeout_s == 12.5


@on_implementations([*EVERY, *RESOLVED], quick={*QUICK, *RESOLVED})
def test_works_finish_in_any_order_of_waiting_and_when_dropped(comm: Communicator) -> None:
    tensors = [torch.full((1000,), float(k)) for k in range(8)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    strided = torch.zeros(6)
    comm.all_reduce(strided[::2].fill_(1), async_op=True)  # no thread waits for it
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    comm.barrier()
    assert strided.tolist() == [comm.size, 0] * 3
    for k, tensor in enumerate(tensors):
        assert (tensor == comm.size * k).all()
    output = torch.zeros(comm.size)
    gathered = comm.all_gather(output, torch.tensor([float(comm.rank)]), async_op=True)
    rest = comm.barrier(async_op=True)
    assert rest is not None
    assert gathered is not None
    rest.wait(timeout_s=30)
    gathered.wait(timeout_s=30)
    assert output.tolist() == list(range(comm.size))


@on_implementations(ranks_from(2), quick={("native", 3), ("torch", 3)})
def test_closing_a_group_lets_finish_what_all_have_begun_and_cancels_the_rest(
    comm: Communicator,
) -> None:
    group, other = (subgroup(comm, range(comm.size)) for _ in range(2))
    group.barrier()
    tensors = [torch.ones(30_000) for _ in range(50)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    group.close()
    for work, tensor in zip(works, tensors, strict=True):
        assert work is not None
        work.wait()
        assert (tensor == comm.size).all()
    if comm.rank == 0:
        work = other.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        other.close()
        error = attempt(work.wait)
        assert isinstance(error, unisono.GroupError), error
        named = re.search(r"ranks? \d.* never joined what rank 0 had begun", str(error))
        assert comm.backend == "gloo" or named, error
    comm.barrier()
    assert comm.rank == 0 or isinstance(attempt(other.barrier), unisono.GroupError)


def test_parameters_and_inference_tensors_are_written_to(comm: Communicator) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    comm.all_reduce(parameter)
    assert parameter.tolist() == [comm.size] * 3
    assert parameter.requires_grad
    with torch.inference_mode():
        tensor = torch.ones(6)[::2]
        comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.size] * 3


@on_implementations(ranks_from(2))
def test_messages_with_tags_and_from_anybody(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((3,), 10 * rank + tag, dtype=torch.int16) for tag in range(3)]
    works = [comm.isend(tensor, after, tag) for tag, tensor in enumerate(sent)]
    for tag in (2, 0, 1):
        got = torch.zeros(6, dtype=torch.int16)
        assert comm.recv(got[::2], before, tag) == before
        assert got.tolist() == [10 * before + tag, 0] * 3
    for work in works:
        work.wait()
    if rank == 0:
        found = set()
        for _ in range(size - 1):
            work = comm.irecv(tensor := torch.zeros(2), tag=7)
            work.wait(timeout_s=30)
            assert tensor.tolist() == [work.source_rank()] * 2
            found.add(work.source_rank())
        assert found == set(range(1, size))
    else:
        comm.send(torch.full((2,), float(rank)), 0, tag=7)
    got = torch.zeros(4)
    batch = [Message("recv", got, before), Message("send", torch.full((4,), float(rank)), after)]
    for work in comm.batch_isend_irecv(batch):
        work.wait()
    assert got.tolist() == [before] * 4
    array = numpy.zeros(2)
    if rank == 0:
        comm.send(numpy.ones(2), 1)
    elif rank == 1:
        comm.recv(array, 0)
        assert array.tolist() == [1, 1]
    for wrong in (attempt(comm.send, got, size), attempt(comm.recv, got, -1)):
        assert isinstance(wrong, ValueError)


@on_implementations(ranks_from(3))
def test_groups_are_made_by_their_members_alone_in_the_order_given(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    if rank < 2:  # one group more on some ranks than on others must not confuse the next
        first = subgroup(comm, [0, 1])
        first.barrier()
    members = [size - 1, 0]
    sub = comm.split(members)
    assert (sub is None) == (rank not in members)
    if sub is not None:
        assert (sub.rank, sub.size, sub.global_ranks) == (members.index(rank), 2, tuple(members))
        sub.all_gather(output := torch.zeros(2), torch.tensor([float(rank)]))
        assert output.tolist() == members
        sub.broadcast(tensor := torch.tensor([rank]), 0)
        assert tensor.item() == size - 1
        sub.close()
        sub.close()
        assert isinstance(attempt(sub.barrier), unisono.GroupClosed)
    again = subgroup(comm, list(range(size)))
    one, two = torch.ones(5), torch.ones(7)
    works = [again.all_reduce(one, async_op=True), comm.all_reduce(two, async_op=True)]
    works += [comm.all_reduce(two, async_op=True), again.all_reduce(one, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    assert one.tolist() == [size**2] * 5
    assert two.tolist() == [size**2] * 7
    again.close()
    comm.barrier()
    for wrong in ([], [0, 0], [size]):
        assert isinstance(attempt(comm.split, wrong), ValueError)
