"""A group of one: it runs on the engine, in memory of its own process, and holds nothing else."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch

import unisono
from ranks import attempt
from resources import assert_given_back, held_resources
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone
from unisono.errors import GroupClosed

PACKAGE = str(Path(unisono.__file__).parent)
LARGE = 1_000_000


def shared_mappings() -> set[str]:
    """The mappings of this process that are shared, and of no file that has a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if " rw-s " in line and "deleted" in line}


def use(comm: Communicator) -> None:
    """Every kind of call, small and large, blocking and not."""
    for count in (3, LARGE):
        tensor, other = torch.arange(float(count)), torch.empty(count)
        for _ in range(2):
            comm.all_reduce(tensor, "avg")
            work = comm.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        comm.all_gather(other, tensor)
        assert torch.equal(tensor, torch.arange(float(count)))
        assert torch.equal(other, tensor)
        comm.reduce_scatter(other, tensor, unisono.PremulSum(2.0))
        assert torch.equal(other, 2 * tensor)
        comm.all_to_all([other], [tensor])
        assert torch.equal(other, tensor)
    comm.barrier()
    assert unisono.all_gather_object({"a": 1}, comm) == [{"a": 1}]


def test_it_holds_no_descriptor_and_no_thread() -> None:
    use(alone())  # what is imported and opened once
    gc.collect()
    before, mapped = held_resources(), shared_mappings()
    with alone() as comm:
        use(comm)
        made = comm.split([0])
        assert made is not None
        use(made)
        assert_given_back(before, "with two groups of one")
        assert len(shared_mappings() - mapped) == 2
        made.close()
    assert_given_back(before)
    assert not shared_mappings() - mapped


def test_threads_share_it() -> None:
    comm, wrong = alone(), list[int]()

    def work(number: int) -> None:
        tensor = torch.full((100_000,), float(number))
        for _ in range(50):
            begun: Any = comm.all_reduce(tensor, unisono.PremulSum(1.0), async_op=True)
            comm.all_gather(gathered := torch.empty_like(tensor), tensor)
            begun.wait()
            if not gathered.eq(number).all() or not tensor.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    comm.close()


def functions_of(call: Callable[[], Any]) -> list[str]:
    """The functions of ours that a call runs."""
    ran: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            ran.append(f"{Path(file).name}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


def test_a_call_runs_one_function_of_ours() -> None:
    comm, tensor = alone(), torch.ones(3)
    comm.all_reduce(tensor)
    assert functions_of(lambda: comm.all_reduce(tensor)) == ["communicator.py:all_reduce"]
    comm.close()


def test_what_the_engine_cannot_read_moves_too() -> None:
    comm, given = alone(), torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    made = torch.zeros(4, dtype=torch.uint8).view(torch.uint4)
    comm.all_gather(made, given)
    comm.broadcast(made)
    work: Any = comm.all_gather([made], given, async_op=True)
    work.wait()
    assert made.view(torch.uint8).tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="dense tensor on cpu or cuda"):
        comm.all_reduce(torch.ones(3, device="meta"))
    array = numpy.zeros(3)
    comm.all_gather(array, torch.ones(3, dtype=torch.float64))
    assert array.tolist() == [1, 1, 1]
    comm.close()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm, x: comm.send(x, 0), "send on group world"),
        (lambda comm, x: comm.recv(x), "recv on group world"),
        (lambda comm, x: comm.isend(x, 0), "send on group world"),
        (lambda comm, x: comm.irecv(x, 0), "recv on group world"),
    ],
)
def test_it_has_nobody_to_exchange_messages_with(call: Callable[..., Any], text: str) -> None:
    with alone() as comm:
        error = attempt(call, comm, torch.ones(2))
        assert isinstance(error, ValueError)
        assert str(error) == f"{text}: a group of one has no other rank to exchange messages with"
        comm.barrier()  # it stays usable


def test_a_forked_child_has_a_group_of_its_own() -> None:
    """A group that was made is its parent's; the functions make another."""
    comm = alone()
    assert unisono.reduce_tensor(torch.ones(2)).tolist() == [1, 1]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_a_child, args=(comm, theirs))
    child.start()
    text, mean = ours.recv()
    child.join()
    assert child.exitcode == 0
    assert text.startswith("group world belongs to the parent process")
    assert mean == [2, 2]
    use(comm)
    comm.close()


def in_a_child(comm: Communicator, report: Connection) -> None:
    error = attempt(comm.all_reduce, torch.ones(2))
    assert isinstance(error, GroupClosed)
    comm.close()
    report.send((str(error), unisono.reduce_tensor(2 * torch.ones(2)).tolist()))
