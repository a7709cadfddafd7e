"""Shared tensors: their contents, who sees them, when their memory is freed, and deaths
meanwhile."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy
import pytest
import torch

import unisono
from ranks import RankPool, attempt, connect, in_a_fork, raised, subgroup
from resources import assert_given_back, held_resources
from unisono import GroupClosed, PeerLost, SegmentError, failures
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.shared_memory.shared_pages import SharedPages

LARGE = 300_000  # floats: more than a slot


def random_row(comm: Communicator, count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + comm.rank))


def turns(comm: Communicator) -> int:
    """How many steps of moving data this rank has finished, over all calls."""
    return cast(SharedMemory, comm.transport).group.state(comm.rank)["progress"]


def mappings() -> int:
    """How many mappings of anonymous memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


@pytest.mark.ranks(2)
def test_they_are_ordinary_tensors_and_arrays(comm: Communicator) -> None:
    x = comm.empty((3, 4), torch.bfloat16)
    assert type(x) is torch.Tensor
    assert x.shape == (3, 4)
    assert x.is_contiguous()
    assert not x._is_view()
    assert comm.is_shared(x[1:, 2])
    parameter = torch.nn.Parameter(comm.zeros(5))
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0] * 5
    array = comm.zeros((2, 2), numpy.int16)
    assert type(array) is numpy.ndarray
    comm.all_reduce(array)
    assert array.tolist() == [[0, 0], [0, 0]]
    assert comm.empty(0).numel() == 0
    assert comm.empty((), torch.float64).shape == ()
    assert comm.zeros(2).dtype is torch.get_default_dtype()


@pytest.mark.ranks(3)
def test_a_peers_tensor_is_the_peers_memory(comm: Communicator) -> None:
    x = comm.empty((4, 5), torch.int32)
    x.copy_(torch.arange(20).view(4, 5) + 100 * comm.rank)
    comm.barrier()
    for rank in range(comm.size):
        wanted = torch.arange(20).view(4, 5) + 100 * rank
        assert comm.get_peer_tensor(x, rank).tolist() == wanted.tolist()
        assert comm.get_peer_tensor(x.t()[1:, ::2], rank).tolist() == wanted.t()[1:, ::2].tolist()
    comm.barrier()
    comm.get_peer_tensor(x, comm.next)[0, 0] = -1 - comm.rank
    comm.barrier()
    assert x[0, 0] == -1 - comm.prev
    array = comm.zeros((2, 3), numpy.float64)
    array[:] = comm.rank
    comm.barrier()
    assert comm.get_peer_tensor(array[:, 1:], comm.next).tolist() == [[comm.next] * 2] * 2
    comm.barrier()
    raised(ValueError, comm.get_peer_tensor, torch.zeros(3), comm.next)
    raised(ValueError, comm.get_peer_tensor, x, 3)
    assert comm.get_peer_tensor(x, comm.rank).data_ptr() == x.data_ptr()


@pytest.mark.ranks(2)
def test_ranks_may_want_different_sizes(comm: Communicator) -> None:
    x = comm.empty(10 * comm.rank + 1).fill_(comm.rank)
    comm.barrier()
    if comm.rank == 0:
        assert comm.get_peer_tensor(x, 1).tolist() == [1.0]
    else:
        raised(ValueError, comm.get_peer_tensor, x, 0)
    comm.barrier()
    assert comm.empty(5 if comm.rank else 0).numel() == 5 * comm.rank


