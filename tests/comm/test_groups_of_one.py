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
from unisono.comm.engine.numbers import Status
from unisono.comm.factory import alone
from unisono.comm.shared_memory.memory_transport import SharedMemory
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


class Unreadable:
    """The engine's group as it is for tensors of a GPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def run(self, *_: Any) -> int:
        return Status.ON_DEVICE

    all_reduce = submit = run


def test_torch_moves_what_is_on_a_gpu() -> None:
    transport = SharedMemory.alone()
    transport.group = transport.fast_path = Unreadable(transport.group)
    comm = Communicator(transport)
    given = torch.arange(6.0).view(2, 3)
    x, made = given.clone(), torch.empty(3, 2).t()
    comm.all_reduce(x, "avg")
    comm.broadcast([x, x[0].clone()])
    assert torch.equal(x, given)
    comm.all_reduce([x, made.copy_(given)], unisono.PremulSum(2.0))
    assert torch.equal(x, 2 * given)
    assert torch.equal(made, 2 * given)
    comm.reduce(x, op=unisono.PremulSum(0.5))
    assert torch.equal(x, given)
    for call in (comm.all_gather, comm.gather, comm.all_to_all):
        call([made.zero_()], [given] if call == comm.all_to_all else given)
        assert torch.equal(made, given), call
    comm.scatter(made.zero_(), [given])
    assert torch.equal(made, given)
    comm.all_gather([[made.zero_()], [x.zero_()]], [given, given])
    assert torch.equal(made, given)
    assert torch.equal(x, given)
    work: Any = comm.reduce_scatter(made, [given], unisono.PremulSum(3.0), async_op=True)
    work.wait()
    assert torch.equal(made, 3 * given)
    comm.all_reduce(whole := torch.arange(3), unisono.PremulSum(2.0))
    assert whole.tolist() == [0, 2, 4]
    half = torch.full((2,), 1 / 3, dtype=torch.float16)
    expected = (half.float() * 0.1).half()
    comm.all_reduce(half, unisono.PremulSum(0.1))
    assert torch.equal(half, expected)
    array = numpy.zeros((2, 3), numpy.float32)
    comm.all_gather(array, given)
    assert array.tolist() == given.tolist()
    comm.all_reduce(given, algorithm="ring")
    with pytest.raises(TypeError, match="avg is not defined for int64"):
        comm.all_reduce(whole, "avg")
    comm.close()


def test_it_has_nobody_to_exchange_messages_with() -> None:
    with alone() as comm:
        calls = comm.send, comm.isend, comm.recv, comm.irecv
        for call, name in zip(calls, ("send", "send", "recv", "recv"), strict=True):
            error = attempt(call, torch.ones(2), 0)
            assert isinstance(error, ValueError)
            why = "a group of one has no other rank to exchange messages with"
            assert str(error) == f"{name} on group world: {why}"
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
