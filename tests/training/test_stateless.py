"""The communicator with the interface of vLLM's PyNcclCommunicator: as TRL and OpenRLHF call it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_weight_groups import free_port

from ranks import RankPool, attempt, raised
from unisono import CollectiveMismatch, CollectiveTimeout, PeerLost
from unisono.training import StatelessCommunicator, stateless_init_process_group

LIMIT_S = 60.0
SOON_S = 10.0


@dataclass
class StatelessProcessGroup:
    """What vLLM's has, and a barrier of its own."""

    rank: int
    world_size: int
    store: Any

    def barrier(self) -> None:
        raise AssertionError("this one would not notice a death")

    def broadcast_obj(self, value: Any) -> Any:
        return value


def meet(rank: int, size: int, port: int) -> StatelessProcessGroup:
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    return StatelessProcessGroup(rank, size, store)


def run(pool: RankPool, function: Any, ranks: int) -> list[Any]:
    return pool.run(function, ranks, free_port(), connected=False)


def test_the_trainer_may_be_the_last_rank_and_both_sides_broadcast(pool: RankPool) -> None:
    run(pool, update_as_trl_does, 3)


def update_as_trl_does(rank: int, size: int, _: str, port: int) -> None:
    trainer = size - 1
    group = meet(rank, size, port)
    communicator = StatelessCommunicator(group, device="cpu", timeout_s=LIMIT_S)
    for value in (1, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
            sent = torch.full((3, 5), value).to(dtype)
            weight = sent if rank == trainer else torch.zeros_like(sent)
            communicator.broadcast(weight, src=trainer, stream=None)
            communicator.group.barrier()
            assert torch.equal(weight.view(torch.uint8), sent.view(torch.uint8))
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)).T)  # any layout, with grad
    communicator.broadcast(parameter, src=trainer)
    assert parameter.eq(trainer).all()
    assert communicator.group.broadcast_obj(3) == 3  # everything else is the group's own
    assert communicator.group.rank == rank


def test_a_communicator_that_was_destroyed_says_so(pool: RankPool) -> None:
    run(pool, destroy, 2)


def destroy(rank: int, size: int, _: str, port: int) -> None:
    one = stateless_init_process_group("127.0.0.1", port, rank, size, "cpu", timeout_s=LIMIT_S)
    one.group.barrier()
    one.destroy()
    assert one.disabled


def test_one_store_serves_several(pool: RankPool) -> None:
    run(pool, make_two_over_one_store, 2)


def make_two_over_one_store(rank: int, size: int, _: str, port: int) -> None:
    group = meet(rank, size, port)
    first, second = (StatelessCommunicator(group, timeout_s=LIMIT_S) for _ in range(2))
    for value, communicator in enumerate((second, first)):
        tensor = torch.full((2,), value if rank == 1 else 9)
        communicator.broadcast(tensor, src=1)
        assert tensor.eq(value).all()


def test_who_dies_is_noticed_at_once_and_no_call_waits_for_ever(
    fresh_pool: RankPool,
) -> None:
    first, dead, last = fresh_pool.outcomes(lose_a_worker, 3, free_port(), connected=False)
    assert dead.exit_code == -signal.SIGKILL
    assert first.error is None, first.error
    assert last.error is None, last.error


def lose_a_worker(rank: int, size: int, _: str, port: int) -> None:
    one = stateless_init_process_group("127.0.0.1", port, rank, size, timeout_s=LIMIT_S)
    one.broadcast(torch.ones(2), src=2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.perf_counter()
    lost = raised(PeerLost, one.broadcast, torch.ones(2), 2)
    raised(PeerLost, one.group.barrier)
    assert time.perf_counter() - begin_s < SOON_S
    assert lost.peer == 1


def test_what_does_not_fit(pool: RankPool) -> None:
    run(pool, try_what_does_not_fit, 2)


def try_what_does_not_fit(rank: int, size: int, _: str, port: int) -> None:
    one = stateless_init_process_group("127.0.0.1", port, rank, size, timeout_s=LIMIT_S)
    raised(CollectiveMismatch, one.broadcast, torch.ones(2 + rank), 0)
    again = stateless_init_process_group("127.0.0.1", port, rank, size, timeout_s=LIMIT_S)
    if rank == 1:
        assert isinstance(attempt(again.group.barrier, 0.2), CollectiveTimeout)
        again.group.store.set("heard", "")
    else:  # the process that hosts the store stays
        again.group.store.get("heard")


def test_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="has no 'rank'"):
        StatelessCommunicator(object())
