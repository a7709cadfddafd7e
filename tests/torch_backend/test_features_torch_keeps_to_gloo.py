"""Features that torch's own suite tests only on gloo, mpi or nccl, by name; here on unisono.

Messages in batches, coalesced calls, all_to_all of CPU tensors, timeouts of barriers, sparse sums,
futures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from torch_names import since_2_13
from unisono.errors import CollectiveTimeout

COMBINE = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64]


def filled(rows: int, value: complex, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, 2), value if dtype.is_complex else value.real).to(dtype)


def wait_for(*works: Any) -> None:
    """Blocking calls have none."""
    for work in works:
        if work is not None:
            work.wait()


# -- batches of messages ---------------------------------------------------------------------------


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("elements", [1, 100_000])
def test_a_batch_with_everybody(process_group: Any, elements: int) -> None:
    """And with the rank itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(elements) for _ in range(size)]
    sent = [torch.full((elements,), 10.0 * rank + peer) for peer in range(size)]
    messages = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in enumerate(sent)]
    messages += [
        dist.P2POp(dist.irecv, received[peer], group_peer=peer) for peer in reversed(range(size))
    ]
    wait_for(*dist.batch_isend_irecv(messages))
    assert all(tensor.eq(10.0 * peer + rank).all() for peer, tensor in enumerate(received))


