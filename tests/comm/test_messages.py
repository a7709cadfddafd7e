"""Point to point: every size arrives, in order by tag, from any source, and deadlocks are named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ranks import RankPool, attempt, connect, raised, subgroup
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.work import Message, Work
from unisono.errors import (
    CollectiveTimeout,
    DeadlockError,
    GroupAborted,
    GroupClosed,
    MessageMismatch,
    PeerLost,
)
from user_programs import eventually

SIZES = [2, 3, 4, 8]
COUNTS = [0, 1, 7, 40, 41, 1000, 65_536, 65_537, 300_001]


@pytest.mark.ranks(SIZES)
def test_a_ring_of_batches(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in COUNTS:
        mine = torch.arange(count, dtype=torch.float32) * (comm.rank + 1)
        got = torch.full((count,), -1.0)
        batch = [Message("send", mine, after), Message("recv", got, before)]
        if comm.rank % 2:
            batch.reverse()
        for work in comm.batch_isend_irecv(batch):
            work.wait()
        assert torch.equal(got, torch.arange(count, dtype=torch.float32) * (before + 1))


@pytest.mark.ranks(SIZES)
def test_a_chain_of_blocking_calls(comm: Communicator) -> None:
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
            tensor = torch.ones(count, dtype=dtype)
            if comm.rank > 0:
                tensor.zero_()
                assert comm.recv(tensor, comm.rank - 1) == comm.rank - 1
            if comm.rank < comm.size - 1:
                comm.send(tensor, comm.rank + 1)
            assert tensor.eq(1).all()
        comm.barrier()


@pytest.mark.ranks(2)
def test_messages_match_by_tag_in_the_order_they_were_sent(comm: Communicator) -> None:
    random = np.random.default_rng(3)
    tags = random.integers(0, 4, 60)
    counts = random.choice([1, 20, 500, 70_000], 60)
    if comm.rank == 0:
        works = [
            comm.isend(torch.full((int(count),), float(step)), 1, int(tag))
            for step, (tag, count) in enumerate(zip(tags, counts, strict=True))
        ]
        for work in works:
            work.wait()
        return
    for tag in (2, 0, 3, 1):  # one tag after another: within a tag the order holds
        for step in np.flatnonzero(tags == tag):
            tensor = torch.zeros(int(counts[step]))
            comm.recv(tensor, 0, int(tag))
            assert tensor.eq(float(step)).all()


@pytest.mark.ranks(4)
def test_a_receiver_may_take_from_anybody(comm: Communicator) -> None:
    for count in (3, 5000):
        comm.barrier()  # or a fast rank's large message would match a small receive
        if comm.rank:
            comm.send(torch.full((count,), float(comm.rank)), 0, 5)
            continue
        sources = set()
        for _ in range(comm.size - 1):
            work = comm.irecv(tensor := torch.zeros(count), None, 5)
            work.wait()
            assert tensor.eq(work.source_rank()).all()
            sources.add(work.source_rank())
        assert sources == {1, 2, 3}


@pytest.mark.ranks(2)
def test_strided_tensors_travel(comm: Communicator) -> None:
    base = torch.arange(40_000.0).reshape(200, 200)
    if comm.rank == 0:
        comm.send(base.t()[::2], 1)
    else:
        got = torch.zeros(200, 200)
        comm.recv(got[:, ::2], 0)
        assert torch.equal(got[:, ::2].reshape(100, 200), base.t()[::2].reshape(100, 200))
        assert got[:, 1::2].eq(0).all()


@pytest.mark.ranks(2)
def test_a_message_to_oneself(comm: Communicator) -> None:
    for count in (2, 100_000):
        got = torch.zeros(count)
        works = [comm.isend(torch.ones(count), comm.rank), comm.irecv(got, comm.rank)]
        for work in works:
            work.wait()
        assert got.eq(1).all()


@pytest.mark.ranks(3)
def test_collectives_and_messages_do_not_disturb_each_other(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (4, 100_000):
        got, total = torch.zeros(count), torch.ones(count)
        sent = comm.isend(torch.full((count,), float(comm.rank)), after)
        comm.all_reduce(total)  # the message has not been received yet
        comm.irecv(got, before).wait()
        sent.wait()
        assert got.eq(before).all()
        assert total.eq(3).all()


@pytest.mark.ranks(2)
def test_more_messages_than_a_channel_has_room_for(comm: Communicator) -> None:
    """Hundreds each way, again and again: every send learns that it was received."""
    peer, count = 1 - comm.rank, 600
    comm.timeout_s = 10.0
    for _ in range(30):
        sends = [comm.isend(torch.tensor([step]), peer, step) for step in range(count)]
        outputs = torch.full((count, 1), -1)
        receives = [comm.irecv(outputs[step], peer, step) for step in range(count)]
        for work in [*receives, *sends]:
            work.wait()
        assert torch.equal(outputs[:, 0], torch.arange(count))


@pytest.mark.ranks(2)
def test_a_message_behind_thousands_that_nobody_wants_yet(comm: Communicator) -> None:
    count = 3000
    comm.timeout_s = 20.0
    if comm.rank == 0:
        sends = [comm.isend(torch.tensor([step]), 1, 1) for step in range(count)]
        comm.send(torch.tensor([7]), 1, 2)
        for work in sends:
            work.wait()
        return
    comm.recv(got := torch.tensor([0]), 0, 2)
    assert got == 7
    for step in range(count):
        comm.recv(got, 0, 1)
        assert got == step


@pytest.mark.ranks(2)
def test_receives_in_the_reverse_order_of_tags_are_as_quick(comm: Communicator) -> None:
    peer, count = 1 - comm.rank, 3000
    tensors = list(torch.arange(count).split(1))
    comm.barrier()
    start = time.monotonic()
    works = [comm.isend(tensor, peer, tag) for tag, tensor in enumerate(tensors)]
    outputs = list(torch.full((count,), -1).split(1))
    works += [comm.irecv(outputs[tag], peer, tag) for tag in reversed(range(count))]
    for work in works:
        work.wait()
    assert torch.equal(torch.cat(outputs), torch.arange(count))
    assert time.monotonic() - start < 5.0  # 0.05 alone; 13 with each checking all others


@pytest.mark.ranks(2)
def test_messages_that_nobody_waits_for_arrive_all_the_same(comm: Communicator) -> None:
    for count in (3, 500_000):
        if comm.rank == 0:
            comm.isend(torch.ones(count), 1)
            time.sleep(0.5)
        else:
            got = torch.zeros(count)
            work = comm.irecv(got, 0)
            end = time.monotonic() + 5
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.01)
            assert work.is_completed()
            assert got.eq(1).all()
        comm.barrier()


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.ranks(SIZES)
def test_a_circle_of_sends_is_a_deadlock(comm: Communicator) -> None:
    size = comm.size
    comm.barrier()
    start = time.monotonic()
    error = raised(DeadlockError, comm.send, torch.tensor([1.0, 2.0]), (comm.rank + 1) % size)
    assert sorted(error.cycle) == list(range(size))
    assert isinstance(attempt(comm.barrier), DeadlockError)
    assert time.monotonic() - start < 10.0
    assert "deadlock in group world: ranks" in str(error)
    for rank in range(size):
        assert f"rank {rank}: send to rank {(rank + 1) % size}" in str(error)


@pytest.mark.ranks(2)
def test_receivers_that_wait_for_each_other_are_a_deadlock(comm: Communicator) -> None:
    error = raised(DeadlockError, comm.recv, torch.zeros(2), 1 - comm.rank, 9)
    assert "(tag 9)" in str(error)


@pytest.mark.ranks(2)
def test_a_deadlock_by_tags_that_differ_shows_both(comm: Communicator) -> None:
    if comm.rank == 0:
        error = attempt(comm.send, torch.zeros(2), 1, 7)
    else:
        error = attempt(comm.recv, torch.zeros(2), 0, 5)
    assert isinstance(error, DeadlockError), error
    assert "rank 0: send to rank 1 (tag 7)" in str(error)
    assert re.search(r"rank 1: recv from rank 0 \(tag 5\), but .*from rank 0.* tag 7", str(error))
    assert "the same tag" in str(error)
    assert "isend" not in str(error)


@pytest.mark.ranks(2)
def test_who_uses_isend_is_not_told_to(comm: Communicator) -> None:
    peer = 1 - comm.rank
    sent = comm.isend(torch.zeros(2), peer, 7)
    error = raised(DeadlockError, sent.wait)
    assert "rank 0: send to rank 1 (tag 7)" in str(error)
    assert "start the receives before you wait" in str(error)
    assert "use isend" not in str(error)


@pytest.mark.ranks(2)
def test_receivers_with_the_wrong_tag_see_what_is_there(comm: Communicator) -> None:
    """Both have sent with isend, and wait for tags that no rank sends."""
    peer = 1 - comm.rank
    sent = [comm.isend(torch.zeros(2), peer, tag) for tag in (7, 8)]
    error = raised(DeadlockError, comm.recv, torch.zeros(2), peer, 5)
    for rank in range(2):
        other = 1 - rank
        there = f"2 messages from rank {other} have arrived with other tags, the oldest with tag 7"
        assert f"rank {rank}: recv from rank {other} (tag 5), but {there}" in str(error)
    assert "isend" not in str(error)
    assert all(isinstance(attempt(work.wait), DeadlockError) for work in sent)


@pytest.mark.ranks(2)
def test_a_send_to_oneself_is_a_deadlock(comm: Communicator) -> None:
    if comm.rank == 0:
        error = raised(DeadlockError, comm.send, torch.zeros(2), 0)
        assert error.cycle == (0,)


@pytest.mark.ranks(3)
def test_a_slow_peer_is_no_deadlock(comm: Communicator) -> None:
    tensor = torch.ones(2)
    if comm.rank == 0:
        comm.send(tensor, 1)
        comm.recv(tensor, 2)
    elif comm.rank == 1:
        comm.recv(tensor, 0)
        time.sleep(0.6)
        comm.send(tensor, 2)
    else:
        comm.recv(tensor, 1)
        comm.send(tensor, 0)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("odd", ["size", "dtype"])
@pytest.mark.ranks(2)
def test_a_message_that_does_not_fit(comm: Communicator, large: bool, odd: str) -> None:
    """Both sides' errors have both: types, sizes, shapes and lines."""
    rows = 50_000 if large else 2
    if comm.rank == 0:
        other = torch.ones(2 * rows + 1) if odd == "size" else torch.ones(rows, 2).int()
        error = attempt(lambda: comm.send(other, 1, 3))
    else:
        tensor = torch.zeros(rows, 2)
        error = attempt(lambda: comm.recv(tensor, 0, 3))
        assert tensor.eq(0).all()
    assert isinstance(error, MessageMismatch), error
    verdict, sender, receiver, advice = str(error).splitlines()
    assert re.fullmatch(r"a message from rank 0 .*on rank 1 \(tag 3, group world\)", verdict)
    shape, dtype = (f"({2 * rows + 1},)", "float32") if odd == "size" else (f"({rows}, 2)", "int32")
    size_bytes = 8 * rows + 4 if odd == "size" else 8 * rows
    assert sender.startswith(f"  rank 0 sends {dtype}, {size_bytes} bytes, shape {shape} at ")
    assert receiver.startswith(
        f"  rank 1 receives float32, {8 * rows} bytes, shape ({rows}, 2) at "
    )
    assert all("test_messages.py:" in line and "<lambda>" in line for line in (sender, receiver))
    assert sender.rpartition(" at ")[2] != receiver.rpartition(" at ")[2]
    assert advice.startswith("Both need the same dtype and number of elements.")
    assert str(attempt(comm.barrier)) == str(error)


