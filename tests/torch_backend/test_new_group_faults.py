"""A rank dies before or while `dist.new_group` creates a group: the others learn of it at once."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import Outcome, RankPool, attempt
from torch_names import all_gather_single
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.leading import Leader
from unisono.comm.meeting.unix_socket import Connection
from unisono.errors import CollectiveMismatch, PeerLost
from unisono.torch_backend import creation

WITHIN_S = 5.0  # measured: 0.25 s; the rest is for a busy machine


def start(rank: int, size: int, path: str) -> None:
    store = dist.FileStore(f"{path}-store", size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size)


def die(path: str) -> None:
    Path(f"{path}-died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def find_loss(path: str, call: Callable[[], Any]) -> tuple[str, int, float, str]:
    """What `call` raised, and how long after the death."""
    error = attempt(call)
    took_s = time.monotonic() - float(Path(f"{path}-died").read_text())
    dist.destroy_process_group()
    assert isinstance(error, PeerLost), repr(error)
    return type(error).__name__, error.peer, took_s, str(error)


def check_losses(
    outcomes: list[Outcome],
    victim: int,
    doing: str = "new_group([0, 1, 2])",
    within_s: float = WITHIN_S,
) -> None:
    """The victim died, and every other rank raised PeerLost in time."""
    assert outcomes.pop(victim).error == "the process ended with -9"
    for survivor in outcomes:
        assert survivor.error is None, survivor.error
        kind, peer, took_s, text = survivor.value
        assert (kind, peer) == ("PeerLost", victim)
        assert f"this rank was in {doing}" in text
        assert took_s < within_s


# -- after a death ---------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_a_group_with_a_dead_rank(fresh_pool: RankPool, victim: int) -> None:
    check_losses(fresh_pool.outcomes(die_before, 3, victim, connected=False), victim)


def die_before(rank: int, size: int, path: str, victim: int) -> Any:
    start(rank, size, path)
    if rank == victim:
        die(path)
    return find_loss(path, dist.new_group)


def test_a_mesh_with_a_dead_rank(fresh_pool: RankPool) -> None:
    """Rank 0 shares no row or column with it, but does with ranks that do."""
    outcomes = fresh_pool.outcomes(mesh_with_a_dead_rank, 4, connected=False)
    check_losses(outcomes, 3, "new_group(", creation.LATECOMERS_S + WITHIN_S)


def mesh_with_a_dead_rank(rank: int, size: int, path: str) -> Any:
    start(rank, size, path)
    if rank == 3:
        die(path)
    return find_loss(path, lambda: init_device_mesh("cpu", (2, 2)))


def test_a_group_of_the_survivors(fresh_pool: RankPool) -> None:
    *survivors, dead = fresh_pool.outcomes(go_on_without, 3, connected=False)
    assert dead.error == "the process ended with -9"
    assert [survivor.value for survivor in survivors] == [3.0, 3.0], survivors


def go_on_without(rank: int, size: int, path: str) -> float:
    start(rank, size, path)
    if rank == 2:
        die(path)
    assert isinstance(attempt(dist.barrier), PeerLost)
    if rank == 1:
        time.sleep(0.5)  # longer than a leader's check interval
    group = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    return float(tensor)


# -- during the meeting ----------------------------------------------------------------------------


def dies_in(owner: Any, name: str, path: str, after: bool) -> None:
    """Make this process die when it enters a method, or has left it."""
    original = getattr(owner, name)

    def method(*args: Any, **named: Any) -> Any:
        if after:
            original(*args, **named)
        die(path)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(method) if is_static else method)


POINTS = {  # and the one they join: the leader is rank 0
    "before it announces itself": (Board, "set", False, [0]),
    "announced": (Board, "set", True, [0]),
    "connected": (Connection, "connect", True, [2]),
    "the segment is there": (Leader, "_hand_over", True, [0]),
    "has the segment": (Connection, "receive", True, [2]),
}


@pytest.mark.parametrize(
    ("victim", "point"),
    [(victim, point) for point, (*_, victims) in POINTS.items() for victim in victims],
)
def test_a_rank_dies_in_the_meeting(fresh_pool: RankPool, victim: int, point: str) -> None:
    check_losses(fresh_pool.outcomes(die_in_the_meeting, 3, victim, point, connected=False), victim)


def die_in_the_meeting(rank: int, size: int, path: str, victim: int, point: str) -> Any:
    start(rank, size, path)
    if rank == victim:
        owner, name, after, _ = POINTS[point]
        dies_in(owner, name, path, after)
    return find_loss(path, dist.new_group)


def test_the_store_dies_with_rank_0(fresh_pool: RankPool) -> None:
    check_losses(fresh_pool.outcomes(die_with_the_store, 3, connected=False), 0)


def die_with_the_store(rank: int, size: int, path: str) -> Any:
    port = Path(f"{path}-port")
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, True, wait_for_workers=False)
        port.with_suffix(".draft").write_text(str(store.port))
        port.with_suffix(".draft").rename(port)
    else:
        while not port.exists():
            time.sleep(0.005)
        store = dist.TCPStore("localhost", int(port.read_text()), size, False)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
    all_gather_single(torch.zeros(size), torch.zeros(1))
    if rank == 0:
        die(path)
    return find_loss(path, dist.new_group)


# -- a world that has ended for another reason -----------------------------------------------------


def test_a_member_that_stays_away_or_leaves_after_a_mismatch(fresh_pool: RankPool) -> None:
    first, left = fresh_pool.outcomes(leave_after_a_mismatch, 2, connected=False)
    assert left.error == "the process ended with 7"
    assert first.value == ("CollectiveMismatch", "PeerLost", 1), first.error


def leave_after_a_mismatch(rank: int, size: int, path: str) -> tuple[str, str, int]:
    start(rank, size, path)
    assert isinstance(attempt(dist.all_reduce, torch.ones(rank + 1)), CollectiveMismatch)
    told = Path(f"{path}-told")
    if rank == 1:
        while not told.exists():
            time.sleep(0.01)
        os._exit(7)
    creation.LATECOMERS_S = 0.3  # type: ignore[misc]
    error = attempt(dist.new_group)
    creation.LATECOMERS_S = 30.0  # type: ignore[misc]
    told.touch()
    lost = attempt(dist.new_group)
    assert isinstance(lost, PeerLost), lost
    dist.destroy_process_group()
    return type(error).__name__, type(lost).__name__, lost.peer
