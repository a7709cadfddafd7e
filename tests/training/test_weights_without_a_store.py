"""Weight updates, and meetings, whose torch Store is gone: they end at the caller's timeout."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool, raised
from unisono import Communicator, RendezvousError, WeightUpdateError
from unisono.comm.over_torch.stateless import connect_stateless
from unisono.processes import state_of
from unisono.training import weight_update
from user_programs import eventually

LIMIT_S = 1.0


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_needs_the_store_ends_in_time(fresh_pool: RankPool, how: str) -> None:
    """The store's own timeout is 300 s; torch waits forever for one that is stopped. The third rank
    hosts it, and is in no group."""
    *ranks, host = fresh_pool.outcomes(lose_the_store, 3, how, connected=False)
    assert host.exit_code == -signal.SIGKILL
    for outcome in ranks:
        assert outcome.error is None, outcome.error


def lose_the_store(rank: int, size: int, path: str, how: str) -> None:
    where = Path(f"{path}-where")
    if rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        Path(f"{where}-draft").write_text(f"{store.port} {os.getpid()}")
        Path(f"{where}-draft").rename(where)
        signal.pause()
    assert eventually(where.exists)
    port, pid = map(int, where.read_text().split())
    os.environ["UNISONO_HOSTID"] = "AB"[rank]
    store = dist.TCPStore("127.0.0.1", port, None, False)
    over_hosts = Communicator.join("hosts", rank, 2, store, timeout_s=30)
    over_gloo = Communicator(connect_stateless("gloo", store, "gloo", rank, 2, 30.0, 30.0))
    over_hosts.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        assert eventually(lambda: state_of(pid).has_ended or state_of(pid).is_stopped)
    over_hosts.barrier()
    for group in (over_hosts, over_gloo):
        text = fail_to_update(group)
        assert "the torch Store" in text
        assert "engines may serve different versions" in text  # one may already have decided
    error = raised(
        RendezvousError,
        lambda: Communicator.join("later", rank, 2, store, join_timeout_s=LIMIT_S),
    )
    assert "the torch Store of the meeting" in str(error)
    Path(f"{path}-{rank}").touch()
    if rank == 0 and how == "stopped":
        assert eventually(Path(f"{path}-1").exists)
        os.kill(pid, signal.SIGKILL)


def fail_to_update(comm: Communicator) -> str:
    weights = {"w": torch.full((4,), float(comm.rank))}
    error = raised(WeightUpdateError, lambda: weight_update(weights, comm, timeout_s=LIMIT_S))
    assert error.group_ended
    assert not error.committed
    assert weights["w"].eq(comm.rank).all()
    comm.close()
    return str(error)