@pytest.mark.ranks(3)
def test_who_waits_for_another_message_hears_of_one_that_does_not_fit(comm: Communicator) -> None:
    """The error of the one to blame, whichever you wait for: not of others in progress."""

    def start() -> list[Work]:
        if comm.rank == 0:
            return [comm.isend(torch.ones(7), 2, 9), comm.isend(torch.ones(5), 1)]
        return [comm.irecv(torch.ones(3), 2, 9), comm.irecv(torch.ones(4), 0)]

    if comm.rank == 2:
        error = attempt(comm.recv, torch.ones(2), 1, 5)
    else:
        error = attempt(lambda: start()[0].wait())
    assert isinstance(error, MessageMismatch), error
    lines = str(error).splitlines()
    first = start.__code__.co_firstlineno
    assert re.match(r"a message from rank 0 .*on rank 1 \(tag 0, group", lines[0])
    assert lines[1].startswith("  rank 0 sends float32, 20 bytes, shape (5,) at ")
    assert f"test_messages.py:{first + 2} in " in lines[1]
    assert lines[2].startswith("  rank 1 receives float32, 16 bytes, shape (4,) at ")
    assert f"test_messages.py:{first + 3} in " in lines[2]


@pytest.mark.ranks(2)
def test_a_message_that_is_never_matched(comm: Communicator, shared_tmp_path: Path) -> None:
    over = shared_tmp_path / "over"
    if comm.rank == 0:
        comm.timeout_s = 0.5
        start = time.monotonic()
        error = raised(CollectiveTimeout, comm.send, torch.ones(2), 1)
        assert error.missing == (1,)
        assert 0.4 < time.monotonic() - start < 10.0
        over.touch()
    else:
        assert eventually(over.exists)


