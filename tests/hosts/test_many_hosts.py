"""Groups over more hosts than send to each other directly: descriptors travel from host to host.

Hosts are simulated (UNISONO_HOSTID), so this needs no root.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import host_jobs
import pytest
import torch
from host_jobs import SOON_S, Places, await_all, moment, places, set_moment
from namespaces import MakeNetwork

import ranks
from made_up_hosts import world
from ranks import RankPool, raised, subgroup
from unisono import CollectiveMismatch, CollectiveTimeout, PeerLost, RendezvousError
from unisono.comm.communicator import Communicator

PLACEMENTS = ("AB", "ABC", "ABCD", "ABCDE", "ABCDEF", "ABCDEFG", "ABCDEFGH", "ABBCDEEE", "EABCDAB")
"""Of 2 to 8 hosts, with equal and different numbers of ranks."""


def part_of(rank: int, to: int, count: int, turn: int) -> torch.Tensor:
    """Different for each pair of ranks, and small: sums are exact."""
    return torch.arange(count, dtype=torch.float32) + (rank * 131 + to * 17 + turn) % 251


def call_at_random(comm: Communicator, seed: int, calls: int, most: int) -> None:
    """One program on all ranks, whose results each computes from what all ranks bring."""
    chance = random.Random(seed)
    size, rank = comm.size, comm.rank
    pending: list[tuple[Any, torch.Tensor, torch.Tensor, str]] = []
    for turn in range(calls):
        what = chance.choice(CALLS)
        count, root = chance.randrange(most + 1), chance.randrange(size)
        later, delay = chance.random() < 0.3, chance.random()
        if chance.random() < 0.1:
            time.sleep(0.002 * ((rank * 7 + turn) % 5) * delay)
        mine = part_of(rank, 0, count, turn)
        parts = [[part_of(r, to, count, turn) for to in range(size)] for r in range(size)]
        total = torch.stack([part_of(r, 0, count, turn) for r in range(size)]).sum(0)
        got, wanted = torch.full((count,), -1.0), torch.full((count,), -1.0)
        many = torch.full((size * count,), -1.0)
        more: dict[str, Any] = {"async_op": True} if later else {}
        work: Any = None
        if what == "all_reduce":
            got, wanted = mine.clone(), total
            work = comm.all_reduce(got, **more)
        elif what == "reduce":
            got, wanted = mine.clone(), total if rank == root else mine
            work = comm.reduce(got, root, **more)
        elif what == "broadcast":
            got, wanted = mine.clone(), part_of(root, 0, count, turn)
            work = comm.broadcast(got, root, **more)
        elif what == "all_gather":
            got, wanted = many, torch.cat([part_of(r, 0, count, turn) for r in range(size)])
            work = comm.all_gather(got, mine, **more)
        elif what == "reduce_scatter":
            wanted = torch.stack([parts[r][rank] for r in range(size)]).sum(0)
            work = comm.reduce_scatter(got, torch.cat(parts[rank]), **more)
        elif what == "all_to_all":
            got, wanted = many, torch.cat([parts[r][rank] for r in range(size)])
            work = comm.all_to_all(got, torch.cat(parts[rank]), **more)
        elif what == "gather":
            got = many if rank == root else got
            wanted = torch.cat([parts[r][0] for r in range(size)]) if rank == root else wanted
            work = comm.gather(many if rank == root else None, mine, root, **more)
        elif what == "scatter":
            wanted = parts[root][rank]
            work = comm.scatter(got, torch.cat(parts[root]) if rank == root else None, root, **more)
        else:
            comm.barrier()
        if work is None:
            assert torch.equal(got, wanted), (what, turn, count, root)
        else:
            pending.append((work, got, wanted, f"{what} {turn} {count} {root}"))
        if len(pending) > chance.randrange(6) or turn + 1 == calls:
            for each, out, right, name in pending:
                each.wait(60)
                assert torch.equal(out, right), name
            pending.clear()


CALLS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    *("gather", "scatter", "barrier"),
)


def run_at_random(rank: int, size: int, path: str, hosts: str, seed: int, calls: int) -> None:
    with world(rank, path, hosts) as comm:
        call_at_random(comm, seed, calls, 40)  # whole rows in descriptors
        call_at_random(comm, seed + 1, calls // 2, 370)  # and some beyond them
        call_at_random(comm, seed + 2, 5, 20_000)


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_random_calls(fresh_pool: RankPool, hosts: str) -> None:
    seed = int(os.environ.get("SEED", "1"))
    fresh_pool.run(run_at_random, len(hosts), hosts, seed, 200, connected=False)


def use_two_groups(rank: int, size: int, path: str, hosts: str) -> None:
    """Of odd and even ranks and one, whose calls are under way at the same time as the world's."""
    with world(rank, path, hosts) as comm:
        reverse = subgroup(comm, reversed(range(size)), "reverse")
        most = subgroup(comm, range(1, size), "most") if rank else None
        assert rank or comm.split(list(range(1, size)), "most") is None
        groups = [comm, reverse] + ([most] if most else [])
        for turn in range(60):
            tensors = [torch.full((1 + turn % 200,), float(group.rank)) for group in groups]
            works = [g.all_reduce(t, async_op=True) for g, t in zip(groups, tensors, strict=True)]
            for group, work, tensor in zip(groups, works, tensors, strict=True):
                assert work is not None
                work.wait(60)
                assert tensor.unique().tolist() == [sum(range(group.size))]
        for group in groups[1:]:
            call_at_random(group, 7, 30, 40)
            group.close()


