"""New processes join a group from any host, through a store that outlives every rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import PORT, Places, places
from namespaces import MakeNetwork

from ranks import Outcome, RankPool, raised
from unisono import Communicator, PeerLost, RendezvousError
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.shared_memory.memory_transport import SharedMemory


@contextmanager
def store_of_the_last(rank: int, where: Places) -> Iterator[Any]:
    """A TCPStore that the last process hosts, on its own host; it stays until all are done."""
    where.host(rank).enter()
    hosts = rank == where.size - 1
    store = dist.TCPStore(
        where.host(where.size - 1).ipv4, PORT, None, hosts, wait_for_workers=False
    )  # type: ignore[attr-defined]
    try:
        yield store
        store.add("done", 0 if hosts else 1)
    except BaseException:
        store.add("done", 1)
        raise
    if hosts:
        while store.add("done", 0) < len(where.of_rank) - 1:
            time.sleep(0.05)


def works(comm: Communicator) -> tuple[int, int, int]:
    x = torch.full((50_000,), 1.0 + comm.rank)
    comm.all_reduce(x)
    assert x.eq(sum(range(1, comm.size + 1))).all()
    comm.barrier()
    return comm.rank, comm.size, comm.generation


def grow_or_come(rank: int, size: int, _: str, where: Places, wanted: dict[int, int]) -> Any:
    """Two members, then three, then four, as the others join."""
    with store_of_the_last(rank, where) as store:
        if rank == size - 1:
            return None
        if rank >= 2:
            with Communicator.join("job", wanted.get(rank), store=store, timeout_s=60) as comm:
                return works(comm)
        with Communicator.join("job", rank, 2, store, timeout_s=60) as pair:
            assert isinstance(pair.transport, SharedMemory)
            with pair.grow("job", size - 3, store=store) as comm:
                assert isinstance(comm.transport, HostsTransport)
                assert works(pair) == (rank, 2, 0)
                return works(comm)


def values(outcomes: list[Outcome], dead: tuple[int, ...] = ()) -> list[Any]:
    left = [rank for rank in range(len(outcomes)) if rank not in dead]
    errors = [error for rank in left if (error := outcomes[rank].error)]
    assert not errors, "\n".join(errors)
    return [outcomes[rank].value for rank in left][:-1]


def test_processes_of_other_hosts_come_in(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(3) as made:
        where = places(made, (0, 0, 1, 1, 2))
        outcomes = fresh_pool.outcomes(grow_or_come, 5, where, {2: 0}, connected=False)
    assert values(outcomes) == [(1, 4, 1), (2, 4, 1), (0, 4, 1), (3, 4, 1)]


def come_back(rank: int, size: int, _: str, where: Places, dead: tuple[int, ...]) -> Any:
    """Four ranks lose some, shrink and grow again, through a store that none of them hosts."""
    with store_of_the_last(rank, where) as store:
        if rank == size - 1:
            return None
        if rank >= 4:
            comm = Communicator.join("job", dead[rank - 4], store=store, timeout_s=60)
            return works(comm)
        comm = Communicator.join("job", rank, 4, store, timeout_s=60)
        works(comm)
        store.set(f"worked {rank}", "")
        store.wait([f"worked {each}" for each in range(4)])  # a death overtakes data
        if rank in dead:
            store.add("done", 1)
            os.kill(os.getpid(), signal.SIGKILL)
        raised(PeerLost, lambda: [comm.barrier() for _ in range(1 << 20)])
        left = comm.shrink(store=store)
        works(left)
        comm.close()
        grown = left.grow("job", len(dead), store=store)
        left.close()
        return works(grown)


@pytest.mark.parametrize("dead", [(2, 3), (0, 1), (0, 3)], ids=str)
def test_a_host_comes_back(
    fresh_pool: RankPool, make_network: MakeNetwork, dead: tuple[int, ...]
) -> None:
    """Including rank 0; the remaining ranks are on one host, or on two."""
    with make_network(3) as made:
        host_of = (0, 0, 1, 1)
        where = places(made, (*host_of, host_of[dead[0]], host_of[dead[1]], 2))
        outcomes = fresh_pool.outcomes(come_back, 7, where, dead, connected=False)
    left = [rank for rank in range(4) if rank not in dead]
    assert values(outcomes, dead) == [(rank, 4, 2) for rank in (*left, *dead)]


def lose_a_newcomer(rank: int, size: int, _: str, where: Places) -> Any:
    """Process 2 dies while it waits, and 3 takes its place."""
    with store_of_the_last(rank, where) as store:
        if rank == size - 1:
            return None
        if rank == 2:
            store.add("done", 1)
            signal.setitimer(signal.ITIMER_REAL, 3.0)  # SIGALRM ends the process
        if rank == 3:
            store.wait(["not enough"])
        if rank >= 2:
            return works(Communicator.join("job", 2, store=store, timeout_s=60))
        pair = Communicator.join("job", rank, 2, store, timeout_s=60)
        error = raised(RendezvousError, lambda: pair.grow("job", 2, store=store, timeout_s=5))
        assert "did not join within 5 s" in str(error) or rank
        store.set("not enough", "")
        with pair.grow("job", store=store) as three:
            told = works(three)
        works(pair)
        return told


def test_a_newcomer_that_ends_is_not_counted(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(3) as made:
        where = places(made, (0, 1, 1, 0, 2))
        outcomes = fresh_pool.outcomes(lose_a_newcomer, 5, where, connected=False)
    assert values(outcomes, (2,)) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]


def lose_a_member(rank: int, size: int, _: str, where: Places, dying: int) -> Any:
    with store_of_the_last(rank, where) as store:
        if rank == size - 1:
            return None
        comm = Communicator.join("job", rank, 3, store, timeout_s=60)
        works(comm)
        if rank == dying:
            store.add("done", 1)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        raised(PeerLost, lambda: comm.grow("job", store=store))
        return works(comm.shrink(store=store))


@pytest.mark.parametrize("dying", [0, 2])
def test_a_member_dies_while_newcomers_are_awaited(
    fresh_pool: RankPool, make_network: MakeNetwork, dying: int
) -> None:
    with make_network(3) as made:
        where = places(made, (0, 0, 1, 2))
        outcomes = fresh_pool.outcomes(lose_a_member, 4, where, dying, connected=False)
    assert values(outcomes, (dying,)) == [(0, 2, 1), (1, 2, 1)]
