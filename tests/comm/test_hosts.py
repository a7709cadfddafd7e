"""What only groups over hosts have; conformance/ tests the rest. Hosts are simulated here, with
UNISONO_HOSTID on one machine; tests/hosts has real ones."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import reduce
from itertools import combinations
from pathlib import Path
from random import Random

import numpy
import pytest
import torch
import torch.distributed as dist

from expected import assert_same, inputs
from made_up_hosts import world
from ranks import RankPool, attempt, raised, subgroup
from unisono import GroupAborted, MessageMismatch, PeerLost, RendezvousError
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.hosts.making import connect_beside
from unisono.comm.hosts.placement import place
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.identity import Hosts
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.work import Message

# -- what it is made of ----------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "ABBB", "ABBCCC", "ABC"])
def test_every_rank_is_heard_by_one_rank_of_every_other_host(hosts: str) -> None:
    names = list(dict.fromkeys(hosts))
    members = tuple(tuple(r for r, host in enumerate(hosts) if host == name) for name in names)
    places = [
        place(range(len(hosts)), Hosts(members, tuple(names), at, (0,) * len(hosts)), rank)
        for rank, at in enumerate(map(names.index, hosts))
    ]
    for rank, here in enumerate(places):
        assert here.rank == rank
        hearers = [there for there in places if rank in there.origins(there.index)]
        assert sorted(there.host for there in hearers) == sorted(here.others())
        for there in hearers:
            assert here.mate(rank, there.host) == there.rank
        assert [names[host] for host in here.hosts_of_ranks()] == list(hosts)
        for peer in here.neighbours():
            assert rank in places[peer].neighbours()


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", ["ABBA", "ABBB"])
def test_bits_depend_on_the_placement_alone(pool: RankPool, hosts: str) -> None:
    """Small and large calls on all ranks: partial sums of hosts, in float32 for half types."""
    for value in pool.run(sum_everything, 4, hosts, connected=False):
        assert value is None


def sum_everything(rank: int, size: int, path: str, hosts: str) -> None:
    with world(rank, path, hosts) as comm:
        for dtype in (torch.float32, torch.bfloat16):
            for count in (3, 900, 5000, 700_001):
                check_sums(comm, inputs(size, dtype, count), hosts)


def check_sums(comm: Communicator, given: list[torch.Tensor], hosts: str) -> None:
    groups = [[r for r in range(4) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    wide = [row.float().numpy() for row in given]
    partials = [reduce(numpy.add, [wide[rank] for rank in ranks]) for ranks in groups]
    total = reduce(numpy.add, partials)
    expected = torch.from_numpy(total).to(given[0].dtype)
    what = (given[0].dtype, given[0].numel())
    comm.all_reduce(tensor := given[comm.rank].clone())
    assert_same(tensor, expected, what)
    comm.all_reduce(tensor := given[comm.rank].clone(), "avg")
    assert_same(tensor, torch.from_numpy(total / numpy.float32(4)).to(tensor.dtype), what)
    comm.reduce(tensor := given[comm.rank].clone(), 3)
    assert_same(tensor, expected if comm.rank == 3 else given[comm.rank], what)
    cuts = [1, 0, given[0].numel() // 2]
    cuts.append(given[0].numel() - sum(cuts))
    output = torch.empty(cuts[comm.rank], dtype=given[0].dtype)
    comm.reduce_scatter(output, list(torch.split(given[comm.rank], cuts)))
    assert_same(output, torch.split(expected, cuts)[comm.rank], what)


# -- messages --------------------------------------------------------------------------------------


def test_messages_of_every_size_in_all_directions(pool: RankPool) -> None:
    pool.run(exchange_messages, 4, connected=False)


def exchange_messages(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABBA") as comm:
        for count in (0, 5, 100_000, 1_000_000):
            got = [torch.zeros(count) for _ in range(size)]
            batch = [Message("recv", got[peer], peer) for peer in range(size) if peer != rank]
            batch += [
                Message("send", torch.full((count,), float(rank)), peer)
                for peer in range(size)
                if peer != rank
            ]
            for work in comm.batch_isend_irecv(batch):
                work.wait(30)
            for peer in range(size):
                assert peer == rank or (got[peer] == peer).all()


def test_messages_match_in_order_whichever_side_was_first(pool: RankPool) -> None:
    """Receives that are posted first are announced to the sender; those after one from any rank, or
    after a long one, are not."""
    pool.run(match_at_random, 2, connected=False)


def match_at_random(rank: int, size: int, path: str) -> None:
    chance = Random(7)
    with world(rank, path, "AB") as comm:
        for turn in range(60):
            lengths = {tag: chance.choice([1, 1000, 100_000]) for tag in range(3)}
            tags = [chance.randrange(3) for _ in range(8)]
            order = chance.sample(tags, len(tags))
            is_any = [chance.random() < 0.2 for _ in tags]
            if (turn + rank) % 3 == 0:
                comm.barrier()  # the peer comes to it before or after its messages
            if rank == turn % 2:
                sent = [torch.full((lengths[tag],), float(at)) for at, tag in enumerate(tags)]
                works = [comm.isend(x, 1 - rank, tag) for x, tag in zip(sent, tags, strict=True)]
            else:
                got = [torch.zeros(lengths[tag]) for tag in order]
                peers = [None if anybody else 1 - rank for anybody in is_any]
                works = [comm.irecv(*each) for each in zip(got, peers, order, strict=True)]
            if (turn + rank) % 3 != 0:
                comm.barrier()
            for work in works:
                work.wait(30)
            for tag in range(3) if rank != turn % 2 else ():
                expected = [float(at) for at, other in enumerate(tags) if other == tag]
                found = [x for x, other in zip(got, order, strict=True) if other == tag]
                assert [x.unique().tolist() for x in found] == [[value] for value in expected]


def test_what_was_sent_in_inference_mode_does_not_disturb_what_follows(pool: RankPool) -> None:
    pool.run(send_in_either_mode, 2, connected=False)


def send_in_either_mode(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AB") as comm:
        for inference in (True, False, True, False):
            with torch.inference_mode(inference):
                sent = torch.full((50_000,), float(rank))
                works = [comm.isend(sent, 1 - rank) for _ in range(4)]  # none uses another's memory
                for _ in works:
                    comm.recv(got := torch.empty(50_000), 1 - rank)
                    assert got.unique().tolist() == [1.0 - rank]
                for work in works:
                    work.wait()
            comm.barrier()


def test_ranks_that_have_no_line_to_each_other_exchange_messages(pool: RankPool) -> None:
    pool.run(send_to_a_stranger, 4, connected=False)


def send_to_a_stranger(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABBA") as comm:
        assert isinstance(comm.transport, HostsTransport)
        lines = comm.transport.placement.neighbours()
        assert (2 in lines, 0 in lines) == (rank in (3,), rank in (1,)), lines
        tensor = torch.full((3,), float(rank))
        if rank == 0:
            comm.isend(tensor, 2).wait(10)
        elif rank == 2:
            comm.irecv(tensor, 0).wait(10)
            assert tensor.tolist() == [0.0] * 3
        comm.barrier()


def test_anybody_may_be_on_this_host_or_another(pool: RankPool) -> None:
    pool.run(receive_from_anybody, 4, connected=False)


def receive_from_anybody(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABBA") as comm:
        for turn in range(3):
            if rank != 1:
                comm.send(torch.full((2,), float(rank)), 1, tag=turn)
                continue
            works = [comm.irecv(tensor := torch.zeros(2), tag=turn)]
            got = [tensor.clone() for _ in range(2)]
            found = {comm.recv(got[0], tag=turn), comm.recv(got[1], tag=turn)}
            works[0].wait(30)
            found.add(works[0].source_rank())
            assert tensor.tolist() == [works[0].source_rank()] * 2
            assert found == {0, 2, 3}


def test_receives_from_anybody_are_filled_in_their_order(pool: RankPool) -> None:
    pool.run(receive_many_from_anybody, 4, connected=False)


def receive_many_from_anybody(rank: int, size: int, path: str) -> None:
    """Rank 1 has many receives in progress, with two tags, before any rank sends; ranks 2 and 3, on
    its own host and on another, send in turn, each when the message before has been received."""
    store = dist.FileStore(f"{path}-turns", size)  # type: ignore[attr-defined]
    with world(rank, path, "ABBA") as comm:
        if rank == 1:
            tensors = [torch.zeros(3) for _ in range(8)]
            works = [comm.irecv(tensor, tag=at % 2) for at, tensor in enumerate(tensors)]
            store.set("turn 0", "")
            for turn in (0, 2, 4, 6, 1, 3, 5, 7):  # tag 0 comes before tag 1
                works[turn].wait(30)
                assert works[turn].source_rank() == 2 + turn // 2 % 2
                assert tensors[turn].tolist() == [float(turn)] * 3
                later = works[turn + 2 :: 2]
                assert not any(work.is_completed() for work in later)
                store.set(f"received {turn}", "")
            many = [torch.zeros(50_000) for _ in range(20)]  # which come at once
            works = [comm.irecv(tensor, tag=7) for tensor in many]
            for work in works:
                work.wait(30)
            for source in (0, 2, 3):
                got = [
                    int(tensor[0])
                    for work, tensor in zip(works, many, strict=True)
                    if work.source_rank() == source
                ]
                assert got == sorted(got), (source, got)
            assert sum(int(tensor[0]) for tensor in many) == 3 * sum(range(6)) + 6 + 7
        else:
            store.get("turn 0")
            before = ""
            for turn in (0, 2, 4, 6, 1, 3, 5, 7):
                if before:
                    store.get(before)
                if rank == 2 + turn // 2 % 2:
                    comm.send(torch.full((3,), float(turn)), 1, tag=turn % 2)
                before = f"received {turn}"
            for number in range(8 if rank == 0 else 6):
                comm.send(torch.full((50_000,), float(number)), 1, tag=7)
        comm.barrier()


# -- refusals --------------------------------------------------------------------------------------


def test_a_rank_that_refuses_and_leaves_is_not_missed(pool: RankPool) -> None:
    pool.run(refuse_and_leave, 4, connected=False)


def refuse_and_leave(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABBA") as comm:
        for _ in range(3):
            with pytest.raises(ValueError, match="for a reason"):
                comm.reject_call("all_reduce", "for a reason")
        if rank == 2:
            return
        assert isinstance(comm.transport, HostsTransport)
        assert comm.transport.group.state()["calls"] == 3
        assert comm.errored is None  # whatever rank 2 did after all had met


def test_more_ranks_than_a_group_can_have() -> None:
    """No rank waits for the others first."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    for call in (
        lambda: connect(Board(store, Deadline(60)), 0, 1025),
        lambda: Communicator.join("many", 1024, 1025, store, join_timeout_s=60),
        lambda: Communicator.join("many", 1024, 1025, join_timeout_s=60),
    ):
        with pytest.raises(RendezvousError, match=r"has 1,025 ranks, .* 1,024: start"):
            call()


