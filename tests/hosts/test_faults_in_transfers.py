"""Faults while much data is in flight between hosts, and what the survivors still hold."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import SOON_S, Places, await_all, moment, places, set_moment, world
from namespaces import Link as Cable
from namespaces import MakeNetwork
from test_ucx import wheel

import ranks
from ranks import RankPool, attempt
from resources import Resources, assert_given_back, held_resources
from unisono.comm.hosts import questions
from unisono.errors import GroupError

LARGE = 16 << 20
"""Elements of float32: 64 MiB."""

GIGABIT = Cable(rate_bits_per_s=1_000_000_000)


@contextlib.contextmanager
def second_world(rank: int, where: Places, timeout_s: float = 60.0) -> Iterator[Any]:
    """A world in a process that has already had one, so that whatever is created once per process
    exists. Afterwards everything that it held has been released, without garbage collection."""
    with world(rank, where):
        dist.all_reduce(torch.ones(LARGE // 8))
    gc.collect()
    gc.disable()
    before = held_resources()
    with world(rank, where, timeout_s, serial=1) as comm:
        yield comm
    _check_given_back(before)


def _check_given_back(before: Resources) -> None:
    assert_given_back(before)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("unisono")], names


def call_for_ever(tensor: torch.Tensor) -> None:
    while True:
        dist.all_reduce(tensor)


def call_until_it_fails(count: int) -> tuple[str, str, float]:
    error = attempt(call_for_ever, torch.ones(count))
    came = time.monotonic()
    assert isinstance(error, GroupError), error
    return type(error).__name__, str(error), came


def be_killed(path: str) -> None:
    set_moment(path, "fault")
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(rank: int, size: int, path: str, where: Places, victim: int, count: int) -> Any:
    with second_world(rank, where):
        await_all(path, rank, size)
        if rank == victim:
            threading.Timer(0.3, be_killed, (path,)).start()
        story = call_until_it_fails(count)
        after = attempt(dist.barrier)
        assert type(after).__name__ == story[0]
    return *story, moment(path, "fault")


@pytest.mark.parametrize("count", [1, LARGE], ids=["small", "64-MiB"])
@pytest.mark.parametrize("victim", [0, 2], ids=["rank-0", "leader"])
def test_the_death_of_who_others_depend_on(
    fresh_pool: RankPool, make_network: MakeNetwork, victim: int, count: int
) -> None:
    """Rank 0 hosts the store; ranks 0 and 2 are the first of their hosts."""
    with make_network(2, GIGABIT) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(lose_a_rank, 4, where, victim, count, connected=False)
    pids = set()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL, outcome
            continue
        assert outcome.error is None, outcome.error
        kind, text, came, died = outcome.value
        assert kind == "PeerLost", text
        named = re.search(rf"rank {victim} \(pid (\d+) on {where.host(victim).name}\)", text)
        assert named, text
        pids.add(int(named.group(1)))
        assert came - died < SOON_S
    assert len(pids) == 1


# -- a rank that is stopped ------------------------------------------------------------------------


def be_stopped(
    rank: int, size: int, path: str, where: Places, stopped: int, pids: list[int], answer_s: float
) -> Any:
    """A rank is stopped in the middle of a call on 16 MiB; once all others know, it continues and
    learns of it, too. Processes take so long to say who is stopped on their host."""
    with second_world(rank, where, timeout_s=4.0) as comm:
        if answer_s:
            tell = comm.transport.links.questions._at_once.pop("stopped")
            questions.answers["stopped"] = lambda ranks: (time.sleep(answer_s), tell(ranks))[1]
        await_all(path, rank, size)
        if rank == stopped:

            def stop() -> None:
                set_moment(path, "fault")
                os.kill(os.getpid(), signal.SIGSTOP)

            threading.Timer(1.0, stop).start()
        story = call_until_it_fails(LARGE // 4)
        set_moment(path, f"heard-{rank}")
        if rank == 0:
            for other in range(1, size):
                if other != stopped:
                    moment(path, f"heard-{other}")
            os.kill(pids[stopped], signal.SIGCONT)
    return *story, moment(path, "fault")


@pytest.mark.parametrize(("stopped", "answer_s"), [(1, 0.0), (2, 0.0), (2, 0.6)])
def test_a_rank_that_is_stopped_while_data_moves(
    fresh_pool: RankPool, make_network: MakeNetwork, stopped: int, answer_s: float
) -> None:
    with make_network(2, GIGABIT) as made:
        where = places(made, (0, 0, 1, 1))
        pids = fresh_pool.pids(4)
        given = where, stopped, pids, answer_s
        outcomes = fresh_pool.outcomes(be_stopped, 4, *given, connected=False)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        kind, text, came, stopped_at = outcome.value
        assert kind == "CollectiveTimeout", text
        if rank != stopped:
            first, *others = text.splitlines()
            # If it is stopped between two calls, its neighbour may still wait for it in the first.
            late = f"rank {stopped} stopped moving data$|ranks?[ 0-9and]* {stopped}[ 0-9and]* never"
            assert re.search(late, first), text
            host = where.host(stopped).name
            known = [line for line in others if "is stopped" in line]
            assert len(known) == 1, text
            assert len(others) <= 2, text
            assert re.match(rf"  rank {stopped} \(pid \d+ on {host}\) is stopped", known[0]), text
            assert 0.0 < came - stopped_at < 20.0  # the call may have begun long before


# -- Ctrl-C ----------------------------------------------------------------------------------------


def be_interrupted(rank: int, size: int, path: str, where: Places) -> Any:
    with second_world(rank, where):
        dist.barrier()
        if rank == 2:
            dist.all_reduce(tensor := torch.ones(LARGE))
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                call_for_ever(tensor)
            set_moment(path, "fault")
            return None
        story = call_until_it_fails(LARGE)
    return *story, moment(path, "fault")


def test_an_interrupt_in_a_transfer_ends_it_everywhere(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2, GIGABIT) as made:
        where = places(made, (0, 0, 1, 1))
        results = fresh_pool.run(be_interrupted, 4, where, connected=False)
    for rank in (0, 1, 3):
        kind, text, came, interrupted = results[rank]
        assert kind == "GroupAborted", text
        assert "rank 2 ended group" in text
        assert "interrupted" in text
        assert came - interrupted < SOON_S


# -- a UCX that does not end what was under way ----------------------------------------------------


def make_stuck_ucx(folder: Path) -> str:
    """A UCX that, asked to close a connection, goes on with what is under way on it."""
    source, made, lib = folder / "stuck.c", folder / "libucp.so", wheel() / "lib"
    source.write_text("void *ucp_ep_close_nbx(void) { return 0; }\n")
    (folder / "ucx").symlink_to(lib / "ucx")
    options = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-rpath,{lib}"]
    subprocess.run(["cc", *options, source, lib / "libucp.so.0", "-o", made], check=True)
    return str(made)


def be_cut_off(rank: int, size: int, path: str, where: Places, ucx: str) -> Any:
    os.environ["UNISONO_UCX"] = ucx
    tensor = torch.ones(LARGE)
    with world(rank, where):
        dist.all_reduce(torch.ones(LARGE // 8))
        await_all(path, rank, size)
        if rank == 1:
            threading.Timer(0.3, where.host(rank).cut).start()
            threading.Timer(0.3, set_moment, (path, "fault")).start()
        error = attempt(call_for_ever, tensor)
        came, kept = time.monotonic(), tensor.clone()
        set_moment(path, f"heard-{rank}")
        moment(path, f"heard-{1 - rank}")
        if rank == 1:
            where.host(rank).mend()
        again = attempt(dist.barrier)
        time.sleep(1.0)  # for what TCP repeats
        assert torch.equal(tensor, kept)
        assert type(again) is type(error), again
    with world(rank, where, serial=1):
        dist.all_reduce(one := torch.ones(1))
        assert one.item() == size
    return type(error).__name__, str(error), came, moment(path, "fault")


def test_a_transfer_that_ucx_never_ends(
    fresh_pool: RankPool, make_network: MakeNetwork, tmp_path: Path
) -> None:
    """The call returns in time all the same, nothing writes into its tensor afterwards, and once
    all groups are closed the process can have others."""
    with make_network(2, GIGABIT) as made:
        where = places(made, (0, 1))
        ucx = make_stuck_ucx(tmp_path)
        results = fresh_pool.run(be_cut_off, 2, where, ucx, connected=False)
    for rank, (kind, text, came, cut) in enumerate(results):
        assert kind == "PeerLost", text
        assert f"rank {1 - rank} " in text
        assert came - cut < 5.0 + 4.0 + SOON_S


ranks.preload("host_jobs")