def test_groups_whose_calls_overlap(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_two_groups, 7, "ABCDEFA", connected=False)


# -- mistakes and faults ---------------------------------------------------------------------------


def differ(rank: int, size: int, path: str, hosts: str, odd: int) -> str:
    with world(rank, path, hosts) as comm:
        comm.barrier()
        tensor = torch.full((3,), float(rank))
        call = comm.broadcast if rank == odd else comm.all_reduce
        error = raised(CollectiveMismatch, call, tensor, *([0] if rank == odd else []))
        assert tensor.eq(rank).all()
        assert error.culprits == (odd,)
        raised(CollectiveMismatch, comm.barrier)
        return str(error)


@pytest.mark.parametrize("odd", [0, 5])
def test_a_mismatch_is_told_in_full_on_every_rank(fresh_pool: RankPool, odd: int) -> None:
    hosts = "ABCDEFB"
    for text in fresh_pool.run(differ, len(hosts), hosts, odd, connected=False):
        first, *lines, _ = text.splitlines()
        assert f"rank {odd} on" in first, text
        assert sum(" at tests/ranks.py:" in line for line in lines) == 6, text


def refuse_alike(rank: int, size: int, path: str) -> None:
    """A call that all ranks refuse leaves the group as it is."""
    with world(rank, path, "ABCDEF") as comm:
        for _ in range(3):
            raised(TypeError, comm.all_reduce, torch.ones(2), "bor")
            comm.all_reduce(tensor := torch.ones(2))
            assert tensor.tolist() == [size, size]


def test_a_refused_call(fresh_pool: RankPool) -> None:
    fresh_pool.run(refuse_alike, 6, connected=False)


def be_late(rank: int, size: int, path: str, late: int) -> str:
    with world(rank, path, "ABCDEFGH") as comm:
        comm.barrier()
        comm.timeout_s = 3.0
        text = ""
        if rank != late:
            text = str(raised(CollectiveTimeout, comm.all_reduce, torch.ones(2)))
        await_all(path, rank, size)
        return text


def test_a_time_out_names_nobody_else(fresh_pool: RankPool) -> None:
    """Though who does not call does not send on what others have posted."""
    texts = fresh_pool.run(be_late, 8, 3, connected=False)
    for rank, text in enumerate(texts):
        others = "arrived: 0-2 and 4-7"
        assert rank == 3 or f"because rank 3 never arrived; {others}" in text.splitlines()[0], text


