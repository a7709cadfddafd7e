"""CUDA tensors of ranks whose GPUs allow no path, or whose devices differ: rejected on every rank,
with the ranks' names. There is no GPU: tensors only claim to be on one, and ranks only claim to
have one."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from test_hosts import world

from ranks import RankPool, attempt, raised
from unisono import CollectiveMismatch
from unisono.comm.communicator import Communicator
from unisono.comm.cuda import first_call
from unisono.comm.routing import transport_on_gpu


def say_that_this_rank_has(gpu: str) -> None:
    first_call._cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(),
        current_stream=lambda: SimpleNamespace(query=lambda: True, cuda_stream=0),
        get_device_properties=lambda device: SimpleNamespace(uuid=gpu, name="NVIDIA H200"),
    )


# -- over hosts ------------------------------------------------------------------------------------


def begin_on_gpu(comm: Communicator) -> Any:
    """Start a group's first call on CUDA tensors."""
    return transport_on_gpu(comm.transport, torch.device("cuda", 0), "all_reduce")


def test_a_shared_gpu_in_a_group_over_hosts(pool: RankPool) -> None:
    for text in pool.run(share_over_hosts, 3, connected=False):
        assert text.startswith("ranks of a group over several hosts share a GPU")
        assert "ranks 0 and 1 on NVIDIA H200 x of host " in text
        assert "rank 2 on NVIDIA H200 y of host " in text
        assert "give every rank its own GPU" in text


def share_over_hosts(rank: int, size: int, path: str) -> str:
    say_that_this_rank_has("xxy"[rank])
    with world(rank, path, "AAB") as comm:
        text = str(raised(ValueError, begin_on_gpu, comm))
        comm.all_reduce(there := torch.ones(2))  # the group goes on
        assert there.tolist() == [3, 3]
        return text


def test_a_gpu_for_each_rank_of_several_hosts_takes_nccl(pool: RankPool) -> None:
    for text in pool.run(own_a_gpu_each, 2, connected=False):
        assert "nccl needs a torch with CUDA" in text  # which is all that this machine lacks


def own_a_gpu_each(rank: int, size: int, path: str) -> str:
    say_that_this_rank_has("xy"[rank])
    with world(rank, path, "AB") as comm:
        error = attempt(begin_on_gpu, comm)
        comm.barrier()  # rank 0 hosts a store that rank 1 may still look for
        return str(error)


def test_a_cpu_tensor_among_cuda_tensors_over_hosts(pool: RankPool) -> None:
    for text in pool.run(mix_devices, 3, connected=False):
        assert text.startswith("rank 1 on A made a different call")
        assert "  rank 1 on A: a call on CUDA tensors" in text
        assert "  rank 0 on A: all_reduce of float32, 4 elements, sum" in text


def mix_devices(rank: int, size: int, path: str) -> str:
    say_that_this_rank_has("xyz"[rank])
    with world(rank, path, "AAB") as comm:
        if rank == 1:
            return str(raised(CollectiveMismatch, begin_on_gpu, comm))
        return str(raised(CollectiveMismatch, comm.all_reduce, torch.ones(4)))


# -- on one host -----------------------------------------------------------------------------------


def meet(comm: Communicator, folder: str, gpu: str) -> Any:
    """Start a group's first call on CUDA tensors, on ranks that say which GPU they have."""
    import replaced_driver

    os.environ["REPLACED_DRIVER_FOLDER"] = folder
    replaced_driver.install()
    say_that_this_rank_has(gpu)
    return begin_on_gpu(comm)


def test_some_ranks_share_a_gpu_and_others_do_not(cuda_pool: RankPool, memory_folder: str) -> None:
    for text in cuda_pool.run(share_partly, 3, memory_folder):
        assert "some ranks of this group share a GPU and others do not" in text
        assert "ranks 0 and 2 on NVIDIA H200 GPU-x of host " in text
        assert "rank 1 on NVIDIA H200 GPU-y of host " in text


def share_partly(comm: Communicator, folder: str) -> str:
    error = raised(ValueError, lambda: meet(comm, folder, "GPU-" + "xyx"[comm.rank]))
    comm.all_reduce(there := torch.ones(2))  # the group goes on
    assert there.tolist() == [3, 3]
    return str(error)


def test_a_cpu_tensor_among_cuda_tensors(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(mix_devices_on_one_host, 3, memory_folder) == [None] * 3


def mix_devices_on_one_host(comm: Communicator, folder: str) -> None:
    with comm.split(range(comm.size), label="mixed") as group:
        if comm.rank == 1:
            raised(CollectiveMismatch, lambda: meet(group, folder, "GPU-x"))
        else:
            tensor = torch.ones(4)
            raised(CollectiveMismatch, lambda: group.all_reduce(tensor))
            assert tensor.tolist() == [1] * 4