@pytest.mark.ranks(3)
def test_a_timeout_by_tags_that_differ_shows_both(comm: Communicator) -> None:
    """Rank 2 has yet to send, so there is no deadlock."""
    comm.barrier()
    comm.timeout_s = 1.5 if comm.rank == 0 else 20.0  # in which rank 1 posts its two
    tensor = torch.zeros(2)
    if comm.rank == 0:
        sent = [comm.isend(tensor, 1, 7)]
        error = attempt(comm.recv, torch.zeros(2), 1, 3)
        assert "recv from rank 1 (tag 3) on group world was not matched by its deadline" in str(
            error
        )
        assert "a message from rank 1 has arrived with tag 4" in str(error)
        assert re.search(r"rank 1 .* recv from rank any \(tag 5\), but .* tag 7", str(error))
        assert all(attempt(work.wait) is not None for work in sent)
    elif comm.rank == 1:
        sent = [comm.isend(tensor, 0, 4)]
        error = attempt(comm.recv, torch.zeros(2), None, 5)
        told = "in group world that never came: recv from rank 1 (tag 3), but "
        assert str(error).startswith("rank 0 waited"), error
        assert told + "a message from rank 1 has arrived with tag 4" in str(error), error
        assert all(attempt(work.wait) is not None for work in sent)
    else:
        error = attempt(comm.recv, torch.zeros(2), 0, 0)
    assert isinstance(error, CollectiveTimeout), error