def every_call(comm: Communicator, make: Any, seed: int) -> list[torch.Tensor]:
    """The results of every collective on memory that `make` allocates for a row."""
    part = LARGE // comm.size
    root = seed % comm.size
    x = make(random_row(comm, LARGE, seed=seed))
    out = make(torch.zeros(LARGE))
    results = []

    def keep(tensor: torch.Tensor) -> None:
        results.append(tensor.clone())

    comm.all_gather(out, x[:part])
    keep(out)
    comm.all_to_all(out, x)
    keep(out)
    comm.reduce_scatter(out[:part], x, "avg")
    keep(out[:part])
    comm.gather(out if comm.rank == root else None, x[:part], root)
    keep(out)
    comm.scatter(out[:part], x if comm.rank == root else None, root)
    keep(out[:part])
    comm.all_gather(x, x[comm.rank * part : (comm.rank + 1) * part])  # already in place
    keep(x)
    x.copy_(random_row(comm, LARGE, seed=seed + 1))
    comm.reduce(x, root, "product")
    keep(x)
    comm.all_reduce(x[1:-1])
    keep(x)
    comm.broadcast(x, root)
    keep(x)
    comm.all_to_all(x, x)
    keep(x)
    uneven = [x[: 10 * rank] for rank in range(comm.size)]
    comm.all_to_all(list(out[: 10 * comm.size * comm.rank].split(10 * comm.rank or 1)), uneven) if (
        comm.rank
    ) else comm.all_to_all([out[:0]] * comm.size, uneven)
    keep(out)
    return results


@pytest.mark.ranks(3)
@pytest.mark.parametrize("sharing", ["all", "some", "one"])
def test_the_bits_are_those_of_ordinary_tensors(comm: Communicator, sharing: str) -> None:
    def shared(row: torch.Tensor) -> torch.Tensor:
        made = comm.empty(len(row) + 3)[3:].copy_(row)  # not at the start of a line
        is_mine = {"all": True, "some": comm.rank != 1, "one": comm.rank == 1}[sharing]
        return made if is_mine else row

    for seed in range(2):
        ordinary = every_call(comm, lambda row: row, seed)
        for number, (left, right) in enumerate(
            zip(ordinary, every_call(comm, shared, seed), strict=True)
        ):
            assert torch.equal(left, right), f"call {number}"


@pytest.mark.ranks(2)
def test_a_call_on_them_takes_one_turn(comm: Communicator) -> None:
    x, out = comm.zeros(LARGE), comm.zeros(LARGE)
    half = LARGE // 2
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.broadcast(x),
        lambda: comm.all_gather(out, x[:half]),
        lambda: comm.reduce_scatter(out[:half], x),
        lambda: comm.all_to_all(out, x),
        lambda: comm.all_to_all(torch.empty(LARGE), x),  # outputs may be in any memory
        lambda: comm.all_reduce(x, async_op=True).wait(),
    ):
        before = turns(comm)
        call()
        assert turns(comm) == before + 1
    before = turns(comm)
    comm.all_reduce(torch.zeros(LARGE))
    assert turns(comm) > before + 3


@pytest.mark.ranks(2)
def test_results_go_into_a_ranks_own_memory(comm: Communicator) -> None:
    x = comm.zeros(8)
    theirs = comm.get_peer_tensor(x, comm.next)
    error = raised(ValueError, comm.all_reduce, theirs)
    assert f"memory of rank {comm.next}" in str(error)
    raised(ValueError, comm.all_gather, theirs, torch.zeros(4))
    comm.all_gather(torch.empty(16), theirs)  # inputs may be in memory that others have written
    raised(ValueError, comm.empty, (2, -1))
    raised(TypeError, comm.empty, 2.5)
    raised(TypeError, comm.empty, 2, object)
    comm.all_reduce(x)


@pytest.mark.ranks(2)
def test_too_much_is_refused_on_every_rank(comm: Communicator) -> None:
    error = raised(SegmentError, comm.empty, 1 << 40 if comm.rank else 10, torch.uint8)
    assert "rank 1 needs 1099511627776 bytes: its memory limits leave" in str(error)
    raised(SegmentError, comm.empty, 1 << 60, torch.uint8)
    raised(SegmentError, comm.empty, (1 << 40, 1 << 40) if comm.rank else 10)  # not in 64 bits
    comm.all_reduce(x := comm.zeros(3))
    assert x.tolist() == [0.0] * 3


@pytest.mark.ranks(2)
def test_the_memory_goes_with_the_last_tensor(comm: Communicator) -> None:
    before = mappings()
    x = comm.empty(LARGE).fill_(comm.rank)
    comm.barrier()
    assert mappings() == before + 1
    theirs = comm.get_peer_tensor(x, comm.next)[10:]
    x = x[5:6]
    if comm.rank == 0:
        del x, theirs
        comm.barrier()
        comm.barrier()
    else:
        comm.barrier()
        assert theirs[0] == 0  # rank 0 has dropped its own, and it is still here
        del theirs
        gc.collect()
        assert mappings() == before + 1
        del x
        comm.barrier()
    y = comm.zeros(1)  # the rank that released it first notices at its next allocation
    assert mappings() == before + 1
    del y


