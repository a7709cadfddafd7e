"""Weights that are shared tensors: engines receive them like any others, or serve them in place."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

import unisono
from ranks import RankPool, connect, raised
from unisono import Communicator, WeightMismatch, WeightUpdateError
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.training import WeightReceiver, WeightSender, WeightShard, weight_update


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(70, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 50, bias=False)
    )
    made[2].weight.data = made[2].weight.data.t()  # with other strides
    tied = torch.nn.Linear(70, 50)
    tied.weight = made[0].weight
    return made.append(tied)


def change(module: torch.nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Fill a trainer's weights again, in place; returns the new values."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_((torch.rand(tensor.shape, generator=generator) * 100).to(tensor.dtype))
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(weights: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("transactional", [True, False])
def test_engines_receive_a_trainers_shared_tensors(comm: Communicator, transactional: bool) -> None:
    mine = model(comm.rank)
    if comm.rank == 0:
        unisono.share_module(mine, comm)
    else:
        comm.empty(0)  # engines keep their own memory
    wanted = [change(model(0), step) for step in range(3)]
    if comm.rank == 0:
        options = {"transactional": transactional, "bucket_bytes": 4096}
        endpoint: Any = WeightSender(comm, mine, **options)
    else:
        endpoint = WeightReceiver(comm, mine)
    with endpoint:
        for step, expected in enumerate(wanted):
            if comm.rank == 0:
                change(mine, step)
            update = endpoint.update()
            assert_equal(mine.state_dict(), expected)
            assert update.bytes > 4 * 50 * 70
            assert update.buckets > 3
        assert not comm.rank or not comm.is_shared(mine[0].weight)


@pytest.mark.ranks(3)
def test_shards_and_ordinary_tensors_beside_shared_ones(comm: Communicator) -> None:
    whole = torch.arange(24.0).view(6, 4)
    rows = unisono.share_tensor(whole[3 * (comm.rank % 2) :][:3].clone(), comm)
    if comm.rank < 2:
        weights = {
            "cut": WeightShard(rows, (6, 4), (3 * comm.rank, 0)),
            "plain": torch.full((5,), 7.0),
            "half": unisono.share_tensor(torch.full((3,), 1.5, dtype=torch.float64), comm),
        }
        WeightSender(comm, weights, convert=True).update()
        return
    unisono.share_tensor(torch.zeros(1), comm)
    served: dict[str, Any] = {
        "cut": WeightShard(torch.zeros(4, 2), (6, 4), (1, 1)),  # from both senders
        "plain": torch.zeros(5),
        "half": torch.zeros(3),
    }
    WeightReceiver(comm, served).update()
    assert torch.equal(served["cut"].tensor, whole[1:5, 1:3])
    assert served["plain"].tolist() == [7.0] * 5
    assert served["half"].tolist() == [1.5] * 3


# -- served where they lie -------------------------------------------------------------------------


@pytest.mark.ranks([2, 3])
def test_an_engine_serves_the_trainers_memory(comm: Communicator) -> None:
    mine = model(comm.rank)
    objects = [id(tensor) for tensor in mine.parameters()]
    if comm.rank == 0:
        unisono.share_module(mine, comm)
        with WeightSender(comm, mine) as sender:
            for step in range(2):
                change(mine, step)
                assert sender.update().version == step + 1
                comm.barrier()  # the engines have served
        with torch.no_grad():
            mine[0].bias.fill_(-1)
        comm.barrier()
        comm.barrier()
        return
    comm.empty(0)
    is_alias = comm.rank == 1  # the third rank has a copy
    with WeightReceiver(comm, mine, alias=is_alias) as receiver:
        for step in range(2):
            update = receiver.update()
            assert_equal(mine.state_dict(), change(model(0), step))
            assert (update.bytes == 0) == is_alias
            assert update.tensors == 9  # one of two tied weights
            assert comm.is_shared(mine[2].weight) == is_alias
            comm.barrier()
    comm.barrier()
    assert bool((mine[0].bias == -1).all()) == is_alias
    assert [id(tensor) for tensor in mine.parameters()] == objects
    assert mine[0].weight is mine[3].weight
    comm.barrier()


@pytest.mark.ranks(2)
def test_an_engine_without_weights_is_handed_the_trainers_memory(comm: Communicator) -> None:
    if comm.rank == 0:
        mine = unisono.share_module(model(0), comm)
        WeightSender(comm, mine).update()
        comm.barrier()
        mine[1].running_mean[3] = 5
        comm.barrier()
        comm.barrier()
        return
    comm.empty(0)
    served: dict[str, torch.Tensor] = {}
    WeightReceiver(comm, alias=True, commit=served.update).update()
    assert served["0.weight"].data_ptr() == served["3.weight"].data_ptr()
    comm.barrier()
    comm.barrier()
    assert served["1.running_mean"][3] == 5
    comm.barrier()


@pytest.mark.ranks(2)
def test_what_cannot_be_served_is_refused_before_anything_changes(comm: Communicator) -> None:
    weights = {"w": torch.full((3,), float(comm.rank))}
    options: Any = {"alias": True} if comm.rank else {}
    update = partial(weight_update, group=comm, **options)
    error: Exception = raised(WeightMismatch, update, weights)
    assert "rank 1: alias=True, but it is not a shared tensor of this group" in str(error)
    assert "share_module" in str(error)
    shared = {"w": unisono.share_tensor(weights["w"], comm)}
    double = {"w": torch.zeros(3, dtype=torch.float64)}
    converting = partial(update, **{} if comm.rank else {"convert": True})
    error = raised(WeightMismatch, converting, double if comm.rank else shared)
    assert "alias=True, but the engine has float64" in str(error)
    whole = torch.zeros(6)
    seen = {"w": whole[:3]}  # there is another view of the engine's memory
    error = raised(WeightUpdateError, update, seen if comm.rank else shared)
    assert "cannot be replaced by the trainer's" in str(error)
    assert "serve the trainer's memory as it is" in str(error)
    assert weights["w"].tolist() == [comm.rank] * 3


@pytest.mark.ranks(2)
def test_a_trainer_whose_memory_is_elsewhere_now(comm: Communicator) -> None:
    mine = model(5)
    if comm.rank:
        receiver = WeightReceiver(comm, mine, alias=True)
    for step in range(3):
        if comm.rank == 0:
            trained = unisono.share_module(model(step), comm)
            WeightSender(comm, trained).update()
            comm.barrier()
        else:
            comm.empty(0)
            receiver.update()
            assert_equal(mine.state_dict(), model(step).state_dict())
            comm.barrier()


def test_the_trainers_memory_outlives_the_trainer(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(die_while_an_engine_serves, 2, connected=False)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert outcomes[1].error is None, outcomes[1].error
    assert outcomes[1].value == "served"


def die_while_an_engine_serves(rank: int, size: int, path: str) -> str:
    comm = connect(path, rank, size)
    mine = model(rank)
    if rank == 0:
        unisono.share_module(mine, comm)
        change(mine, 1)
        WeightSender(comm, mine).update()
        os.kill(os.getpid(), signal.SIGKILL)
    comm.empty(0)
    receiver = WeightReceiver(comm, mine, alias=True)
    receiver.update()
    error = raised(WeightUpdateError, receiver.update)
    assert error.group_ended
    assert error.failed.keys() == {0}
    expected = change(model(0), 1)
    assert_equal(mine.state_dict(), expected)
    receiver.close()
    comm.close()
    assert_equal(mine.state_dict(), expected)
    assert isinstance(comm.transport, SharedMemory)
    with torch.no_grad():  # only this engine has it now
        mine[0].bias.zero_()
    mine.eval()
    assert mine[0](torch.zeros(1, 70)).abs().sum() == 0
    return "served"
