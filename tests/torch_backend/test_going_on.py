"""After a death torch.distributed continues on the group of the survivors, and on a grown one: with
`set_world`, and with torch's own shrink_group and reconfigure."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import unisono
from ranks import RankPool, raised
from torch_names import since_2_15
from unisono import GroupAborted, GroupClosed, PeerLost, UnisonoError
from unisono.torch_backend.groups import connect_group
from unisono.torch_backend.process_group import HAS_PYTHON_BACKENDS, UnisonoProcessGroup
from unisono.training import catch_up

MIXED = "cpu:unisono,meta:gloo"  # torch asks the accelerator's backend, if there is one
BOTH = pytest.mark.parametrize("backend", ["unisono", MIXED])
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for groups without GPUs")


def test_torch_goes_on_with_the_survivors_and_a_newcomer(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(go_on_with_ddp, 4, connected=False)
    for rank in (0, 2, 3):
        assert outcomes[rank].value == [(2, 3.0), (3, 6.0)][rank == 3 :], outcomes[rank].error


def go_on_with_ddp(rank: int, size: int, path: str) -> object:
    """Ranks 0 to 2 start, rank 1 dies, and rank 3 takes its place. Returns the sum in each
    world."""
    found = []
    model, optimizer = make(rank)
    step = 0
    if rank < 3:
        dist.init_process_group("unisono", store=dist.FileStore(path), rank=rank, world_size=3)  # type: ignore[attr-defined]
        train(model, optimizer)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world = unisono.get_world()
        raised(PeerLost, dist.barrier)
        unisono.set_world(world.shrink())
        step = train(model, optimizer)
        found.append((dist.get_world_size(), count()))
        unisono.set_world(unisono.get_world().grow(path))
    else:
        unisono.set_world(unisono.Communicator.join(path, rank=1))
        assert dist.get_rank() == 1
    assert catch_up(model, optimizer, step=step) == 2
    train(model, optimizer)
    states = unisono.all_gather_object([p.tolist() for p in model.parameters()])
    assert states == [states[0]] * 3
    found.append((dist.get_world_size(), count()))
    unisono.shutdown()
    assert not dist.is_initialized()
    return found


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> int:
    synced = DDP(model, process_group=group)  # one dropped before backward averages nothing
    synced(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return 2


def count() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return float(x)


# -- shrink_group --------------------------------------------------------------------------------


def after_shrink_group(rank: int, size: int, path: str, backend: str, flags: int) -> object:
    """Rank 1 of 4 dies; the others shrink the default group, train on, and shrink again."""
    dist.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised(PeerLost, dist.barrier)
    group = dist.shrink_group([1], shrink_flags=flags)
    assert group is dist.group.WORLD
    assert unisono.get_world().size == dist.get_world_size() == 3
    found = [(dist.get_rank(), count())]
    train(*make(rank))
    if dist.get_rank() == 0:  # lives on, but does not take part
        dist.destroy_process_group()
        return found
    dist.shrink_group([0])
    found.append((dist.get_rank(), count()))
    dist.destroy_process_group()
    return found


@since_2_15
@without_gpu
@BOTH
@pytest.mark.parametrize("flags", [0, 1])
def test_torch_shrinks_groups_of_ours(fresh_pool: RankPool, backend: str, flags: int) -> None:
    outcomes = fresh_pool.outcomes(after_shrink_group, 4, backend, flags, connected=False)
    for rank, expected in {0: [(0, 6.0)], 2: [(1, 6.0), (0, 3.0)], 3: [(2, 6.0), (1, 3.0)]}.items():
        assert outcomes[rank].value == expected, outcomes[rank].error


@since_2_15
@without_gpu
@BOTH
def test_a_subgroup_shrinks_alone(pool: RankPool, backend: str) -> None:
    pool.run(shrink_a_subgroup, 3, backend, connected=False)


def shrink_a_subgroup(rank: int, size: int, path: str, backend: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size)
    group = dist.new_group([0, 1, 2])
    if rank < 2:
        pair = dist.shrink_group([2], group=group)
        dist.all_reduce(x := torch.ones(1), group=pair)
        assert (float(x), pair.size(), pair.rank()) == (2, 2, rank)
        train(*make(rank), pair)
    dist.barrier()
    dist.destroy_process_group()


@since_2_15
@without_gpu
@BOTH
def test_invalid_calls_of_shrink_group_leave_the_group_as_it_was(
    pool: RankPool, backend: str
) -> None:
    pool.run(shrink_wrongly, 2, backend, connected=False)


def shrink_wrongly(rank: int, size: int, path: str, backend: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size)
    raised(ValueError, dist.shrink_group, [])
    raised(ValueError, dist.shrink_group, [0, 0])
    raised(ValueError, dist.shrink_group, [2])
    raised(RuntimeError, dist.shrink_group, [rank])
    assert count() == 3
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.skipif(HAS_PYTHON_BACKENDS, reason="it works since torch 2.15")
def test_an_older_torch_is_told_how_to_shrink(process_group: Any) -> None:
    with pytest.raises(UnisonoError, match=r"set_world\(unisono.get_world\(\).shrink\(\)\)"):
        dist.shrink_group([1 - dist.get_rank()])
    dist.barrier()


@since_2_15
@pytest.mark.ranks(2)
def test_a_group_that_serves_gpus_is_not_shrunk_to_one_for_cpus(
    process_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [torch.device("cpu"), torch.device("cuda")]
    monkeypatch.setattr(UnisonoProcessGroup, "_device_types", both)
    with pytest.raises(UnisonoError, match=r"CPU tensors alone.*get_world\(\).shrink\(\)"):
        dist.shrink_group([1 - dist.get_rank()])
    dist.barrier()


# -- reconfigure ---------------------------------------------------------------------------------


def meet(store: dist.Store, step: int, names: list[str], name: str) -> None:
    """The processes with these names, as the ranks of the default group."""
    store.set(f"{step} {name}", dist._get_reconfigure_handle())
    handles = [store.get(f"{step} {name}").decode() for name in names]
    dist._reconfigure(step, handles, timeout=timedelta(seconds=20)).wait()
    assert dist.get_process_group_ranks(None) == list(range(len(names)))


@since_2_15
def test_members_are_named_anew_after_a_death(fresh_pool: RankPool) -> None:
    """Ranks a, b and c start; b dies, a and c continue; d takes the place of b."""
    outcomes = fresh_pool.outcomes(reconfigure, 4, connected=False)
    for rank, found in {
        0: [(0, 3, 6.0), (0, 2, 3.0), (0, 3, 6.0)],
        2: [(2, 3, 6.0), (1, 2, 3.0), (2, 3, 6.0)],
        3: [(1, 3, 6.0)],
    }.items():
        assert outcomes[rank].value == found, outcomes[rank].error


def reconfigure(rank: int, size: int, path: str) -> object:
    name, found = "abcd"[rank], []
    store = dist.FileStore(path, -1)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, enable_reconfigure=True
    )
    raised(GroupClosed, dist.barrier)  # before its members are known
    for step, names in enumerate(("abc", "ac", "adc")):
        if name in names:
            meet(store, step, list(names), name)
            found.append((dist.get_rank(), dist.get_world_size(), count()))
            train(*make(rank))
            if name == "b":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 0:
                raised(PeerLost, dist.barrier)
    assert dist._supports_reconfigure()
    handle = dist._get_reconfigure_handle()
    error = raised(UnisonoError, dist._reconfigure, 2, [handle])
    assert "already used" in str(error)
    error = raised(UnisonoError, dist._reconfigure, 3, ["nobody"])
    assert "own handle" in str(error)
    assert count() == 6  # unchanged
    dist._reconfigure(4 + rank, {handle}).wait()
    assert (dist.get_world_size(), count()) == (1, 1.0)
    dist.destroy_process_group()
    return found


@since_2_15
def test_what_ended_a_group_and_members_named_anew(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(reconfigure_after_abort, 2, connected=False)
    assert outcomes[0].value == ["SUCCESS", "SUCCESS", "SUCCESS", "REMOTE_ERROR"], outcomes[0].error


def reconfigure_after_abort(rank: int, size: int, path: str) -> object:
    name, store = "ab"[rank], dist.FileStore(path, -1)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, enable_reconfigure=True
    )
    group: Any = dist.group.WORLD
    meet(store, 0, ["a", "b"], name)
    found = [group.get_error().name]
    group.abort()
    raised(GroupAborted, dist.barrier)
    found.append(group.get_error().name)  # the program has asked for it
    meet(store, 1, ["a", "b"], name)
    assert count() == 3
    found.append(group.get_error().name)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised(PeerLost, dist.barrier)
    return [*found, group.get_error().name]


# -- for those who wrap a group --------------------------------------------------------------------


def test_a_group_for_wrappers_needs_no_world(pool: RankPool) -> None:
    pool.run(use_wrapped, 2, connected=False)


def use_wrapped(rank: int, size: int, path: str) -> None:
    assert not dist.is_initialized()
    group = connect_group(dist.FileStore(path, size), rank, size, timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size(), group.comm.timeout_s) == (rank, size, 20)
    group.allreduce([x := torch.full((2,), float(rank))], dist.AllreduceOptions()).wait()
    assert x.tolist() == [1, 1]
    group.barrier().wait()
    group.shutdown()
    raised(GroupClosed, group.barrier)