# -- groups ----------------------------------------------------------------------------------------


def test_a_name_that_is_used_again_is_another_group(pool: RankPool) -> None:
    pool.run(use_a_name_again, 4, connected=False)


def use_a_name_again(rank: int, size: int, path: str) -> None:
    store = dist.FileStore(f"{path}-again", size)  # type: ignore[attr-defined]

    def make(turn: str) -> Communicator:
        meeting = dist.PrefixStore(turn, store)  # type: ignore[attr-defined]
        made = connect_beside(comm.transport, Board(meeting), range(size), "again", 30)
        return Communicator(made)

    with world(rank, path, "ABBA") as comm:
        with make("first") as group:
            group.all_reduce(torch.ones(1))
            if rank == 0:  # and no rank receives it
                group.isend(torch.full((2,), 7.0), 1)
        with make("second") as group:
            tensor = torch.full((2,), float(rank))
            if rank == 0:
                group.isend(tensor, 1).wait(10)
            elif rank == 1:
                group.irecv(tensor, 0).wait(10)
                assert tensor.tolist() == [0, 0]
            group.all_reduce(tensor)
        with make("third") as group:
            if rank == 0:
                group.close()
            elif rank == 1:
                error = attempt(group.irecv(torch.ones(1), 0).wait, 10)
                assert isinstance(error, PeerLost), error
        comm.barrier()


