"""torch.distributed over hosts: every rank's result, for any placement of ranks."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import Places, places, world
from namespaces import MakeNetwork

import ranks
from ranks import RankPool, subgroup
from resources import assert_given_back, held_resources

PLACEMENTS = {
    "block": (0, 0, 1, 1),
    "cyclic": (0, 1, 0, 1),
    "uneven": (1, 0, 1, 1),
    "three": (0, 1, 2),
    "three-uneven": (0, 1, 1, 2, 2, 2),
}
SIZES = (1, 1000, 300_001)  # in one message, in a slot, in pieces


def data_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that differ from rank to rank and whose sums are exact in every type."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 5 - 2
    return numbers.to(dtype)


def check_collectives(rank: int, size: int, _: str, where: Places) -> None:
    with world(rank, where):
        for count in SIZES:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                check_every_collective(rank, size, count, dtype)
        check_messages(rank, size)
        check_objects(rank, size)
        check_groups(rank, size)


def check_every_collective(rank: int, size: int, count: int, dtype: torch.dtype) -> None:
    inputs = [data_of(other, count, dtype) for other in range(size)]
    total = torch.stack([each.double() for each in inputs]).sum(0)

    tensor = inputs[rank].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.double(), total)

    tensor = inputs[rank].clone()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert torch.equal(tensor, torch.stack(inputs).amax(0))

    tensor = inputs[rank].clone()
    dist.reduce(tensor, size - 1)
    if rank == size - 1:
        assert torch.equal(tensor.double(), total)

    root = size // 2
    tensor = inputs[rank].clone()
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, inputs[root])

    gathered = [torch.empty_like(each) for each in inputs]
    dist.all_gather(gathered, inputs[rank])
    assert all(map(torch.equal, gathered, inputs))

    whole = torch.cat([inputs[rank]] * size)
    part = torch.empty_like(inputs[rank])
    dist.reduce_scatter_tensor(part, whole)
    assert torch.equal(part.double(), total)

    sent = torch.cat([inputs[rank] + other for other in range(size)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, torch.cat([each + rank for each in inputs]))

    collected = [torch.empty_like(each) for each in inputs] if rank == 0 else None
    dist.gather(inputs[rank], collected, 0)
    if collected is not None:
        assert all(map(torch.equal, collected, inputs))

    part = torch.empty_like(inputs[0])
    dist.scatter(part, inputs if rank == root else None, root)
    assert torch.equal(part, inputs[rank])


def check_messages(rank: int, size: int) -> None:
    for count in (3, 200_000):
        received = torch.empty(count)
        work = dist.irecv(received, (rank - 1) % size, tag=5)
        other = torch.empty(2)
        early = dist.irecv(other, (rank - 1) % size, tag=6)
        sends = [
            dist.isend(torch.full((2,), float(rank + 100)), (rank + 1) % size, tag=6),
            dist.isend(torch.full((count,), float(rank)), (rank + 1) % size, tag=5),
        ]
        for each in (work, early, *sends):
            assert each is not None
            each.wait()
        assert received.eq((rank - 1) % size).all()
        assert other.eq((rank - 1) % size + 100).all()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            number = torch.empty(1)
            source = dist.recv(number)
            assert number.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def check_objects(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in gathered] == list(range(size))


def check_groups(rank: int, size: int) -> None:
    """Groups inside hosts, across them, and in another order than the world's."""
    every = [[0, size - 1], [size - 1, 0], list(range(1, size)), list(range(0, size, 2))]
    for members in every:
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
    dist.barrier()


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(name, marks=[] if name in ("cyclic", "uneven") else pytest.mark.slow)
        for name in PLACEMENTS
    ],
)
def test_every_collective(fresh_pool: RankPool, make_network: MakeNetwork, placement: str) -> None:
    of_rank = PLACEMENTS[placement]
    with make_network(max(of_rank) + 1) as made:
        fresh_pool.run(check_collectives, len(of_rank), places(made, of_rank), connected=False)


def test_over_ipv6_alone(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2, ipv4=False) as made:
        where = places(made, (0, 1), "ipv6")
        fresh_pool.run(check_collectives, 2, where, connected=False)


