"""Child processes: a data loader's workers come and go, and the group does not notice."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ranks import attempt, raised
from resources import assert_given_back, held_resources
from unisono import GroupClosed
from unisono.comm.communicator import Communicator


class Squares(Dataset[torch.Tensor]):
    """Numbers from a worker. It holds a group, as a dataset of a real program may."""

    def __init__(self, count: int, group: Communicator | None = None) -> None:
        self.count = count
        self.group = group

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.group is not None:
            raised(GroupClosed, self.group.all_reduce, torch.ones(3))
        return torch.tensor(float(index * index))


@pytest.mark.ranks(2)
def test_a_data_loaders_workers_beside_a_group(comm: Communicator) -> None:
    """Workers are forked while works and messages are in progress, and exit while others are."""
    peer = 1 - comm.rank
    expected = float(sum(number * number for number in range(32)))
    for group in (None, comm):
        loader = DataLoader(
            Squares(32, group), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for _ in range(2):
            total = torch.zeros(1)
            got = torch.zeros(1)
            received = comm.irecv(got, peer)
            begun = comm.all_reduce(torch.ones(100_000), async_op=True)
            for batch in loader:
                total += batch.sum()
                comm.all_reduce(shared := batch.clone())
                assert torch.equal(shared, 2 * batch)
            assert begun is not None
            begun.wait()
            comm.send(total, peer)
            received.wait()
            assert total.item() == got.item() == expected
    comm.barrier()


@pytest.mark.ranks(2)
def test_workers_that_are_left_in_the_middle_harm_nothing(comm: Communicator) -> None:
    for _ in range(2):
        loader = DataLoader(Squares(1000), num_workers=2, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        comm.all_reduce(tensor := torch.ones(70_000))
        del batches  # ends the workers
        comm.all_reduce(tensor)
        assert tensor.eq(4).all()


@pytest.mark.ranks(2)
def test_a_multiprocessing_child_that_ends_closes_nothing(comm: Communicator) -> None:
    comm.isend(torch.ones(2), 1 - comm.rank, 3)
    comm.all_reduce(torch.ones(2), async_op=True)
    comm.recv(torch.zeros(2), 1 - comm.rank, 3)
    before = held_resources()
    context = multiprocessing.get_context("fork")
    for close in (False, True):
        ours, theirs = context.Pipe()
        child = context.Process(target=child_of_a_rank, args=(comm, theirs, close))
        child.start()
        theirs.close()
        assert ours.recv() == ["GroupClosed"] * 5
        child.join()
        assert child.exitcode == 0
        child.close()
        ours.close()
        comm.all_reduce(tensor := torch.ones(70_000))
        assert tensor.eq(2).all()
    assert_given_back(before)


def child_of_a_rank(comm: Communicator, report: Connection, close: bool) -> None:
    """Every use raises; closing it, and exiting the process with all its handlers, do nothing."""
    tensor = torch.ones(2)
    uses = [
        attempt(comm.barrier),
        attempt(comm.send, tensor, 0),
        attempt(comm.irecv, tensor, 0),
        attempt(comm.all_reduce, tensor, async_op=True),
    ]
    assert comm.errored is not None
    uses.append(comm.errored)
    if close:
        comm.close()
    report.send([type(error).__name__ for error in uses])


@pytest.mark.ranks(2)
def test_a_childs_death_is_not_its_parents(comm: Communicator) -> None:
    for _ in range(10):
        child = os.fork()
        if child == 0:
            os.abort()
        os.waitpid(child, 0)
        comm.barrier()