@pytest.mark.ranks(2)
def test_a_work_that_is_never_matched_ends_by_the_groups_deadline(
    comm: Communicator, shared_tmp_path: Path
) -> None:
    comm.timeout_s = 0.5
    over = shared_tmp_path / "over"
    if comm.rank == 0:
        start = time.monotonic()
        error = raised(CollectiveTimeout, comm.irecv(torch.ones(2), 1).wait)
        assert 0.4 < time.monotonic() - start < 10.0
        assert "recv from rank 1" in str(error)
        over.touch()
    else:
        assert eventually(over.exists)
        error = raised(CollectiveTimeout, comm.barrier)
        assert "rank 0 waited for a message" in str(error)


@pytest.mark.ranks(2)
def test_waits_with_a_limit_are_no_deadlock(comm: Communicator) -> None:
    """Both wait for each other, but each will stop and send: neither is stuck."""
    peer = 1 - comm.rank
    got = torch.zeros(2)
    work = comm.irecv(got, peer)
    comm.barrier()
    error = attempt(work.wait, 0.5)  # the later one may be sent to before its deadline
    assert error is None or isinstance(error, CollectiveTimeout), error
    comm.isend(torch.ones(2), peer).wait()
    work.wait()
    assert got.eq(1).all()
    in_vain = torch.tensor(int(error is not None))
    comm.all_reduce(in_vain)
    assert in_vain > 0