@pytest.mark.ranks(3)
def test_tags_of_a_batch_are_kept_apart(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    received = [torch.zeros(1) for _ in range(4)]
    messages = [
        dist.P2POp(dist.isend, torch.tensor([float(tag)]), right, tag=tag) for tag in range(4)
    ]
    messages += [dist.P2POp(dist.irecv, received[tag], left, tag=tag) for tag in (3, 1, 0, 2)]
    wait_for(*dist.batch_isend_irecv(messages))
    assert [float(tensor) for tensor in received] == [0, 1, 2, 3]


@pytest.mark.ranks(3)
def test_a_batch_in_a_subgroup_without_rank_0(process_group: Any) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    peer = 3 - dist.get_rank()
    received = torch.zeros(2)
    messages = [
        dist.P2POp(dist.irecv, received, peer, group),
        dist.P2POp(dist.isend, torch.full((2,), float(dist.get_rank())), peer, group),
    ]
    wait_for(*dist.batch_isend_irecv(messages))
    assert received.eq(peer).all()


@pytest.mark.ranks(2)
def test_a_batch_of_something_else_is_refused(process_group: Any) -> None:
    with pytest.raises(ValueError, match="Invalid ``op``"):
        dist.P2POp(dist.broadcast, torch.ones(1), 1 - dist.get_rank())
    with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
        dist.batch_isend_irecv([1])
    dist.barrier()


# -- coalesced calls -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*coalesced.*deprecated:FutureWarning")
@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_all_reduce_coalesced(
    process_group: Any, op: str, dtype: torch.dtype, async_op: bool
) -> None:
    shapes = [(3,), (4, 5), (5_000,), (0,)]

    def brought(rank: int) -> list[torch.Tensor]:
        return [torch.full(shape, 2 + index - rank).to(dtype) for index, shape in enumerate(shapes)]

    tensors = brought(dist.get_rank())
    wait_for(dist.all_reduce_coalesced(tensors, getattr(dist.ReduceOp, op), async_op=async_op))
    everybody = [brought(rank) for rank in range(dist.get_world_size())]
    for tensor, *parts in zip(tensors, *everybody, strict=True):
        assert torch.equal(tensor, reduce(COMBINE[op], parts))


# -- all_to_all ------------------------------------------------------------------------------------


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["equal parts", "unequal parts"])
def test_all_to_all_single(
    process_group: Any, even: bool, dtype: torch.dtype, async_op: bool
) -> None:
    """Uneven: rank r sends r + peer rows to each peer, so none from rank 0 to itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [2 if even else rank + peer for peer in range(size)]
    splits = () if even else (rows, rows)
    parts = [filled(rows[peer], 10 * rank + peer + 1j, dtype) for peer in range(size)]
    output = torch.zeros_like(torch.cat(parts))
    wait_for(dist.all_to_all_single(output, torch.cat(parts), *splits, async_op=async_op))
    expected = [filled(rows[peer], 10 * peer + rank + 1j, dtype) for peer in range(size)]
    assert torch.equal(output, torch.cat(expected))


@pytest.mark.ranks(3)
def test_all_to_all_single_with_splits_on_one_side(process_group: Any) -> None:
    """Every rank sends one row to each, which is also an even split."""
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.zeros(size, 2)
    dist.all_to_all_single(output, torch.full((size, 2), float(rank)), [1] * size)
    assert torch.equal(output, torch.arange(float(size)).unsqueeze(1).expand(size, 2))


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_of_lists(process_group: Any, dtype: torch.dtype, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [filled(rank + 1, 10 * rank + peer, dtype) for peer in range(size)]
    outputs = [filled(peer + 1, -1, dtype) for peer in range(size)]
    wait_for(dist.all_to_all(outputs, inputs, async_op=async_op))
    for peer, output in enumerate(outputs):
        assert torch.equal(output, filled(peer + 1, 10 * peer + rank, dtype))


@pytest.mark.ranks(3)
def test_all_to_all_in_a_subgroup(process_group: Any) -> None:
    group = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        return
    rank = dist.get_rank(group)
    outputs = [torch.zeros(2), torch.zeros(3)]
    dist.all_to_all(outputs, [torch.full((2 + rank,), 1.0 * rank) for _ in range(2)], group)
    assert [tensor.tolist() for tensor in outputs] == [[0.0] * 2, [1.0] * 3]
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group)
    assert output.tolist() == [float(rank), 10.0 + rank]


# -- barriers with time limits ---------------------------------------------------------------------


@contextmanager
def late(seconds: float) -> Iterator[None]:
    """The block times out after this many seconds, or earlier by as much as another rank began
    before this one: the first to reach its limit ends the call."""
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=" timeout ") as caught:
        yield
    assert seconds / 2 < time.monotonic() - start < seconds + 5
    assert caught.value.missing == (2,)
    assert caught.value.arrived == (0, 1)


@pytest.mark.ranks(3)
def test_the_limit_of_a_group_ends_its_barrier(process_group: Any) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() != 2:
        with late(1):
            dist.barrier(group)
    dist.barrier()


@since_2_13
@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_may_have_a_limit_of_its_own(process_group: Any, async_op: bool) -> None:
    group = dist.new_group(timeout=timedelta(seconds=300))
    dist.barrier(group, timeout=timedelta(seconds=20))
    if dist.get_rank() != 2:
        with late(0.5):
            wait_for(dist.barrier(group, async_op=async_op, timeout=timedelta(seconds=0.5)))
        assert group.comm.timeout_s == 300
    dist.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_names_the_missing(process_group: Any, wait_all_ranks: bool) -> None:
    unisono.monitored_barrier(timeout_s=20, wait_all_ranks=wait_all_ranks)
    group = dist.new_group()
    if dist.get_rank() != 2:
        with late(0.5):
            unisono.monitored_barrier(group, 0.5, wait_all_ranks)
    dist.barrier()


@pytest.mark.ranks(3)
def test_monitored_barrier_takes_every_kind_of_group(process_group: Any) -> None:
    """Only members wait: rank 0 is in neither group and returns at once."""
    few = dist.new_group([1, 2])
    unisono.monitored_barrier(few, timeout_s=20)
    if dist.get_rank():
        few.monitored_barrier(timedelta(seconds=20))
        unisono.monitored_barrier(few.comm)
    unisono.monitored_barrier()
    unisono.monitored_barrier(dist.new_group(backend="gloo"), timeout_s=20)


@pytest.mark.ranks(3)
def test_monitored_barrier_of_the_world(comm: Any) -> None:
    unisono.monitored_barrier(timeout_s=20)
    few = comm.split([0, 1, 2])
    if comm.rank != 2:
        with late(0.5):
            few.barrier(timeout_s=0.5)
    comm.barrier()


# -- sparse sums, futures, profiles ----------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_sum_of_sparse_tensors(process_group: Any, async_op: bool) -> None:
    """Rank r has the entries (r, r) and (0, 1); ranks have different numbers of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = torch.tensor([[rank, 0], [rank, 1]])[:, : 2 if rank else 1]
    tensor = torch.sparse_coo_tensor(
        indices, torch.ones(indices.size(1)), (size, size), check_invariants=True
    )
    expected = torch.eye(size)
    expected[0, 1] = size - 1
    wait_for(dist.all_reduce(tensor, async_op=async_op))
    assert torch.equal(tensor.to_dense(), expected)