def miss_a_split(rank: int, size: int, path: str, missing: tuple[int, ...]) -> str:
    with world(rank, path, "ABCDEFGH") as comm:
        comm.barrier()
        comm.timeout_s = 3.0
        text = ""
        if rank not in missing:
            text = str(raised(RendezvousError, comm.split, list(range(size)), "some"))
        await_all(path, rank, size)
        return text


def test_all_that_do_not_join_a_group_are_named_and_no_others(fresh_pool: RankPool) -> None:
    """Though what others say would have come by way of them."""
    for rank, text in enumerate(fresh_pool.run(miss_a_split, 8, (2, 5), connected=False)):
        assert rank in (2, 5) or "ranks 2 and 5 did not join" in text, text


def give_up_a_split(rank: int, size: int, path: str, early: int, late: int) -> float:
    with world(rank, path, "ABCDEFGH") as comm:
        comm.barrier()
        ranks = list(range(size))
        comm.timeout_s = 1.0 if rank == early else 30.0
        await_all(path, rank, size)
        if rank == early:
            raised(RendezvousError, comm.split, ranks, "some")
            set_moment(path, "given-up")
        elif rank == late:
            moment(path, "given-up")
        made = None if rank == early else subgroup(comm, ranks, "some")
        took_s = time.monotonic() - moment(path, "given-up")
        await_all(f"{path}-made", rank, size)
        if made is not None:
            error = raised(PeerLost, made.barrier)
            assert error.peer == early
            made.close()
        return took_s


def test_who_gives_up_need_not_tell_who_is_here(fresh_pool: RankPool) -> None:
    """Rank 2 would have told rank 4 of rank 1."""
    for took_s in fresh_pool.run(give_up_a_split, 8, 2, 1, connected=False):
        assert took_s < 5.0