@pytest.mark.ranks(2)
def test_a_tensor_outlives_its_group_and_works_their_tensors(comm: Communicator) -> None:
    before = mappings()
    pair = subgroup(comm, [0, 1], "pair")
    x = pair.empty(LARGE).fill_(pair.rank)
    works = [pair.all_reduce(pair.empty(LARGE).fill_(1), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    pair.barrier()
    assert pair.is_shared(x)
    pair.close()
    assert not pair.is_shared(x)
    assert pair.transport.own_parts() == []
    assert pair.get_peer_tensor(x, comm.rank) is x
    assert "not in memory that the group shares" in str(
        attempt(pair.get_peer_tensor, x, 1 - comm.rank)
    )
    assert x.sum() == LARGE * comm.rank
    raised(GroupClosed, pair.empty, 3)
    comm.barrier()
    del x, works, work
    gc.collect()
    assert mappings() <= before


@pytest.mark.ranks(2)
def test_a_forked_child_shares_the_memory_and_not_the_group(comm: Communicator) -> None:
    x = comm.zeros(LARGE)
    before = mappings()

    def child() -> str:
        x[0] = 7
        refused = type(attempt(comm.all_reduce, x)).__name__
        return f"{refused} {x[1].item():g}"

    assert in_a_fork(child) == "GroupClosed 0"
    assert x[0] == 7
    comm.all_reduce(x)
    assert x[0] == 14
    assert mappings() == before


@pytest.mark.ranks(2)
def test_a_modules_tensors_move_and_stay_the_same(comm: Communicator) -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(70, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 50, bias=False)
    )
    module[2].weight.data = module[2].weight.data.t()
    tied = torch.nn.Linear(70, 50)
    tied.weight = module[0].weight
    module.append(tied)
    module.register_buffer("view", module[0].weight.detach()[1:3, ::2])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    objects = [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    stored = (tensor.untyped_storage() for tensor in module.state_dict().values())
    sizes = {storage.data_ptr(): storage.nbytes() for storage in stored}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert unisono.share_module(module, comm) is module
    assert [id(tensor) for tensor in (*module.parameters(), *module.buffers())] == objects
    for name, tensor in module.state_dict().items():
        assert comm.is_shared(tensor), name
        assert torch.equal(tensor, before[name]), name
    room = module[0].weight.untyped_storage().nbytes()
    assert sum(sizes.values()) <= room < sum(sizes.values()) + 64 * len(sizes), "tied: once"
    module[0].weight.grad = torch.ones_like(module[0].weight)
    optimizer.step()
    assert torch.equal(module.view, before["view"] - 1)
    array = unisono.share_tensor(numpy.arange(6).reshape(2, 3)[:, ::2], comm)
    assert comm.is_shared(array)
    assert array.tolist() == [[0, 2], [3, 5]]
    raised(TypeError, unisono.share_tensor, [1, 2], comm)
    raised(TypeError, unisono.share_tensor, torch.eye(2).to_sparse(), comm)
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_pickle_of_one_is_a_copy(comm: Communicator) -> None:
    x = comm.zeros(10)
    copy = pickle.loads(pickle.dumps(x))
    assert not comm.is_shared(copy)
    copy += 1
    assert x.sum() == 0


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_a_peer_dies_within_calls(fresh_pool: RankPool, size: int, call: str) -> None:
    outcomes = fresh_pool.outcomes(die_within_calls, size, call, connected=False)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.error
        assert outcome.value == size - 1


def die_within_calls(rank: int, size: int, path: str, call: str) -> int:
    comm = connect(path, rank, size)
    x, out = comm.zeros(2_000_000), comm.zeros(2_000_000 * size)
    theirs = comm.get_peer_tensor(x, size - 1)
    if rank == size - 1:
        child = os.fork()
        if child == 0:
            time.sleep(0.1)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
    error = None
    while error is None:
        error = (
            attempt(comm.all_reduce, x)
            if call == "all_reduce"
            else attempt(comm.all_gather, out, x)
        )
    assert isinstance(error, PeerLost), error
    seen = theirs.clone()  # the dead rank's memory is mapped here, too
    x.fill_(3)
    assert torch.equal(x, torch.full_like(x, 3)), "somebody still writes"
    assert len(seen) == len(x)
    raised(PeerLost, comm.zeros, 5)
    comm.close()
    return error.peer


def test_a_peer_dies_between_calls_and_before_it_has_allocated(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(die_between_calls, 3, connected=False)
    assert [outcome.value or outcome.error for outcome in outcomes[::2]] == ["lost 1"] * 2


def die_between_calls(rank: int, size: int, path: str) -> str:
    comm = connect(path, rank, size)
    x = comm.zeros(LARGE).fill_(rank)
    comm.all_gather(comm.empty(LARGE * size), x)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(PeerLost, comm.empty, LARGE)
    assert comm.get_peer_tensor(x, 1)[0] == 1
    before = mappings()
    del x
    assert mappings() < before
    comm.close()
    return f"lost {error.peer}"


# -- coming and going ----------------------------------------------------------------------------


def come_and_go(rank: int, size: int, path: str, cycles: int) -> int:
    """How much this process grew after the first fifth."""
    before = held_resources(), mappings()
    grown = 0
    with connect(path, rank, size) as comm:
        kept: list[torch.Tensor] = []
        for cycle in range(cycles):
            x = comm.empty(1000 + cycle % 7 * 3000).fill_(1)
            comm.all_reduce(x)
            assert x[0] == size
            kept.append(x[3:])
            if len(kept) > 1 + (cycle + rank) % 3:  # ranks release at different times
                kept.pop(rank % 2)
            if cycle == cycles // 5:
                grown = -resident_bytes()
        assert mappings() < before[1] + 20
        grown += resident_bytes()
    del kept, x
    assert_given_back(before[0])
    assert mappings() == before[1]
    return grown


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    "cycles", [pytest.param(200), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_allocations_come_and_go(fresh_pool: RankPool, cycles: int) -> None:
    grown = fresh_pool.run(come_and_go, 2, cycles, connected=False, deadline_s=600)
    assert max(grown) < 8 << 20, grown


def test_a_rank_without_descriptors_keeps_nobody_waiting(fresh_pool: RankPool) -> None:
    """Also if the module that allocates is not imported yet, which needs a descriptor, too."""
    texts = fresh_pool.run(allocate_without_descriptors, 2, connected=False)
    for text in texts:
        assert "rank 1 cannot map it: Too many open files" in text


def test_ranks_that_cannot_look_at_rank_0_have_ordinary_tensors(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(allocate_out_of_reach, 3, connected=False) == [3.0] * 3


def allocate_out_of_reach(rank: int, size: int, path: str) -> float:
    comm = connect(path, rank, size)
    x = comm.zeros(0)
    descriptors = held_resources()[0]
    for process in (1, 2**22):  # in another namespace that is another process's pid, or none's
        with mock.patch("os.getpid", return_value=process):
            x = comm.empty(LARGE).fill_(1)
        comm.all_reduce(x)
        assert not comm.is_shared(x)
        comm.transport._allocator._is_possible = process == 1  # look for it again
    assert held_resources()[0] == descriptors
    pages = SharedPages(LARGE, torch.float32, comm)  # no rank looks for the memory any more
    pages.hold(x)
    assert pages.middle.data_ptr() - x.data_ptr() == mmap.PAGESIZE  # its own
    total = x.mean().item()
    comm.close()
    return total


def allocate_without_descriptors(rank: int, size: int, path: str) -> str:
    failures.DELAY_S = 60.0
    comm = connect(path, rank, size)
    sys.modules.pop("unisono.comm.shared_memory.allocation", None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    error = raised(SegmentError, comm.empty, LARGE)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    comm.all_reduce(x := comm.empty(LARGE).fill_(1))  # the group stays usable
    assert x[0] == size
    comm.close()
    return str(error)