def test_a_peer_that_dies_while_it_is_awaited(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(dies_while_awaited, 3, connected=False)
    assert outcomes[0].value == outcomes[1].value == "PeerLost"


def dies_while_awaited(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size)
    comm.barrier()
    if rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    # rank 1 waits for rank 0, which waits for the dead
    error = attempt(comm.recv, torch.zeros(2), 2 if rank == 0 else 0)
    assert isinstance(error, PeerLost), error
    assert error.peer == 2
    assert f"in recv from rank {2 if rank == 0 else 0}" in str(error)
    comm.close()
    return "PeerLost"


@pytest.mark.ranks(2)
def test_bad_arguments_and_closed_groups(comm: Communicator) -> None:
    tensor = torch.ones(2)
    assert isinstance(attempt(comm.send, tensor, 2), ValueError)
    assert isinstance(attempt(comm.send, tensor, None), ValueError)
    assert isinstance(attempt(comm.recv, None, 0), TypeError)
    assert isinstance(attempt(comm.recv, tensor.expand(3, 2), 0), ValueError)
    group = subgroup(comm, [0, 1])
    group.close()
    assert isinstance(attempt(group.send, tensor, 0), (GroupClosed, GroupAborted))
    comm.barrier()


@pytest.mark.parametrize("count", [1, 40, 41, 1_000_000])
def test_eager_sends_return_at_once(fresh_pool: RankPool, count: int) -> None:
    fresh_pool.run(send_eagerly, 2, count, connected=False)


def send_eagerly(rank: int, size: int, path: str, count: int) -> None:
    """Both send first, which would otherwise be a deadlock; and the sender may reuse its memory."""
    os.environ["UNISONO_EAGER_SEND"] = str(4 * count)
    with connect(path, rank, size) as comm:
        for number in range(5):
            out = torch.full((count,), float(number + 10 * rank))
            comm.send(out, 1 - rank, tag=number)
            out.fill_(-1.0)
        got = torch.empty(count)
        for number in reversed(range(5)):
            comm.recv(got, 1 - rank, tag=number)
            assert torch.equal(got, torch.full((count,), float(number + 10 * (1 - rank))))
        # A larger message waits for its receiver, as always.
        raised(DeadlockError, comm.send, torch.ones(count + 1), 1 - rank)


def test_an_eager_send_arrives_although_its_sender_closes(fresh_pool: RankPool) -> None:
    fresh_pool.run(send_and_close, 2, connected=False)


def send_and_close(rank: int, size: int, path: str) -> None:
    os.environ["UNISONO_EAGER_SEND"] = str(2**20)
    with connect(path, rank, size) as comm:
        if rank == 0:
            comm.send(torch.arange(100_000), 1)
        else:
            time.sleep(0.2)
            got = torch.empty(100_000, dtype=torch.int64)
            comm.recv(got, 0)
            assert torch.equal(got, torch.arange(100_000))
