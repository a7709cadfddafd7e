"""Programs over hosts in which something fails: every rank of every host learns which rank and
where."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import SOON_S, Places, await_all, moment, places, set_moment, world
from namespaces import MakeNetwork

from ranks import Outcome, RankPool, attempt, raised, signalled_while_waiting
from unisono.errors import (
    CollectiveMismatch,
    DeadlockError,
    GroupAborted,
    GroupError,
    PeerLost,
    RendezvousError,
)

SILENT_S = 5.0  # a second after the link's patience ends
Story = tuple[str, str, float]
"""The exception's type and text, and when it was raised."""


def tell(error: BaseException | None) -> Story:
    assert isinstance(error, GroupError), error
    return type(error).__name__, str(error), time.monotonic()


def wait_in_a_call(count: int = 1) -> BaseException | None:
    """Call all_reduce until one fails."""

    def call() -> None:
        while True:
            dist.all_reduce(torch.ones(count))

    return attempt(call)


# -- deaths --------------------------------------------------------------------------------------


def lose_a_rank(
    rank: int, size: int, path: str, where: Places, victims: tuple[int, ...], count: int
) -> Any:
    with world(rank, where):
        dist.all_reduce(torch.ones(count))
        await_all(path, rank, size)
        if rank in victims:
            if os.fork() == 0:  # which keeps everything it inherited, for a while
                signal.alarm(15)
                signal.pause()
            set_moment(path, f"died-{rank}")
            os.kill(os.getpid(), signal.SIGKILL)
        story = tell(wait_in_a_call(count))
        after = tell(attempt(dist.barrier))
        assert after[0] == story[0]
        return *story, max(moment(path, f"died-{victim}") for victim in victims)


def check_losses(outcomes: list[Outcome], where: Places, victims: tuple[int, ...]) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome.exit_code == -signal.SIGKILL, outcome
            continue
        assert outcome.error is None, outcome.error
        kind, text, came, died = outcome.value
        assert kind == "PeerLost", text
        lost = [
            victim
            for victim in victims
            if re.search(rf"rank {victim} \(pid \d+ on {where.host(victim).name}\)", text)
        ]
        assert lost, text
        assert came - died < SOON_S