@pytest.mark.ranks(2)
def test_a_future_of_a_call_on_the_group(process_group: Any) -> None:
    """Calls on the group itself need no options, as with torch's own groups."""
    future = process_group.allreduce([torch.ones(3)]).get_future()
    doubled = future.then(lambda done: [tensor * 2 for tensor in done.wait()])
    assert doubled.wait()[0].eq(4).all()
    gathered = [torch.zeros(1) for _ in range(2)]
    process_group.allgather([gathered], [torch.tensor([1.0 + dist.get_rank()])]).wait()
    assert [part.item() for part in gathered] == [1, 2]
    process_group.broadcast([gathered[1]]).wait()
    part = torch.zeros(1)
    process_group.reduce_scatter([part], [[torch.ones(1), torch.full((1,), 2.0)]]).wait()
    assert part.item() == 2 * dist.get_rank() + 2
    process_group.barrier().wait()


@pytest.mark.ranks(3)
def test_every_short_signature_of_a_call_on_the_group(process_group: Any) -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), process_group
    limit = timedelta(seconds=20)

    def mine() -> torch.Tensor:
        return torch.tensor([rank, -rank])

    def done(work: Any, tensor: torch.Tensor) -> list[int]:
        work.wait()
        return tensor.tolist()

    sum_, highest = [3, -3], [2, 0]
    assert done(group.allreduce(tensor := mine()), tensor) == sum_
    assert done(group.allreduce([tensor := mine()], dist.ReduceOp.MAX), tensor) == highest
    assert done(group.allreduce(tensor := mine(), dist.ReduceOp.MAX, limit), tensor) == highest
    assert done(group.allreduce(tensor := mine(), op=dist.ReduceOp.MAX), tensor) == highest
    assert done(group.broadcast(tensor := mine(), 2), tensor) == [2, -2]
    assert done(group.broadcast(tensor := mine(), root=2, timeout=limit), tensor) == [2, -2]
    reduced = sum_ if rank == 1 else mine().tolist()
    assert done(group.reduce(tensor := mine(), 1), tensor) == reduced
    gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
    everybody = [[peer, -peer] for peer in range(size)]
    group.allgather(gathered, mine()).wait()
    assert [part.tolist() for part in gathered] == everybody
    for part in gathered:
        part.zero_()
    group.gather(gathered if rank == 1 else [], mine(), 1).wait()
    assert [part.tolist() for part in gathered] == (everybody if rank == 1 else [[0, 0]] * size)
    parts = [torch.full((2,), 10 * peer) for peer in range(size)]
    assert (
        done(group.scatter(tensor := mine(), parts if rank == 1 else [], 1), tensor)
        == [10 * rank] * 2
    )
    assert done(group.reduce_scatter(tensor := mine(), parts), tensor) == [30 * rank] * 2
    group.barrier().wait()
    group.barrier(limit).wait()
    group.barrier(timeout=limit).wait()


@pytest.mark.ranks(2)
def test_uneven_inputs_with_unused_parameters(process_group: Any) -> None:
    """DDP's join reduces the map of used parameters through a short signature."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    rounds = 0
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            wrapped(torch.ones(1, 2)).sum().backward()
            rounds += 1
    assert rounds == 2 + dist.get_rank()
    assert model[1].weight.grad is None
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.autograd.profiler.profile, torch.profiler.profile])
def test_a_profile_shows_the_calls(process_group: Any, kind: Any) -> None:
    for _ in range(2):  # earlier calls may take a shorter path
        dist.all_reduce(torch.ones(3, 4))
        dist.barrier()
    with kind(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        if dist.get_rank():
            dist.send(torch.ones(7), 0)
        else:
            dist.recv(torch.ones(7), 1)
        dist.barrier()
    events = profile.function_events if hasattr(profile, "function_events") else profile.events()
    assert [
        (event.name, event.input_shapes) for event in events if event.name.startswith("unisono")
    ] == [
        ("unisono:all_reduce", [[3, 4]]),
        ("unisono:all_reduce", [[5]]),
        ("unisono:isend" if dist.get_rank() else "unisono:irecv", [[7]]),
        ("unisono:barrier", []),
    ]


@pytest.mark.ranks(2)
def test_gradients_that_are_accumulated_without_sync(process_group: Any) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    inputs = torch.full((1, 2), float(dist.get_rank() + 1))
    with wrapped.no_sync():
        wrapped(inputs).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(dist.get_rank() + 1).all()
    wrapped(inputs).sum().backward()
    assert model.weight.grad.eq(3).all()  # the mean of 2 and 4
