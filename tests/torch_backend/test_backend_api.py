"""The functions of torch.distributed on the backend "unisono": old names and new, lists of uneven
sizes, coalesced forms, objects, and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from torch_names import all_gather_single, reduce_scatter_single, since_2_13
from unisono.errors import CollectiveMismatch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # about old names
RANKS = [1, 2, 3]
SEVERAL = [2, 3]


def full(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(value))


def total(size: int) -> float:
    """The sum of the ranks 0, 1, ... if each contributes its number plus one."""
    return float(sum(range(1, size + 1)))


# -- every collective ----------------------------------------------------------------------------


@pytest.mark.ranks([*RANKS, 4])
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_of_tensors(process_group: Any, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def done(work: Any) -> None:
        if async_op:
            assert work.wait()
            assert work.is_completed()
        else:
            assert work is None

    mine = full(rank + 1, 5)
    summed = mine.clone()
    done(dist.all_reduce(summed, async_op=async_op))
    assert summed.eq(total(size)).all()
    root = size - 1
    reduced = mine.clone()
    done(dist.reduce(reduced, root, async_op=async_op))
    assert reduced.eq(total(size) if rank == root else rank + 1).all()
    sent = mine.clone()
    done(dist.broadcast(sent, root, async_op=async_op))
    assert sent.eq(size).all()
    gathered = [torch.zeros(5) for _ in range(size)]
    done(dist.all_gather(gathered, mine, async_op=async_op))
    assert [float(part[0]) for part in gathered] == [peer + 1.0 for peer in range(size)]
    wide = torch.zeros(5 * size)
    done(all_gather_single(wide, mine, async_op=async_op))
    assert torch.equal(wide, torch.cat(gathered))
    part = torch.zeros(2)
    done(reduce_scatter_single(part, torch.arange(2.0 * size), async_op=async_op))
    assert torch.equal(part, torch.tensor([2.0 * rank, 2.0 * rank + 1]) * size)
    parts = [full(peer, 2) for peer in range(size)]
    done(dist.reduce_scatter(part, parts, async_op=async_op))
    assert part.eq(rank * size).all()
    received = torch.zeros(size)
    done(dist.all_to_all_single(received, full(rank, size), async_op=async_op))
    assert torch.equal(received, torch.arange(float(size)))
    done(dist.barrier(async_op=async_op))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
def test_autograd_counts_what_a_call_writes_and_nothing_else(
    process_group: Any, async_op: bool
) -> None:
    """By torch's own version counter of a tensor, which backward compares with the value it
    saved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, part, wide = full(1), full(1, 1), full(1, size)
    parts, others = [full(1, 1) for _ in range(size)], [full(1, 1) for _ in range(size)]
    is_root = rank == 1
    splits = [[1] * size] * 2
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], list[torch.Tensor]]] = [
        (dist.all_reduce, (x,), [x]),
        (dist.all_reduce, (x, dist.ReduceOp.AVG), [x]),
        (dist.broadcast, (x, 1), [] if is_root else [x]),
        (dist.reduce, (x, 1), [x] if is_root else []),
        (dist.all_gather, (parts, part), parts),
        (all_gather_single, (wide, part), [wide]),
        (dist.reduce_scatter, (part, parts), [part]),
        (reduce_scatter_single, (part, wide), [part]),
        (dist.gather, (part, parts if is_root else None, 1), parts if is_root else []),
        (dist.scatter, (part, parts if is_root else None, 1), [part]),
        (dist.all_to_all, (parts, others), parts),
        (dist.all_to_all_single, (wide, full(rank, size)), [wide]),
        (dist.all_to_all_single, (wide, full(rank, size), *splits), [wide]),
        (dist.all_reduce_coalesced, ([x, part],), [x, part]),
        (dist.all_gather_coalesced, ([[each] for each in parts], [part]), parts),
    ]
    for call, arguments, written in calls:
        everything = [x, part, wide, *parts, *others]
        before = [tensor._version for tensor in everything]
        work = call(*arguments, async_op=async_op)
        if async_op:
            work.wait()
        counted = [now._version > was for now, was in zip(everything, before, strict=True)]
        expected = [any(tensor is each for each in written) for tensor in everything]
        assert counted == expected, (call.__name__, counted, expected)

    taken = full(0, size)
    for receive in (dist.recv, lambda *message: dist.irecv(*message).wait()):
        before = [wide._version, taken._version]
        sent = dist.isend(wide, (rank + 1) % size)
        assert sent is not None
        receive(taken, (rank - 1) % size)
        sent.wait()
        assert wide._version == before[0]
        assert taken._version > before[1]

    weight = torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    work = dist.all_reduce(x, async_op=async_op)
    if async_op:
        work.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        without_count = full(1)
    work = dist.all_reduce(without_count, async_op=async_op)
    if async_op:
        work.wait()
    assert without_count.eq(size).all()


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_lazily_negated_tensor_reads_as_it_is(process_group: Any, async_op: bool) -> None:
    """gloo also accepts one as input, but drops a result in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    imaginary = torch.arange(1.0, 4) * (rank + 1)
    mine = torch.complex(torch.zeros(3), imaginary).conj().imag
    assert mine.is_neg()
    parts, wide = [full(0) for _ in range(size)], torch.zeros(3 * size)
    sent = mine if rank == 1 else full(0)
    version = sent._version
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (dist.all_gather, (parts, mine)),
        (all_gather_single, (wide, mine)),
        (dist.broadcast, (sent, 1)),
        (dist.all_reduce, (mine, dist.ReduceOp.PRODUCT)),
    ]
    for call, arguments in calls:
        work = call(*arguments, async_op=async_op)
        if async_op:
            work.wait()
        if call is dist.broadcast:
            assert (sent._version == version) == (rank == 1)
    expected = [-torch.arange(1.0, 4) * (peer + 1) for peer in range(size)]
    assert torch.equal(torch.stack(parts), torch.stack(expected))
    assert torch.equal(wide, torch.cat(expected))
    assert torch.equal(mine, torch.stack(expected).prod(0))
    if rank != 1:
        assert torch.equal(sent, expected[1])


@pytest.mark.ranks(3)
def test_a_mismatch_shows_the_user_s_line(process_group: Any) -> None:
    with pytest.raises(CollectiveMismatch, match=r"test_backend_api.py:[0-9]+ in test_a_mismatch"):
        dist.all_reduce(torch.ones(3 + dist.get_rank() // 2))


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize(
    "name", [pytest.param("all_gather_single", marks=since_2_13), "all_gather_into_tensor"]
)
def test_all_gather_by_its_names(process_group: Any, name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    flat, stacked = torch.zeros(2 * size), torch.zeros(size, 2)
    getattr(dist, name)(flat, full(rank, 2))
    getattr(dist, name)(stacked, full(rank, 2))
    assert flat.tolist() == [float(peer) for peer in range(size) for _ in range(2)]
    assert stacked.tolist() == [[float(peer)] * 2 for peer in range(size)]


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize(
    "name", [pytest.param("reduce_scatter_single", marks=since_2_13), "reduce_scatter_tensor"]
)
def test_reduce_scatter_by_its_names(process_group: Any, name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.zeros(2)
    getattr(dist, name)(part, torch.arange(2.0 * size) + rank)
    assert part.tolist() == [size * 2.0 * rank + total(size) - size + i * size for i in range(2)]


@pytest.mark.ranks(RANKS)
def test_the_oldest_names_still_work(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wide, part = torch.zeros(size), torch.zeros(1)
    dist._all_gather_base(wide, full(rank, 1))
    dist._reduce_scatter_base(part, torch.arange(float(size)))
    summed = full(1)
    dist.all_reduce(summed, dist.reduce_op.SUM)
    assert wide.tolist() == list(range(size))
    assert part.item() == rank * size
    assert summed.eq(size).all()


# -- lists ---------------------------------------------------------------------------------------


@pytest.mark.ranks(SEVERAL)
def test_parts_of_a_list_may_differ_in_size(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.zeros(peer) for peer in range(size)]
    dist.all_gather(gathered, full(rank, rank))
    assert [part.tolist() for part in gathered] == [[float(peer)] * peer for peer in range(size)]

    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [full(rank + 1, peer + 1) for peer in range(size)])
    assert part.tolist() == [total(size)] * (rank + 1)

    taken = [torch.zeros(peer + rank) for peer in range(size)]
    dist.all_to_all(taken, [full(rank, rank + peer) for peer in range(size)])
    assert [part.tolist() for part in taken] == [[float(p)] * (p + rank) for p in range(size)]

    given = torch.repeat_interleave(torch.arange(float(size)), torch.arange(size)) + 10 * rank
    received = torch.zeros(rank * size)
    dist.all_to_all_single(received, given, [rank] * size, list(range(size)))
    assert received.tolist() == [rank + 10.0 * peer for peer in range(size) for _ in range(rank)]


@pytest.mark.ranks(RANKS)
def test_gather_and_scatter_name_their_root_either_way(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        for by in ("dst", "group_dst"):
            parts = [torch.zeros(3) for _ in range(size)] if rank == root else None
            dist.gather(full(rank), parts, **{by: root})
            if parts is not None:
                assert [float(part[2]) for part in parts] == list(range(size))
            summed = full(rank + 1)
            dist.reduce(summed, **{by: root})
            assert summed.eq(total(size) if rank == root else rank + 1).all()
        for by in ("src", "group_src"):
            given = [full(10 * root + peer) for peer in range(size)] if rank == root else None
            taken = torch.zeros(3)
            dist.scatter(taken, given, **{by: root})
            assert taken.eq(10 * root + rank).all()
            sent = full(rank)
            dist.broadcast(sent, **{by: root})
            assert sent.eq(root).all()


@pytest.mark.ranks(SEVERAL)
def test_split_sizes_that_do_not_fit_are_refused(process_group: Any) -> None:
    size = dist.get_world_size()
    with pytest.raises(ValueError, match="split"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [2] * size, [1] * size)
    with pytest.raises(ValueError, match="cut evenly"):
        dist.all_to_all_single(torch.zeros(size + 1, size), torch.zeros(size + 1, size))
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_refuses_alone_does_not_leave_its_peers_waiting(process_group: Any) -> None:
    sizes = [2, 2] if dist.get_rank() == 0 else [1, 1]
    kind = ValueError if dist.get_rank() == 0 else CollectiveMismatch
    with pytest.raises(kind):
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), sizes, [1, 1])


# -- coalesced -----------------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("async_op", [False, True])
def test_many_tensors_in_one_call(process_group: Any, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [full(rank + 1, count) for count in (1, 0, 5)]
    inputs = [full(rank, 2), full(10 * rank, 3)]
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    reduced = dist.all_reduce_coalesced(tensors, async_op=async_op)
    gathered = dist.all_gather_coalesced(outputs, inputs, async_op=async_op)
    if async_op:  # torch returns the futures here
        torch.futures.wait_all([reduced, gathered])
    assert [tensor.tolist() for tensor in tensors] == [[total(size)] * n for n in (1, 0, 5)]
    for peer, (first, second) in enumerate(outputs):
        assert first.eq(peer).all()
        assert second.eq(10 * peer).all()


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_the_coalescing_manager(
    process_group: Any, async_op: bool, device: torch.device | None
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    summed = [full(rank + 1, count) for count in (2, 7)]
    wide = [torch.zeros(size * count) for count in (2, 7)]
    parts = [torch.zeros(count) for count in (2, 7)]
    calls: list[Callable[[int], Any]] = [
        lambda index: dist.all_reduce(summed[index]),
        lambda index: all_gather_single(wide[index], full(rank, wide[index].numel() // size)),
        lambda index: reduce_scatter_single(parts[index], torch.arange(float(wide[index].numel()))),
    ]
    managers = []
    for call in calls:
        with _coalescing_manager(device=device, async_ops=async_op) as manager:
            managers.append(manager)
            for index in range(2):
                call(index)
    if async_op:
        for manager in managers:
            manager.wait()
    assert all(tensor.eq(total(size)).all() for tensor in summed)
    for output, part, count in zip(wide, parts, (2, 7), strict=True):
        assert output.tolist() == [float(peer) for peer in range(size) for _ in range(count)]
        assert part.tolist() == [size * (count * rank + i) for i in range(count)]


@pytest.mark.ranks(SEVERAL)
@pytest.mark.parametrize("async_op", [False, True])
def test_coalesced_messages_wait_for_nobody(process_group: Any, async_op: bool) -> None:
    """Every rank sends first: calls that block do so at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    taken, everybody = torch.zeros(3), [torch.zeros(2) for _ in range(size)]
    with _coalescing_manager(device=torch.device("cpu"), async_ops=async_op) as manager:
        dist.send(full(rank, 3), (rank + 1) % size)
        dist.recv(taken, (rank - 1) % size)
        dist.all_gather(everybody, full(rank, 2), async_op=True)
    if async_op:
        assert manager.works[0].get_future().wait()[1] is taken
        manager.wait()
    assert taken.eq((rank - 1) % size).all()
    assert [tensor.tolist() for tensor in everybody] == [[float(peer)] * 2 for peer in range(size)]


