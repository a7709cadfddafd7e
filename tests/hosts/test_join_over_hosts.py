"""`Communicator.join` through a torch Store, wherever the processes run, and weight updates over
it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import PORT, Places, places
from namespaces import MakeNetwork

import ranks
from outside_groups import outside_group
from ranks import RankPool, attempt, raised
from resources import assert_given_back, held_resources
from unisono import Communicator, PeerLost, RendezvousError, WeightUpdateError
from unisono.collectives.objects import all_gather_object
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.torch_backend import autoload
from unisono.training import (
    WeightReceiver,
    WeightSender,
    init_weight_update_group,
    weight_update,
)
from unisono.world.world import resolve


@contextmanager
def store_on_host_0(rank: int, where: Places) -> Iterator[Any]:
    """A TCPStore that rank 0 hosts."""
    where.host(rank).enter()
    yield dist.TCPStore(where.host(0).ipv4, PORT, None, rank == 0, wait_for_workers=False)


def join_again_and_again(rank: int, size: int, _: str, where: Places) -> None:
    with store_on_host_0(rank, where) as store:
        held = None
        for turn, name in enumerate(("a", "b", "a")):
            with Communicator.join(name, rank, size, store, timeout_s=30) as comm:
                kind = HostsTransport if len(set(where.of_rank)) > 1 else None
                assert isinstance(comm.transport, kind or SharedMemory), comm
                assert (comm.rank, comm.size, comm.global_ranks) == (rank, size, None)
                comm.all_reduce(tensor := torch.full((300_000,), float(rank)))
                assert tensor.eq(sum(range(size))).all()
                pair = comm.split([0, size - 1])
                if pair is not None:
                    pair.all_reduce(tensor := torch.ones(2))
                    assert tensor.tolist() == [2, 2]
                    pair.close()
                comm.barrier()
            if turn == 1:
                held = held_resources()
        assert held is not None
        assert_given_back(held)
        if rank:  # and a process that joins with another size is told so
            error = raised(RendezvousError, Communicator.join, "c", rank, size + 1, store)
        else:
            error = raised(RendezvousError, Communicator.join, "c", rank, size, store)
        assert "joined a group of" in str(error) or "not join" in str(error)
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < size:
            pass


@pytest.mark.parametrize("of_rank", [(0, 0, 1, 1), (0, 1, 1), (0, 0)], ids=["2x2", "1+2", "one"])
def test_the_same_call_joins_ranks_of_one_host_or_many(
    fresh_pool: RankPool, make_network: MakeNetwork, of_rank: tuple[int, ...]
) -> None:
    with make_network(2) as made:
        where = places(made, of_rank)
        fresh_pool.run(join_again_and_again, len(of_rank), where, connected=False)


def join_after_a_death(rank: int, size: int, path: str, where: Places) -> Any:
    with store_on_host_0(rank, where) as store:
        if rank == 2:  # joins, and ends while it waits; another takes its place
            child = os.fork()
            if not child:
                again = dist.TCPStore(where.host(0).ipv4, PORT, None, False)
                again.set("early", "1")
                Communicator.join("x", rank, size, again, timeout_s=30)
                os._exit(1)
            store.get("early")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            store.set("gone", "1")
        else:
            store.get("gone")
        first = Communicator.join("x", rank, size, store, timeout_s=30)
        first.barrier()
        child = 0
        if rank == 2:
            first.close()
        else:
            error = attempt(first.barrier)
            assert isinstance(error, PeerLost), error
            first.close()
        with Communicator.join("x", rank, size, store, timeout_s=30) as second:
            second.all_reduce(tensor := torch.ones(1))
            second.barrier()
            return tensor.item()


def test_ranks_that_come_back_meet_again(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1))
        assert fresh_pool.run(join_after_a_death, 3, where, connected=False) == [3.0] * 3


def meet_beside_two_worlds(rank: int, size: int, path: str, where: Places) -> None:
    """As a trainer and an engine, each started by a launcher that knows only its own host."""
    with store_on_host_0(rank, where) as store:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        autoload.register()
        beside = where.beside(rank)
        own = dist.FileStore(f"{path}-{beside[0]}", len(beside))
        mine = {"rank": beside.index(rank), "world_size": len(beside)}
        dist.init_process_group("unisono", store=own, **mine)
        group = outside_group("unisono", store, "weights", rank, size)
        assert isinstance(resolve(group).transport, HostsTransport)
        dist.all_reduce(tensor := torch.full((100_000,), float(rank)), group=group)
        assert tensor.eq(sum(range(size))).all()
        dist.barrier(group)
        dist.destroy_process_group()


def test_a_group_of_two_worlds(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        fresh_pool.run(meet_beside_two_worlds, 4, where, connected=False)


# -- weights -------------------------------------------------------------------------------------


MIB = 1 << 20
COUNTS = (3 * MIB, 5, 4 * MIB + 7)


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((count,), value + at) for at, count in enumerate(COUNTS)}


def update_weights(rank: int, size: int, _: str, where: Places) -> tuple[int, int]:
    """The trainer on host 0 sends to engines on both; returns how much host 0 and host 1 have
    sent."""
    with store_on_host_0(rank, where) as store:
        with Communicator.join("w", rank, size, store, timeout_s=60) as comm:
            weights = weights_of(float(rank == 0))
            sender = WeightSender(comm, weights, deltas=False) if rank == 0 else None
            end: Any = sender or WeightReceiver(comm, weights)
            with end:
                end.update()
                before = counted(comm, where)
                end.update()
                after = counted(comm, where)
            for name, right in weights_of(1.0).items():
                assert torch.equal(weights[name], right), name
            comm.barrier()
        return after[0] - before[0], after[1] - before[1]


def counted(comm: Communicator, where: Places) -> list[int]:
    comm.barrier()
    sent = [host.interface_bytes()[0] for host in where.hosts]
    comm.barrier()
    return sent


def test_each_bucket_crosses_the_link_once_per_host(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1, 1))
        sent = fresh_pool.run(update_weights, 5, where, connected=False)
    size_bytes = 4 * sum(COUNTS)
    for by_trainer, by_engines in sent:
        assert size_bytes <= by_trainer <= 1.1 * size_bytes
        assert by_engines <= 0.1 * size_bytes


def fail_in_prepare(rank: int, size: int, _: str, where: Places) -> Any:
    def prepare(staged: Any) -> None:
        if rank == size - 1:
            raise RuntimeError("this engine is not well")

    with (
        store_on_host_0(rank, where) as store,
        Communicator.join("w", rank, size, store, timeout_s=60) as comm,
    ):
        weights = weights_of(float(rank == 0))
        end: Any
        if rank == 0:
            end = WeightSender(comm, weights)
        else:
            end = WeightReceiver(comm, weights, prepare=prepare)
        with end:
            error = raised(WeightUpdateError, end.update)
            assert not error.committed
            assert not error.group_ended
            assert "not well" in str(error)
        assert weights["w0"][0].item() == float(rank == 0)
        weight_update(weights, comm, src=0)
        assert weights["w0"][0].item() == 1.0
        for turn in range(20):
            comm.barrier()
            decided = comm.decide(1000 + turn, rank)
            assert all_gather_object(decided, comm) == [decided] * size
        store.set(f"gathered {rank}", "")
        store.wait([f"gathered {each}" for each in range(size)])  # an abort overtakes data
        comm.abort("it is over")
        assert comm.decide(1019, size) == decided, "it outlives the group"


def die_before_the_vote(rank: int, size: int, _: str, where: Places) -> Any:
    def prepare(staged: Any) -> None:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with store_on_host_0(rank, where) as store:
        comm = Communicator.join("w", rank, size, store, timeout_s=60)
        weights = weights_of(float(rank == 0))
        end: Any
        if rank == 0:
            end = WeightSender(comm, weights)
        else:
            end = WeightReceiver(comm, weights, prepare=prepare)
        error = raised(WeightUpdateError, end.update)
        assert error.group_ended
        assert not error.committed
        comm.close()
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < size - 1:
            pass
        return weights["w0"][0].item(), error.version, str(error)


def test_an_update_over_hosts_is_done_by_all_or_by_none(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        fresh_pool.run(fail_in_prepare, 4, where, connected=False)
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(die_before_the_vote, 4, where, connected=False)
    for rank, outcome in enumerate(outcomes[:3]):
        assert outcome.error is None, outcome.error
        value, _, text = outcome.value
        assert value == float(rank == 0)
        assert "rank 3" in text


def update_by_address(rank: int, size: int, _: str, where: Places) -> str:
    where.host(rank).enter()
    with init_weight_update_group(where.host(0).ipv4, PORT, rank, size, timeout_s=60) as group:
        if rank == 0:
            group.broadcast(torch.arange(1_000_000))
        else:
            received = group.receive("w", "int64", [1_000_000])
            assert torch.equal(received, torch.arange(1_000_000))
        group.comm.barrier()
        return group.comm.backend


def test_workers_on_another_host_than_the_trainer(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 1, 1))
        backends = fresh_pool.run(update_by_address, 3, where, connected=False)
    assert backends == ["unisono"] * 3


ranks.preload("host_jobs")