@pytest.mark.parametrize(
    "victims",
    [(3,), pytest.param((2,), marks=pytest.mark.slow), pytest.param((1,), marks=pytest.mark.slow)],
    ids=["last", "leader", "beside-rank-0"],
)
@pytest.mark.parametrize("count", [1, pytest.param(3_000_000, marks=pytest.mark.slow)])
def test_a_killed_rank_is_told_on_every_host(
    fresh_pool: RankPool, make_network: MakeNetwork, victims: tuple[int, ...], count: int
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(lose_a_rank, 4, where, victims, count, connected=False)
        check_losses(outcomes, where, victims)


def test_all_ranks_of_a_host_die(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(3) as made:
        where = places(made, (0, 1, 1, 2))
        outcomes = fresh_pool.outcomes(lose_a_rank, 4, where, (1, 2), 1, connected=False)
        check_losses(outcomes, where, (1, 2))


# -- silence -------------------------------------------------------------------------------------


def be_cut_off(rank: int, size: int, path: str, where: Places, way: str, count: int) -> Any:
    with world(rank, where):
        dist.all_reduce(torch.ones(count))
        await_all(path, rank, size)
        if rank == size - 1:
            getattr(where.host(rank), way)()
            set_moment(path, "cut")
        return *tell(wait_in_a_call(count)), moment(path, "cut")


@pytest.mark.parametrize("way", ["cut", pytest.param("unplug", marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [1, pytest.param(3_000_000, marks=pytest.mark.slow)])
def test_a_cut_cable_is_a_loss_within_5_s(
    fresh_pool: RankPool, make_network: MakeNetwork, way: str, count: int
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        results = fresh_pool.run(be_cut_off, 4, where, way, count, connected=False)
    for rank, (kind, text, came, began) in enumerate(results):
        assert kind == "PeerLost", text
        other = "host0" if rank >= 2 else "host1"
        assert other in text
        assert came - began < SILENT_S + 1.5  # for a busy machine


# -- lateness ------------------------------------------------------------------------------------


def be_late(rank: int, size: int, path: str, where: Places, late: int) -> Any:
    with world(rank, where, timeout_s=3.0):
        await_all(path, rank, size)
        if rank == late:
            time.sleep(6.0)  # the user's program is elsewhere
        else:
            began = time.monotonic()
            kind, text, came = tell(attempt(dist.all_reduce, torch.ones(2)))
        set_moment(path, f"heard-{rank}")
        for other in range(size):  # before it leaves, which would be another story
            moment(path, f"heard-{other}")
        return None if rank == late else (kind, text, came - began)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_time_out_names_who_is_missing_where(
    fresh_pool: RankPool, make_network: MakeNetwork, late: int
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        results = fresh_pool.run(be_late, 4, where, late, connected=False)
    for rank, result in enumerate(results):
        if rank == late:
            continue
        kind, text, took_s = result
        assert kind == "CollectiveTimeout", text
        assert f"rank {late}" in text.splitlines()[0], text
        assert where.host(late).name in text
        assert "test_host_faults.py" in text, text
        assert 2.5 < took_s < 6.0


def be_stopped(rank: int, size: int, path: str, where: Places, stopped: int) -> Any:
    with world(rank, where, timeout_s=3.0):
        pids: list[Any] = [None] * size
        dist.all_gather_object(pids, os.getpid())
        dist.barrier()
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        story = tell(attempt(dist.all_reduce, torch.ones(2)))
        set_moment(path, f"heard-{rank}")
        if rank == 0:
            for other in range(size):
                if other != stopped:
                    moment(path, f"heard-{other}")
            os.kill(pids[stopped], signal.SIGCONT)
        return story


def test_a_time_out_of_hosts_with_one_rank(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(3) as made:
        where = places(made, (0, 1, 2))
        results = fresh_pool.run(be_late, 3, where, 1, connected=False)
    for rank in (0, 2):
        kind, text, _ = results[rank]
        assert kind == "CollectiveTimeout", text
        first, second = text.splitlines()
        assert first.endswith("because rank 1 never arrived; arrived: 0 and 2")
        where = r"  rank 1 \(pid \d+ on host1\) is at \S*test_host_faults.py:\d+ in be_late$"
        assert re.match(where, second), second


@pytest.mark.slow
def test_a_stopped_rank(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(be_stopped, 4, where, 2, connected=False)
    for rank in (0, 1, 3):
        kind, text, _ = outcomes[rank].value
        assert kind == "CollectiveTimeout", text
        assert "rank 2" in text
        assert "host1" in text


# -- a bad network -------------------------------------------------------------------------------


def drop_large_packets(rank: int, size: int, path: str, where: Places, count: int) -> Any:
    with world(rank, where, timeout_s=3.0) as comm:
        await_all(path, rank, size)
        if rank == size - 1:  # tbf drops packets longer than its burst
            limit = "tbf rate 10gbit burst 600 limit 1000000"
            where.host(rank).run("tc", "qdisc", "add", "dev", "eth0", "root", *limit.split())
            set_moment(path, "dropping")
        moment(path, "dropping")
        story = tell(attempt(comm.all_reduce, torch.ones(count)))
        set_moment(path, f"heard-{rank}")
        for other in range(size):
            moment(path, f"heard-{other}")
        return story


@pytest.mark.parametrize("count", [300_000, 20_000_000])
def test_where_large_packets_are_dropped_nobody_is_blamed(
    fresh_pool: RankPool, make_network: MakeNetwork, count: int
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        stories = fresh_pool.run(drop_large_packets, 4, where, count, connected=False)
    for kind, text, _ in stories:
        assert kind == "CollectiveTimeout", text
        assert re.search(r"rank \d \(pid \d+ on host[01]\) and rank \d \(pid \d+ on host", text)
        assert "have both arrived, but the data between them does not" in text
        assert "compare the MTU" in text
        assert "never arrived" not in text


def take_the_wrong_interface(rank: int, size: int, path: str, where: Places, culprit: int) -> str:
    host = where.host(rank)
    if rank == culprit:  # by which no other host can be reached
        for command in (
            "link add name wrong0 type veth peer name wrong1",
            "addr add 10.66.0.1/24 dev wrong0",
            "link set wrong0 up",
            "link set wrong1 up",
        ):
            host.run("ip", *command.split())
        os.environ["GLOO_SOCKET_IFNAME"] = "wrong0"

    def start() -> None:
        with world(rank, where, join_timeout_s=5.0):
            pass

    text = str(raised(RendezvousError, start))
    set_moment(path, f"heard-{rank}")
    moment(path, f"heard-{1 - rank}")  # rank 0 hosts the store
    return text


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_wrong_interface_is_named_on_both_sides(
    fresh_pool: RankPool, make_network: MakeNetwork, culprit: int
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 1))
        texts = fresh_pool.run(take_the_wrong_interface, 2, where, culprit, connected=False)
    other = where.host(1 - culprit).ipv4
    for text in texts:
        assert text.startswith("no connection between rank "), text
        assert re.search(
            rf"rank {culprit} \(pid \d+ on host{culprit}\), at 10.66.0.1 on wrong0", text
        )
        assert re.search(rf"rank {1 - culprit} \(pid \d+ on host\d\), at {other} on eth0", text)
        assert "set GLOO_SOCKET_IFNAME" in text


# -- mistakes ------------------------------------------------------------------------------------


def differ(rank: int, size: int, _: str, where: Places, mistake: str) -> Any:
    with world(rank, where):
        dist.barrier()
        tensor = torch.full((300_000,), float(rank))
        odd = rank == size - 1
        wrong = {"size": tensor[:-1], "dtype": tensor.int(), "operation": tensor}[mistake]
        error: Exception | None = None
        try:
            if odd and mistake == "operation":
                dist.broadcast(wrong, 0)
            else:
                dist.all_reduce(wrong if odd else tensor)
        except CollectiveMismatch as caught:
            error = caught
        assert isinstance(error, CollectiveMismatch)
        assert tensor.eq(rank).all()
        assert error.culprits == (size - 1,), error.culprits
        return str(error)


@pytest.mark.parametrize(
    "mistake",
    [
        "operation",
        pytest.param("size", marks=pytest.mark.slow),
        pytest.param("dtype", marks=pytest.mark.slow),
    ],
)
def test_a_mismatch_is_found_on_every_host_before_any_output_changes(
    fresh_pool: RankPool, make_network: MakeNetwork, mistake: str
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 1, 0, 1))
        texts = fresh_pool.run(differ, 4, where, mistake, connected=False)
    for text in texts:
        first, *lines, advice = text.splitlines()
        assert first.startswith("rank 3 on host1 made a different call"), text
        who = ("ranks 0 and 2 on host0", "rank 1 on host1", "rank 3 on host1")
        for line, ranks in zip(lines, who, strict=True):
            assert line.startswith(f"  {ranks}: "), text
            assert "test_host_faults.py:" in line, text
        assert advice.startswith("No data was moved.")


def send_in_a_circle(rank: int, size: int, _: str, where: Places) -> Any:
    with world(rank, where, timeout_s=20.0) as comm:
        comm.barrier()
        began = time.monotonic()
        error = attempt(comm.recv, torch.empty(1), (rank + 1) % size)
        return type(error).__name__, str(error), time.monotonic() - began


def test_a_deadlock_of_messages_across_hosts(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1))
        results = fresh_pool.run(send_in_a_circle, 3, where, connected=False)
    for kind, text, took_s in results:
        assert kind == DeadlockError.__name__, text
        assert took_s < 10.0


def send_at_once(rank: int, size: int, _: str, where: Places, count: int) -> Any:
    with world(rank, where, timeout_s=20.0) as comm:
        comm.barrier()
        error = raised(DeadlockError, comm.send, torch.zeros(count), size - 1 - rank)
        assert sorted(error.cycle) == [0, 1]
        return str(error)


@pytest.mark.parametrize("count", [1, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_two_ranks_that_send_to_each_other_first(
    fresh_pool: RankPool, make_network: MakeNetwork, count: int
) -> None:
    with make_network(2) as made:
        texts = fresh_pool.run(send_at_once, 2, places(made, (0, 1)), count, connected=False)
    for text in texts:
        assert re.match(r"deadlock in group world: ranks (0 -> 1 -> 0|1 -> 0 -> 1) wait", text)
        assert text.count("send to rank") == 2
        assert "let one side receive first, or use isend" in text


def wait_long_and_right(rank: int, size: int, _: str, where: Places) -> None:
    """Every rank but the last waits for the next one, for seconds; then again with sends in
    progress."""
    with world(rank, where) as comm:
        comm.barrier()
        number = torch.full((1,), float(rank))
        if rank == size - 1:
            time.sleep(1.5)
        else:
            comm.recv(number, rank + 1)
        if rank > 0:
            comm.send(number, rank - 1)
        assert number.item() == size - 1
        received = torch.empty(300_000)
        sends = [comm.isend(torch.full((300_000,), float(rank)), (rank + 1) % size) for _ in "ab"]
        for _turn in "ab":
            if rank % 2:
                time.sleep(0.7)
            comm.recv(received, (rank - 1) % size)
            assert received.eq((rank - 1) % size).all()
        for work in sends:
            work.wait()


def test_a_long_wait_is_no_deadlock(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        fresh_pool.run(wait_long_and_right, 4, where, connected=False)


# -- ending on purpose ---------------------------------------------------------------------------


def abort_everywhere(rank: int, size: int, _: str, where: Places) -> Any:
    with world(rank, where) as comm:
        if rank == 3:
            comm.barrier()
            comm.abort("the loss is not a number")
            return None

        def go_on() -> None:
            comm.barrier()  # which rank 3 may leave, and abort, before this rank does
            comm.all_reduce(torch.ones(1))

        error = raised(GroupAborted, go_on)
        assert error.peer == 3
        assert error.reason == "the loss is not a number"
        return str(error)


def test_an_abort_reaches_every_host(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        texts = fresh_pool.run(abort_everywhere, 4, places(made, (0, 1, 0, 1)), connected=False)
    assert all("the loss is not a number" in text for text in texts[:3])


def lose_patience(*_: object) -> None:
    raise ZeroDivisionError


def be_interrupted(rank: int, size: int, path: str, where: Places) -> Any:
    """With any exception that a signal handler raises."""
    with world(rank, where):
        dist.barrier()
        if rank == 1:
            interrupts = signalled_while_waiting(signal.SIGALRM, lose_patience)
            with interrupts, pytest.raises(ZeroDivisionError):
                dist.all_reduce(torch.ones(1))
            return None
        if rank == 3:  # never arrives
            moment(path, "over")
            return None
        story = tell(attempt(dist.all_reduce, torch.ones(1)))
        if rank == 0:
            set_moment(path, "over")
        return story


def test_an_interrupt_ends_the_group_on_all_hosts(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        results = fresh_pool.run(be_interrupted, 4, places(made, (0, 0, 1, 1)), connected=False)
    for rank in (0, 2):
        assert results[rank][0] == "GroupAborted", results[rank]
        assert re.match("rank 1 ended group world.*: it was interrupted", results[rank][1])


# -- others go on --------------------------------------------------------------------------------


def lose_one_of_two_groups(rank: int, size: int, path: str, where: Places) -> Any:
    with world(rank, where):
        healthy = dist.new_group([0, 2])
        broken = dist.new_group([1, 3])
        mine = healthy if rank in (0, 2) else broken
        dist.all_reduce(torch.ones(1), group=mine)
        await_all(path, rank, size)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            return tell(attempt(dist.all_reduce, torch.ones(1), dist.ReduceOp.SUM, broken))[0]
        assert isinstance(attempt(dist.barrier), PeerLost)
        for count in (1, 500_000):
            tensor = torch.ones(count)
            dist.all_reduce(tensor, group=healthy)
            assert tensor.eq(2).all()
        return "went on"


def test_groups_without_the_culprit_go_on(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        outcomes = fresh_pool.outcomes(lose_one_of_two_groups, 4, where, connected=False)
    assert [outcome.value for outcome in outcomes] == ["went on", "PeerLost", "went on", None], [
        outcome.error for outcome in outcomes
    ]