@pytest.mark.parametrize("hosts", ["ABCD", "ABAB", "ABBB", "AABC"])
def test_groups_of_any_ranks_on_any_hosts_at_once(pool: RankPool, hosts: str) -> None:
    """Inside a host, across hosts, with one rank of each; started in a different order on each
    rank."""
    pool.run(use_every_subset, 4, hosts, connected=False)


def use_every_subset(rank: int, size: int, path: str, hosts: str) -> None:
    with world(rank, path, hosts) as comm:
        subsets = [some for count in (2, 3, 4) for some in combinations(range(size), count)]
        groups = [group for ranks in subsets if (group := comm.split(ranks)) is not None]
        for count in (3, 60_000):
            tensors = [torch.full((count,), 2.0**rank) for _ in groups]
            begun = list(zip(groups, tensors, strict=True))
            works = [
                group.all_reduce(tensor, async_op=True)
                for group, tensor in (begun if rank % 2 else reversed(begun))
            ]
            for work in works:
                assert work is not None
                work.wait(30)
            for group, tensor in begun:
                assert group.global_ranks is not None
                assert tensor.unique().tolist() == [sum(2.0**r for r in group.global_ranks)]
                gathered = [torch.empty(count) for _ in range(group.size)]
                group.all_gather(gathered, torch.full((count,), float(rank)))
                assert [row.unique().tolist() for row in gathered] == [
                    [float(member)] for member in group.global_ranks
                ]
        comm.barrier()
        for group in groups:
            group.close()


