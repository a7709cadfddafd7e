"""Over hosts the survivors continue, and never in two groups."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import PORT, Places, await_all, places, world
from namespaces import MakeNetwork, Network, start_on

import unisono
from ranks import Outcome, RankPool, attempt, raised
from unisono import Communicator, GroupError, NoQuorum, PeerLost
from user_programs import plain_environment


def go_on(comm: Communicator, **how: Any) -> Any:
    """Fail in a call, then shrink; returns the new group's properties and result, or why there is
    none."""

    def call() -> None:
        while True:
            comm.all_reduce(torch.ones(100))

    error = attempt(call)
    assert isinstance(error, PeerLost), error
    begin = time.monotonic()
    try:
        left = comm.shrink(**how)
    except NoQuorum as refused:
        return str(refused)
    assert left.global_ranks is not None
    x = torch.full((10_000,), float(left.global_ranks[left.rank]))
    left.all_reduce(x)
    took_s = time.monotonic() - begin
    assert took_s < 20
    assert x.eq(sum(left.global_ranks)).all()
    left.barrier()
    left.close()
    return left.global_ranks


def lose(rank: int, size: int, path: str, where: Places, victims: tuple[int, ...]) -> Any:
    with world(rank, where) as comm:
        comm.all_reduce(torch.ones(100))
        await_all(path, rank, size)
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(comm)


def values(outcomes: list[Outcome], victims: tuple[int, ...]) -> list[Any]:
    left = [rank for rank in range(len(outcomes)) if rank not in victims]
    errors = [error for rank in left if (error := outcomes[rank].error)]
    assert not errors, "\n".join(errors)
    return [outcomes[rank].value for rank in left]


@pytest.mark.parametrize("victims", [(3,), (1,), (2, 3), (1, 2)], ids=str)
def test_survivors_of_two_hosts_go_on(
    fresh_pool: RankPool, make_network: MakeNetwork, victims: tuple[int, ...]
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(lose, 4, where, victims, connected=False)
    left = tuple(rank for rank in range(4) if rank not in victims)
    assert values(outcomes, victims) == [left] * len(left)


@pytest.mark.parametrize("victims", [(0,), (0, 1), (0, 3)], ids=str)
def test_survivors_of_the_process_that_hosts_the_store(
    fresh_pool: RankPool, make_network: MakeNetwork, victims: tuple[int, ...]
) -> None:
    """It dies with rank 0: the first remaining rank hosts another."""
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(lose, 4, where, victims, connected=False)
    left = tuple(rank for rank in range(4) if rank not in victims)
    assert values(outcomes, victims) == [left] * len(left)


def go_on_in_torch(rank: int, size: int, path: str, where: Places) -> Any:
    with world(rank, where) as comm:
        comm.barrier()
        await_all(path, rank, size)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raised(PeerLost, lambda: [dist.barrier() for _ in range(1 << 20)])
        unisono.set_world(comm.shrink())
        dist.all_reduce(x := torch.full((10,), 1.0 + dist.get_rank()))
        pair = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.all_reduce(x, group=pair)
        dist.barrier()
        unisono.shutdown()
        return x[0].item()


def test_torch_goes_on(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    """Its default group is created again over the remaining ranks."""
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(go_on_in_torch, 4, where, connected=False)
    assert values(outcomes, (1,)) == [12, 6, 12]


def be_cut_off(rank: int, size: int, path: str, where: Places, cut: int) -> Any:
    with world(rank, where) as comm:
        comm.all_reduce(torch.ones(100))
        await_all(path, rank, size)
        if rank == size - 1:
            where.hosts[cut].cut()
        return go_on(comm)


def test_two_hosts_that_lose_each_other(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(be_cut_off, 4, where, 1, connected=False)
    here, there = values(outcomes, ())[:2], values(outcomes, ())[2:]
    for text in here:
        assert "ranks 2 and 3 may be alive" in text
        assert "no majority" in text
    for text in there:
        assert "ranks 0 and 1 may be alive" in text
        assert "no majority" in text


@pytest.mark.parametrize("cut", [0, 2])
def test_the_majority_goes_on(fresh_pool: RankPool, make_network: MakeNetwork, cut: int) -> None:
    """Also without host 0 and the store."""
    with make_network(3) as made:
        where = places(made, (0, 1, 1, 2))
        outcomes = fresh_pool.outcomes(be_cut_off, 4, where, cut, connected=False)
    found = values(outcomes, ())
    alone = 3 if cut else 0
    assert "no majority" in found.pop(alone)
    assert found == [tuple(rank for rank in range(4) if rank != alone)] * 3


def have_an_arbiter(rank: int, size: int, path: str, where: Places) -> Any:
    """Rank 4 hosts a store on a third host, which has no rank of the group."""
    at = where.hosts[2]
    if rank == 4:
        at.enter()
        store = dist.TCPStore(at.ipv4, PORT + 9, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        store.wait(["done"])
        return None
    group = Places(where.hosts[:2], where.of_rank[:4])
    with world(rank, group) as comm:
        store = dist.TCPStore(at.ipv4, PORT + 9, None, False)  # type: ignore[attr-defined]
        comm.barrier()
        await_all(path, rank, 4)
        if rank < 2:
            if rank == 0:
                where.hosts[0].cut()
            return go_on(comm, store=store)
        found = go_on(comm, store=store)
        if rank == 2:
            store.set("done", "")
        return found


def test_a_store_that_was_named_decides(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    """The host of rank 0 and its store is cut off, and the other, without a majority, continues."""
    with make_network(3) as made:
        where = places(made, (0, 0, 1, 1, 2))
        outcomes = fresh_pool.outcomes(have_an_arbiter, 5, where, connected=False)
    found = values(outcomes, (4,))
    assert found[2:] == [(2, 3)] * 2
    for text in found[:2]:
        assert "cannot continue" in text


def test_training_that_goes_on(two_hosts: Network, tmp_path: Path) -> None:
    """examples/survive.py: each host loses ranks, which are replaced."""
    example = str(Path(__file__).parents[2] / "examples" / "survive.py")
    store = f"{two_hosts.hosts[0].ipv4}:{PORT}"
    command = [sys.executable, example, "--kills", "2", "--every", "0.2", "--store", store]
    command += ["--seconds", "250"]
    environment = plain_environment() | {"OMP_NUM_THREADS": "1"}
    started = []
    for number, host in enumerate(two_hosts.hosts):
        own = [*command, "--host", str(number), "--folder", str(tmp_path)]
        started.append(start_on(host, own, tmp_path / f"host{number}", environment))
    for process in started:
        assert process.wait(300, started) == 0, process.text()
        assert "2 ranks killed and replaced here" in process.text()


# -- a host whose processes are stopped ------------------------------------------------------------


def lose_a_stopped_host(rank: int, size: int, path: str, where: Places, stopped: int) -> Any:
    """How long a shrink takes that waits 8 s for ranks of which nothing is known."""
    with world(rank, where, timeout_s=4.0) as comm:
        pids: list[int] = unisono.all_gather_object(os.getpid(), group=comm)
        await_all(path, rank, size)
        others = [other for other in range(size) if other != stopped]
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
            return attempt(comm.barrier)
        error = attempt(lambda: [comm.all_reduce(torch.ones(100)) for _ in range(100_000)])
        assert isinstance(error, GroupError), error
        begin_s = time.monotonic()
        try:
            left = comm.shrink(timeout_s=8.0)
            took_s = time.monotonic() - begin_s
            assert left.global_ranks == tuple(others)
            x = torch.ones(10_000)
            left.all_reduce(x)
            assert x.eq(left.size).all()
        finally:
            await_all(f"{path}-after", others.index(rank), len(others))
            if rank == others[0]:
                os.kill(pids[stopped], signal.SIGCONT)
        left.close()
        return took_s


@pytest.mark.slow
@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 2, 3)], ids=["three", "four"])
@pytest.mark.parametrize("stopped", [0, 2], ids=["of-the-store", "another"])
def test_the_others_go_on_without_a_stopped_host(
    fresh_pool: RankPool, make_network: MakeNetwork, placement: tuple[int, ...], stopped: int
) -> None:
    with make_network(len(placement)) as made:
        where = places(made, placement)
        size = len(placement)
        took = fresh_pool.run(lose_a_stopped_host, size, where, stopped, connected=False)
    assert all(took_s < 45.0 for rank, took_s in enumerate(took) if rank != stopped), took
