"""Groups with their own ranks, size and members, as trainers create them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from outside_groups import outside_group
from ranks import RankPool, attempt, raised
from unisono import PeerLost
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.torch_backend import autoload
from unisono.world.world import resolve


def start(path: str, rank: int, size: int) -> None:
    """torch's default group, over unisono."""
    store = dist.FileStore(path, size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size)


def use(group: Any, kind: type) -> None:
    """Collectives and messages use only the group's own ranks."""
    comm = resolve(group)
    assert isinstance(comm.transport, kind), comm
    assert (comm.rank, comm.size) == (group.rank(), group.size())
    assert comm.global_ranks is None
    dist.all_reduce(tensor := torch.full((3,), float(comm.rank)), group=group)
    assert tensor.tolist() == [sum(range(comm.size))] * 3
    dist.broadcast(tensor := torch.full((70_000,), float(comm.rank)), 1, group)
    assert tensor.eq(1).all()


def test_members_are_not_taken_for_those_of_the_world(fresh_pool: RankPool) -> None:
    """Rank 0 of the world dies meanwhile: ranks outside the new group do not matter."""
    dead, *others = fresh_pool.outcomes(make_groups, 4, connected=False)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in reversed(others):
        assert outcome.error is None, outcome.error


def make_groups(rank: int, size: int, path: str) -> None:
    autoload.register()
    os.environ["UNISONO_HOSTID"] = "AABB"[rank]
    without_a_world = outside_group("unisono", f"{path}-alone", "alone", rank, size)
    use(without_a_world, HostsTransport)
    assert resolve(without_a_world).name == "alone"
    dist.destroy_process_group(without_a_world)

    start(f"{path}-{rank // 2}", rank % 2, 2)  # a world on each host
    over_both = outside_group("unisono", f"{path}-both", "both", size - 1 - rank, size)
    use(over_both, HostsTransport)
    dist.destroy_process_group()

    start(f"{path}-all", rank, size)
    backwards = outside_group("unisono", f"{path}-backwards", "backwards", size - 1 - rank, size)
    use(backwards, HostsTransport)
    used = dist.FileStore(f"{path}-used", size)
    used.set(str(rank), "")
    if rank == 0:
        used.wait(["1", "2", "3"])
        os.kill(os.getpid(), signal.SIGKILL)
    assert raised(PeerLost, dist.barrier).peer == 0
    assert isinstance(attempt(dist.new_group), PeerLost)
    use(outside_group("unisono", f"{path}-rest", "rest", 3 - rank, 3), HostsTransport)
    if rank > 1:
        one_host = outside_group("unisono", f"{path}-one host", "one host", 3 - rank, 2)
        use(one_host, SharedMemory)
    dist.destroy_process_group()