def make_and_close(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABCDEFGA") as comm:
        for turn in range(10):
            subgroup(comm, range(size), f"some{turn}").close()


def test_groups_that_close_at_once(fresh_pool: RankPool) -> None:
    """Who leaves may be known before what it said at the beginning."""
    fresh_pool.run(make_and_close, 8, connected=False)


def be_stopped(rank: int, size: int, path: str, stopped: int) -> str:
    with world(rank, path, "ABCDEFG") as comm:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        comm.all_gather(pids, torch.tensor([os.getpid()]))
        comm.timeout_s = 3.0
        await_all(path, rank, size)
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        text = str(raised(CollectiveTimeout, comm.all_reduce, torch.ones(2)))
        set_moment(path, f"heard-{rank}")
        if rank == 0:
            for other in range(size):
                if other != stopped:
                    moment(path, f"heard-{other}")
            os.kill(int(pids[stopped].item()), signal.SIGCONT)
        return text


def test_a_stopped_rank_is_named(fresh_pool: RankPool) -> None:
    for rank, text in enumerate(fresh_pool.run(be_stopped, 7, 2, connected=False)):
        assert rank == 2 or "because rank 2 never arrived; arrived: 0, 1 and 3-6" in text, text
        assert rank == 2 or "did not answer" in text, text


def lose_one(rank: int, size: int, path: str, victim: int) -> tuple[int | None, float]:
    with world(rank, path, "ABCDEFGA") as comm:
        comm.all_reduce(torch.ones(2))
        await_all(path, rank, size)
        if rank == victim:
            set_moment(path, "died")
            os.kill(os.getpid(), signal.SIGKILL)
        error = raised(PeerLost, call_for_ever, comm)
        return error.peer, time.monotonic() - moment(path, "died")


def call_for_ever(comm: Communicator) -> None:
    while True:
        comm.all_reduce(torch.ones(3))


def test_a_death_among_many_hosts(fresh_pool: RankPool) -> None:
    for rank, outcome in enumerate(fresh_pool.outcomes(lose_one, 8, 4, connected=False)):
        if rank == 4:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.error
        assert outcome.value[0] == 4
        assert outcome.value[1] < SOON_S


def leave(rank: int, size: int, path: str, leaver: int) -> str:
    with world(rank, path, "ABCDEFG") as comm:
        comm.all_reduce(torch.ones(2))
        await_all(f"{path}-first", rank, size)
        text = ""
        if rank == leaver:
            comm.close()
        else:
            text = str(raised(PeerLost, comm.all_reduce, torch.ones(2)))
        await_all(path, rank, size)
        return text


@pytest.mark.parametrize("leaver", [0, 4])
def test_a_rank_that_closed_the_group(fresh_pool: RankPool, leaver: int) -> None:
    """Others wait for what would pass it, and learn that it has left."""
    texts = fresh_pool.run(leave, 7, leaver, connected=False)
    for rank, text in enumerate(texts):
        assert rank == leaver or re.search(rf"rank {leaver} \(.*closed group", text), text


def end_after_calls(rank: int, size: int, path: str) -> None:
    """The last call ends before every rank has all of it: nobody takes the goodbyes for a loss."""
    for turn in range(15):
        with world(rank, f"{path}-{turn}", "ABCDEFG") as comm:
            for _ in range(turn % 4):
                comm.all_reduce(tensor := torch.ones(2))
                assert tensor.tolist() == [size, size]


def test_the_end_overtakes_no_call(fresh_pool: RankPool) -> None:
    fresh_pool.run(end_after_calls, 7, connected=False)


def be_paused(rank: int, size: int, path: str) -> None:
    """Ranks stop at random moments, some longer than others take for two calls."""
    with world(rank, path, "ABCDEFA") as comm:
        await_all(path, rank, size)
        for turn in range(4):
            call_at_random(comm, 100 + turn, 60, 40)


def test_ranks_that_are_stopped_again_and_again(fresh_pool: RankPool) -> None:
    chance = random.Random(5)
    over = threading.Event()
    pids = fresh_pool.pids(7)

    def pause() -> None:
        while not over.wait(0.003):
            pid = chance.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            over.wait(chance.random() * 0.05)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        fresh_pool.run(be_paused, 7, connected=False)
    finally:
        over.set()
        thread.join()


# -- what is sent ----------------------------------------------------------------------------------


def count_packets(rank: int, size: int, _: str, where: Places) -> dict[str, float]:
    with host_jobs.world(rank, where) as comm:
        found = {}
        tensor = torch.ones(2)
        calls = {"barrier": comm.barrier, "all_reduce": lambda: comm.all_reduce(tensor)}
        for name, call in calls.items():
            call()
            before = sent_packets()
            for _ in range(50):
                call()
            found[name] = (sent_packets() - before) / 50
            comm.barrier()
        return found


def sent_packets() -> int:
    """By the interface of this process's host."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if "eth0:" in line)
    return int(line.partition(":")[2].split()[9])


def test_a_small_call_sends_few_messages(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    """Each host three to others among eight, and acknowledgements of three; not seven."""
    with make_network(8) as made:
        where = places(made, range(8))
        for packets in fresh_pool.run(count_packets, 8, where, connected=False):
            assert all(each <= 9.5 for each in packets.values()), packets


def connections() -> int:
    """The TCP connections of this process."""
    mine = {os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path)}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in mine for row in rows)


def connect_to_all(rank: int, size: int, path: str) -> tuple[int, int]:
    with world(rank, path, "ABCDEFGH") as comm:
        comm.all_reduce(torch.ones(2))
        await_all(f"{path}-first", rank, size)
        at_first = connections()
        await_all(f"{path}-counted", rank, size)
        sent = [comm.isend(torch.ones(1), other) for other in range(size) if other != rank]
        for other in range(size):
            if other != rank:
                comm.recv(torch.ones(1), other)
        for work in sent:
            work.wait(60)
        later = connections()
        await_all(f"{path}-all", rank, size)
        return at_first, later


def test_a_link_is_opened_when_it_is_first_used(fresh_pool: RankPool) -> None:
    """A group of eight connects each rank to those at distances of 1, 2 and 4."""
    for at_first, later in fresh_pool.run(connect_to_all, 8, connected=False):
        assert at_first < later, (at_first, later)


ranks.preload("host_jobs")