def test_who_leaves_last_is_heard_though_the_mates_have_left_before(pool: RankPool) -> None:
    pool.run(leave_one_after_the_other, 4, connected=False)


def leave_one_after_the_other(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AABB") as comm:
        group = subgroup(comm, range(size), "left")
        if rank in (1, 2):
            group.close()
        comm.barrier()
        if rank == 0:
            group.close()
        elif rank == 3:
            began = time.monotonic()
            error = attempt(group.recv, torch.ones(1), 0)
            assert isinstance(error, PeerLost), error
            assert time.monotonic() - began < 10  # of 30
        comm.barrier()


def test_a_failure_ends_its_group_alone(pool: RankPool) -> None:
    pool.run(fail_in_one_group, 4, connected=False)


def fail_in_one_group(rank: int, size: int, path: str) -> None:
    with world(rank, path, "ABBA") as comm:
        second = subgroup(comm, range(size), "second")
        inside = comm.split([1, 2])
        assert inside is None or isinstance(inside.transport, SharedMemory)
        for culprit in (0, 2):
            first = subgroup(comm, range(size), f"first {culprit}")
            first.all_reduce(torch.ones(300_000))
            if rank == 0:
                first.isend(torch.ones(300_000), 1)  # which no rank receives
            comm.barrier()  # an abort overtakes data in flight
            if rank == culprit:
                first.abort("enough")
            error = attempt(first.all_reduce, torch.ones(300_000))
            assert isinstance(error, GroupAborted), error
            assert (error.peer, error.reason) == (culprit, "enough")
        time.sleep(2)  # a broken link is given up by then
        second.all_reduce(tensor := torch.ones(300_000))
        assert (tensor == size).all()
        if rank < 2:  # which are on different hosts
            call = second.send if rank == 0 else second.recv
            error = attempt(lambda: call(torch.zeros(3 + rank, 1), 1 - rank))
            assert isinstance(error, MessageMismatch), error
            verdict, sender, receiver, advice = str(error).splitlines()
            assert re.match(r"a message from rank 0 .*on rank 1 \(tag 0", verdict)
            assert "rank 0 sends float32, 12 bytes, shape (3, 1) at " in sender
            assert "rank 1 receives float32, 16 bytes, shape (4, 1) at " in receiver
            assert all("test_hosts.py:" in line for line in (sender, receiver))
            assert advice.startswith("Both need the same dtype and number of elements.")
        comm.all_reduce(tensor := torch.ones(3))
        assert tensor.tolist() == [size] * 3


def test_rank_0_s_death_is_told_as_that_of_rank_0(fresh_pool: RankPool) -> None:
    dead, *others = fresh_pool.outcomes(lose_rank_0, 4, connected=False)
    assert dead.exit_code == -signal.SIGKILL
    assert [(outcome.error, outcome.value) for outcome in others] == [(None, 0)] * 3


def lose_rank_0(rank: int, size: int, path: str) -> int:
    with world(rank, path, "AABB") as comm:  # rank 3 has no connection to rank 0
        comm.barrier()
        Path(f"{path}-{rank}").touch()
        if rank == 0:  # once no rank is in the barrier any more
            while not all(Path(f"{path}-{other}").exists() for other in range(1, size)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return raised(PeerLost, comm.barrier).peer


def test_a_forked_child_cannot_use_it(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_in_child, 2, connected=False)


def use_in_child(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AB") as comm:
        child = os.fork()
        if not child:
            error = attempt(comm.barrier)
            os._exit(0 if "belongs to the parent process" in str(error) else 1)
        assert os.waitpid(child, 0)[1] == 0
        comm.barrier()


def test_a_split_names_a_dead_member_by_its_rank_in_the_whole_group(fresh_pool: RankPool) -> None:
    *survivors, dead = fresh_pool.outcomes(split_with_the_dead, 4, connected=False)
    assert dead.exit_code == -signal.SIGKILL
    assert [outcome.value for outcome in survivors] == [3, 3, 3], survivors


def split_with_the_dead(rank: int, size: int, path: str) -> int:
    with world(rank, path, "ABBB") as comm:
        comm.barrier()
        told = Path(f"{path}-told")
        if rank == 3:  # once no rank is in the barrier any more
            while not all(Path(f"{path}-{other}").exists() for other in range(3)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{path}-{rank}").touch()
        if rank == 2:  # rank 1 leads on this host, and has not started yet
            error = raised(PeerLost, comm.split, range(size))
            told.touch()
            return error.peer
        while not told.exists():
            time.sleep(0.01)
        return raised(PeerLost, comm.split, range(size)).peer