# -- bits ----------------------------------------------------------------------------------------


def sum_bits(rank: int, size: int, _: str, where: Places) -> list[bytes]:
    results = []
    with world(rank, where):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for count in (5, 4096, 700_001):
                torch.manual_seed(rank)
                tensor = torch.randn(count).to(dtype)
                again = tensor.clone()
                dist.all_reduce(tensor)
                results.append(tensor.view(torch.uint8).numpy().tobytes())
                parts = torch.cat([again] * size)
                mine = torch.empty_like(again)
                dist.reduce_scatter_tensor(mine, parts)
                assert torch.equal(mine, tensor), (dtype, count)
    return results


def in_order(where: Places, count: int, dtype: torch.dtype) -> bytes:
    """Rank order inside a host, hosts by their lowest rank, in float32, rounded once."""
    partials = []
    for host in dict.fromkeys(where.of_rank):
        partial = None
        for rank in range(where.size):
            if where.of_rank[rank] == host:
                torch.manual_seed(rank)
                brought = torch.randn(count).to(dtype).float()
                partial = brought if partial is None else partial + brought
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial  # type: ignore[operator]
    assert total is not None
    return bytes(total.to(dtype).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("of_rank", [(0, 1, 0, 1), (0, 1, 1, 2, 2)], ids=["cyclic", "uneven"])
def test_sums_are_added_in_the_order_of_hosts_at_every_size(
    fresh_pool: RankPool, make_network: MakeNetwork, of_rank: tuple[int, ...]
) -> None:
    with make_network(max(of_rank) + 1) as made:
        where = places(made, of_rank)
        results = fresh_pool.run(sum_bits, where.size, where, connected=False)
        again = [
            (d, c)
            for d in (torch.float32, torch.bfloat16, torch.float16)
            for c in (5, 4096, 700_001)
        ]
        expected = [in_order(where, count, dtype) for dtype, count in again]
    for result in results:
        assert result == expected


# -- bytes on the link ---------------------------------------------------------------------------


def count_bytes(rank: int, size: int, _: str, where: Places) -> dict[str, int]:
    count = 1 << 21  # of float32: 8 MiB
    whole, part, other = torch.zeros(count), torch.zeros(count // size), torch.zeros(count)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 1),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    sent = {}
    with world(rank, where):
        for name, call in calls.items():
            call()
            dist.barrier()
            before = where.host(rank).interface_bytes()[0]
            dist.barrier()
            call()
            dist.barrier()
            sent[name] = where.host(rank).interface_bytes()[0] - before
            dist.barrier()
    return sent


@pytest.mark.parametrize("placement", ["block", "cyclic"])
def test_the_link_carries_no_more_than_it_must(
    fresh_pool: RankPool, make_network: MakeNetwork, placement: str
) -> None:
    with make_network(2) as made:
        where = places(made, PLACEMENTS[placement])
        sent = fresh_pool.run(count_bytes, 4, where, connected=False)
    size_bytes = 8 << 20
    least = {"all_reduce": 1.0, "broadcast": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    least["all_to_all"] = 1.0
    for name, times in least.items():
        most = max(counted[name] for counted in sent)
        assert 0.99 * times * size_bytes <= most <= 1.1 * times * size_bytes, (name, most)


def count_bytes_of(
    rank: int, size: int, _: str, where: Places, dtype: str, options: dict[str, Any]
) -> int:
    tensor = torch.zeros((8 << 20) // getattr(torch, dtype).itemsize, dtype=getattr(torch, dtype))
    with world(rank, where) as comm:
        comm.all_reduce(tensor, **options)
        dist.barrier()
        before = where.host(rank).interface_bytes()[0]
        dist.barrier()
        comm.all_reduce(tensor, **options)
        dist.barrier()
        sent = where.host(rank).interface_bytes()[0] - before
        dist.barrier()
    return sent


@pytest.mark.parametrize(
    ("placement", "dtype", "options", "times"),
    [
        ("block", "bfloat16", {}, 1.5),
        ("block", "bfloat16", {"wire": "bfloat16"}, 1.0),
        ("block", "float32", {"wire": "bfloat16"}, 0.5),
        ("block", "float32", {"wire": "int8"}, 0.254),
        ("block", "float32", {"wire": "fp8"}, 0.254),
        ("block", "float32", {"reproducible": True}, 1.0),
        ("cyclic", "float32", {"reproducible": True}, 1.5),
    ],
)
def test_an_all_reduce_sends_what_its_form_promises(
    fresh_pool: RankPool,
    make_network: MakeNetwork,
    placement: str,
    dtype: str,
    options: dict[str, Any],
    times: float,
) -> None:
    with make_network(2) as made:
        where = places(made, PLACEMENTS[placement])
        sent = fresh_pool.run(count_bytes_of, 4, where, dtype, options, connected=False)
    assert 0.99 * times * (8 << 20) <= max(sent) <= 1.1 * times * (8 << 20)


# -- many groups, and what is left ---------------------------------------------------------------


def internet_sockets() -> int:
    """How many TCP sockets this process has."""
    table = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    inodes = {line.split()[9] for line in table.splitlines() if "local_address" not in line}
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the folder's own
    return sum(link.removeprefix("socket:[").rstrip("]") in inodes for link in links)


def lasting_threads() -> int:
    """How many threads this process has, but for those that ask the store once and end."""
    return sum(thread.name != "unisono asks a store" for thread in threading.enumerate())


def make_many_groups(rank: int, size: int, _: str, where: Places) -> tuple[int, int, int]:
    with world(rank, where) as comm:
        dist.barrier()
        first = internet_sockets()
        pairs = [comm.split(sorted({a, b})) for a in range(size) for b in range(a)]
        groups = [pair for pair in pairs if pair is not None]
        for group in groups:
            group.all_reduce(tensor := torch.ones(1))
            assert tensor.item() == group.size
        before = internet_sockets(), lasting_threads()
        labels = [str(number) for number in range(60)]
        groups += [subgroup(comm, range(size), label) for label in labels]
        groups += [subgroup(comm, order, "") for order in itertools.permutations(range(size))]
        for group in groups:
            group.all_reduce(tensor := torch.ones(1))
            assert tensor.item() == group.size
        after = internet_sockets(), lasting_threads()
        assert after == before, "a group takes neither a socket nor a thread"
        comm.barrier()
        for group in groups:
            group.close()
        comm.barrier()
        return first, before[0], len(groups)


def test_many_groups_share_few_connections(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    """A process has two listening sockets and a store, and for each process of another host that it
    talks to one connection for data, one line, and one to the store, which gloo keeps."""
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        counts = fresh_pool.run(make_many_groups, 4, where, connected=False)
    for rank, (first, after, groups) in enumerate(counts):
        assert groups >= 80
        assert first <= 3 + 3 * 1 + (rank == 0) * (1 + 4 * 2), counts  # rank 0 hosts the store
        assert after <= 3 + 3 * 2 + (rank == 0) * (1 + 4 * 3), counts


def come_and_go(rank: int, size: int, _: str, where: Places) -> None:
    for serial in range(4):
        with world(rank, where, serial=serial):
            dist.all_reduce(torch.ones(100_000))
        gc.collect()
        if serial == 1:
            held = held_resources()
    assert_given_back(held)


def drop_under_locks(rank: int, size: int, _: str, where: Places) -> None:
    with world(rank, where) as comm:
        dropped = [comm.split(range(size))]
        key, links = dropped[0].transport.key, comm.transport.links
        dropped.append(dropped)
        del dropped  # only the collector can free it
        assert key in links._parties
        with links._lock, threading._active_limbo_lock:  # type: ignore[attr-defined]
            gc.collect()
        while key in links._parties:
            time.sleep(0.01)
        comm.barrier()


def test_a_group_may_be_dropped_in_a_thread_that_has_a_lock(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    """The collector runs at any allocation, in any thread."""
    with make_network(2) as made:
        fresh_pool.run(drop_under_locks, 2, places(made, (0, 1)), connected=False)


def test_a_world_that_is_closed_leaves_nothing(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 1))
        fresh_pool.run(come_and_go, 2, where, connected=False)


ranks.preload("host_jobs")