# -- objects -------------------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
def test_objects_of_any_size(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    assert gathered == [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(size)]

    root = size - 1
    collected: list[Any] | None = [None] * size if rank == root else None
    dist.gather_object(mine, collected, dst=root)
    assert collected == (gathered if rank == root else None)

    sent: list[Any] = ["a", {1: [2]}, None] if rank == root else [None] * 3
    dist.broadcast_object_list(sent, src=root)
    assert sent == ["a", {1: [2]}, None]

    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, list(range(size)) if rank == root else None, src=root)
    assert dealt == [rank]


@pytest.mark.ranks(SEVERAL)
def test_objects_from_one_rank_to_another(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for peer in range(1, size):
            dist.send_object_list(["to", peer], dst=peer)
    else:
        taken: list[Any] = [None, None]
        assert dist.recv_object_list(taken, src=0) == 0
        assert taken == ["to", rank]


# -- messages ------------------------------------------------------------------------------------


@pytest.mark.ranks(SEVERAL)
def test_tags_keep_messages_apart(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(full(100 * rank + tag), after, tag=tag) for tag in range(4)]
    for tag in (3, 0, 2, 1):
        taken = torch.zeros(3)
        assert dist.recv(taken, before, tag=tag) == before
        assert taken.eq(100 * before + tag).all()
    for send in sends:
        assert send is not None
        send.wait()


@pytest.mark.ranks(SEVERAL)
def test_a_receiver_from_anybody_learns_who_it_was(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(full(rank), 0)
        dist.send(full(rank), group_dst=0, tag=7)
        return
    received = [torch.zeros(3) for _ in range(1, size)]
    works = [dist.irecv(tensor) for tensor in received]
    for work, tensor in zip(works, received, strict=True):
        assert work is not None
        work.wait()
        assert tensor.eq(work.source_rank()).all()
        assert work._source_rank() == work.source_rank()
    assert sorted(int(tensor[0]) for tensor in received) == list(range(1, size))
    for tensor in received:
        source = dist.recv(tensor, tag=7)
        assert tensor.eq(source).all()
    assert sorted(int(tensor[0]) for tensor in received) == list(range(1, size))


@pytest.mark.ranks(SEVERAL)
def test_a_message_to_oneself(process_group: Any) -> None:
    rank = dist.get_rank()
    taken = torch.zeros(3)
    works = [dist.irecv(taken, rank), dist.isend(full(rank + 1), rank)]
    for work in works:
        assert work is not None
        work.wait()
    assert taken.eq(rank + 1).all()
