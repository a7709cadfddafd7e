"""A call on CUDA tensors runs in stream order, and memory lives as long as it must."""

from __future__ import annotations

import gc

import pytest
import torch

from unisono.comm.communicator import Communicator
from unisono.comm.cuda.calls import STAGED_BYTES
from unisono.comm.cuda.conducting import mappings_of_this_process
from unisono.errors import CollectiveMismatch

pytestmark = pytest.mark.ranks(2)
LARGE = 4 * STAGED_BYTES
CYCLES = 100_000_000  # GPU cycles: about 50 ms


@pytest.mark.parametrize("count", [100, LARGE])
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_call_comes_after_the_work_before_it(
    comm: Communicator, count: int, slow_rank: int
) -> None:
    for own_stream in (False, True):
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(count, device="cuda")
            if comm.rank == slow_rank:
                torch.cuda._sleep(CYCLES)
            tensor += comm.rank + 1
            comm.all_reduce(tensor)
            tensor *= 10
            assert tensor.eq(30).all()


@pytest.mark.parametrize("count", [100, LARGE])
def test_a_work_goes_on_beside_the_caller(comm: Communicator, count: int) -> None:
    tensor = torch.zeros(count, device="cuda")
    torch.cuda._sleep(CYCLES)
    tensor += comm.rank + 1
    work = comm.all_reduce(tensor, async_op=True)
    other = torch.ones(5, device="cuda") * 2
    work.wait()
    tensor += other[0]
    assert tensor.eq(5).all()
    assert work.is_completed()


def test_a_large_call_does_not_wait_for_the_gpu(comm: Communicator) -> None:
    tensor = torch.ones(LARGE, device="cuda")
    comm.all_reduce(tensor)  # so that everything is initialised
    torch.cuda.synchronize()
    comm.barrier()
    torch.cuda._sleep(10 * CYCLES)
    comm.all_reduce(tensor)
    end = torch.cuda.Event()
    end.record()
    assert not end.query()
    assert tensor.eq(4).all()


def test_tensors_may_go_while_their_call_is_under_way(comm: Communicator) -> None:
    for turn in range(20):
        torch.cuda._sleep(CYCLES // 20)
        tensor = torch.full((LARGE,), float(turn), device="cuda")
        result = torch.empty(2, LARGE, device="cuda")
        work = comm.all_gather(result, tensor, async_op=True)
        del tensor
        noise = torch.full((LARGE,), -1.0, device="cuda")  # where the tensor was
        work.wait()
        assert result.eq(turn).all()
        del noise


def test_memory_that_was_freed_and_comes_back_is_another(comm: Communicator) -> None:
    for turn in range(6):
        tensor = torch.full((LARGE,), float(turn), device="cuda")
        comm.all_reduce(tensor)
        assert tensor.eq(2 * turn).all()
        del tensor
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    small = torch.ones(LARGE, device="cuda")
    for _ in range(10):  # each call checks one allocation
        comm.all_reduce(small)
    torch.cuda.synchronize()
    if comm.rank == 0:
        assert len(mappings_of_this_process()) <= 2


def test_what_is_freed_goes_back_to_the_gpu(comm: Communicator) -> None:
    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    comm.all_reduce(torch.ones(LARGE, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    comm.barrier()
    before = used()
    for _ in range(5):
        comm.all_reduce(tensor := torch.ones(64 << 20, device="cuda"))
        torch.cuda.synchronize()
        del tensor
        torch.cuda.empty_cache()
        for _ in range(4):
            comm.all_reduce(torch.ones(LARGE, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    comm.barrier()
    assert used() - before < 600 << 20


def test_capturing_a_graph_is_refused(comm: Communicator) -> None:
    tensor = torch.ones(4, device="cuda")
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="graph is being captured"), torch.cuda.graph(graph):
        comm.all_reduce(tensor)
    comm.all_reduce(tensor)
    assert tensor.eq(4).all()


@pytest.mark.parametrize("count", [4, LARGE])
def test_a_cpu_tensor_among_cuda_tensors(comm: Communicator, count: int) -> None:
    warm = torch.ones(4, device="cuda")
    comm.all_reduce(warm)
    with comm.split([0, 1], label=f"mixed{count}") as group:
        group.all_reduce(torch.ones(4, device="cuda"))
        tensor = torch.ones(count, device="cpu" if comm.rank else "cuda")
        with pytest.raises(CollectiveMismatch):
            group.all_reduce(tensor)
        assert tensor.eq(1).all()
    with comm.split([0, 1], label=f"others{count}") as group:
        tensor = torch.ones(count + comm.rank, device="cuda")
        with pytest.raises(CollectiveMismatch):
            group.all_reduce(tensor)
        assert tensor.eq(1).all()


def test_calls_of_a_backward_pass_meet_in_the_order_of_the_program(comm: Communicator) -> None:
    large, small = torch.ones(LARGE, device="cuda"), torch.ones(4, device="cuda")
    other = torch.full((LARGE,), 2.0, device="cuda")
    works = []

    def reduce_some(_: torch.Tensor) -> None:
        large.mul_(comm.rank + 1)  # before the call, in stream order
        works.append(comm.all_reduce(large, async_op=True))
        works.append(comm.all_reduce(other, async_op=True))
        comm.all_reduce(small)
        works.append(comm.all_reduce(small, async_op=True))

    value = torch.ones(4, device="cuda", requires_grad=True)
    doubled = value * 2
    doubled.register_hook(reduce_some)
    doubled.sum().backward()
    for work in works:
        work.wait()
    assert large.eq(3).all()
    assert other.eq(4).all()
    assert small.eq(4).all()
