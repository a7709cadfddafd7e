"""Works of torch.distributed on the backend "unisono": waiting, futures, timeouts."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_backend_api import RANKS, SEVERAL, full

from torch_names import all_gather_single, reduce_scatter_single
from unisono.errors import CollectiveTimeout, GroupError, PeerLost


@pytest.mark.ranks(RANKS)
def test_works_may_be_waited_for_in_any_order_or_dropped(process_group: Any) -> None:
    size = dist.get_world_size()
    tensors = [full(i) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[7] = None
    gc.collect()
    for i in reversed(range(30)):
        if works[i] is not None:
            assert works[i].wait()
            assert works[i].is_completed()
            assert works[i].is_success()
            assert works[i].exception() is None
            assert tensors[i].eq(i * size).all()
    assert tensors[7].eq(7 * size).all()


@pytest.mark.ranks(SEVERAL)
def test_works_finish_though_their_group_is_destroyed(process_group: Any) -> None:
    group = dist.new_group()
    tensors = [torch.full((50_000,), float(i)) for i in range(50)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i * dist.get_world_size()).all()


@pytest.mark.ranks(RANKS)
def test_a_blocking_call_comes_after_the_works_before_it(process_group: Any) -> None:
    size = dist.get_world_size()
    tensor = full(1, 100_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    dist.all_reduce(tensor)
    assert tensor.eq(size**4).all()
    assert all(work.is_completed() for work in works)


@pytest.mark.ranks(RANKS)
def test_every_collective_has_a_future_of_its_tensors(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.zeros(1) for _ in range(size)]
    others = [torch.zeros(1) for _ in range(size)]
    taken, wide, reduced = torch.zeros(1), torch.zeros(size), torch.zeros(1)
    summed, sent, combined = full(1, 1), full(rank, 1), full(1, 1)
    mine = full(rank, 1)
    row = torch.arange(float(size))
    cells = [full(peer, 1) for peer in range(size)]
    root = rank == 0
    futures = {
        work.get_future(): result
        for work, result in [
            (dist.all_reduce(summed, async_op=True), [summed]),
            (dist.reduce(combined, 0, async_op=True), [combined]),
            (dist.broadcast(sent, 0, async_op=True), [sent]),
            (dist.all_gather(parts, mine, async_op=True), parts),
            (all_gather_single(wide, mine, async_op=True), [wide]),
            (reduce_scatter_single(reduced, row, async_op=True), [reduced]),
            (dist.scatter(taken, cells if root else None, async_op=True), [taken]),
            (dist.all_to_all(others, cells, async_op=True), others),
        ]
    }
    for future, result in futures.items():
        value = future.wait()
        assert len(value) == len(result)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(value, result, strict=True))
    assert wide.tolist() == list(range(size))
    assert taken.item() == rank
    assert reduced.item() == rank * size
    assert [tensor.item() for tensor in others] == [rank] * size
    dist.barrier(async_op=True).get_future().wait()


@pytest.mark.ranks(SEVERAL)
def test_callbacks_of_a_future_run_when_the_result_is_there(process_group: Any) -> None:
    size = dist.get_world_size()
    work = dist.all_reduce(full(2), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 10)
    called = threading.Event()
    work.get_future().add_done_callback(lambda future: called.set())
    assert doubled.wait().eq(20 * size).all()
    assert called.wait(10)


def coalesced_sums() -> Any:
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in (full(1), full(2)):
            dist.all_reduce(tensor)
    return manager.works[0]


def message(process_group: Any) -> Any:
    rank = dist.get_rank()
    return (dist.irecv if rank else dist.isend)(full(1), 1 - rank)


def joined_messages(process_group: Any) -> Any:
    process_group._start_coalescing(torch.device("cpu"))
    peer = 1 - dist.get_rank()
    dist.isend(full(1), peer)
    dist.irecv(full(0), peer)
    return process_group._end_coalescing(torch.device("cpu"))


FORMS: dict[str, Callable[[Any], Any]] = {
    "small": lambda group: dist.all_reduce(full(1), async_op=True),
    "large": lambda group: dist.all_reduce(full(1, 20_000), async_op=True),
    "wide": lambda group: dist.all_gather([full(0), full(0)], full(1), async_op=True),
    "barrier": lambda group: dist.barrier(async_op=True),
    "coalesced": lambda group: coalesced_sums(),
    "message": message,
    "joined": joined_messages,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_after_wait_a_future_is_done_and_its_callbacks_have_run(
    process_group: Any, form: str
) -> None:
    for _ in range(1_000):
        work, called = FORMS[form](process_group), []
        future = work.get_future()
        future.add_done_callback(called.append)
        chained = future.then(lambda done: done.value())
        work.wait()
        assert future.done()
        assert called == [future]
        assert chained.done()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [True, False])
def test_a_future_of_a_failed_work_is_done_after_wait(process_group: Any, before: bool) -> None:
    groups = [dist.new_group() for _ in range(20)]
    for group in groups:
        if dist.get_rank() == 0:
            work = dist.all_reduce(full(1), group=group, async_op=True)
            called: list[Any] = []
            if before:
                work.get_future().add_done_callback(called.append)
            with pytest.raises(PeerLost):
                work.wait()
            assert work.get_future().done()
            assert called == [work.get_future()] * before
            with pytest.raises(PeerLost):
                work.get_future().value()
        else:
            dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_after_a_limited_wait_a_future_still_follows_its_work(process_group: Any) -> None:
    if dist.get_rank() == 0:
        work = dist.all_reduce(full(1), async_op=True)
        future = work.get_future()
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(milliseconds=50))
        assert not future.done()
        dist.send(full(0), 1)
        assert future.wait()[0].eq(2).all()
    else:
        dist.recv(full(0), 0)
        dist.all_reduce(full(1))


@pytest.mark.ranks(2)
def test_a_work_may_be_waited_for_in_its_own_callback(process_group: Any) -> None:
    work = dist.all_reduce(full(1), async_op=True)
    waited = work.get_future().then(lambda done: work.wait())
    work.wait()
    assert waited.done()
    assert waited.value()


@pytest.mark.ranks(2)
def test_a_future_does_not_wait_for_another(process_group: Any) -> None:
    taken, summed = torch.zeros(3), full(1)
    if dist.get_rank() == 0:
        message = dist.irecv(taken, 1)
        assert message is not None
        last = message.get_future()
        first = dist.all_reduce(summed, async_op=True).get_future()
        dist.send(full(5), 1)  # now rank 1 continues
        first.wait()
        assert not last.done()
        time.sleep(0.3)  # long enough for a search for deadlocks
        dist.send(full(6), 1)
        last.wait()
        assert taken.eq(7).all()
    else:
        dist.recv(taken, 0)
        dist.all_reduce(summed)
        dist.recv(taken, 0)
        dist.send(full(7), 0)
    assert summed.eq(2).all()


@pytest.mark.ranks(2)
def test_wait_with_a_limit_leaves_the_work_under_way(process_group: Any) -> None:
    rank = dist.get_rank()
    tensor = full(rank)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.send(full(0), 1)
        work.wait(timedelta(seconds=20))
    else:
        dist.recv(torch.zeros(3), 0)
        dist.all_reduce(tensor)
    assert tensor.eq(1).all()


@pytest.mark.ranks(2)
def test_a_call_may_have_a_timeout_of_its_own(process_group: Any) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=1)
    began = time.monotonic()
    if dist.get_rank() == 0:
        work = process_group.allreduce([full(1)], options)
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            work.wait()
        assert 0.9 < time.monotonic() - began < 10
    else:
        while process_group.comm.errored is None and time.monotonic() - began < 10:
            time.sleep(0.01)
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(full(1))


@pytest.mark.ranks(2)
def test_a_timeout_of_one_call_is_not_that_of_the_next(process_group: Any) -> None:
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=1.5)  # in which both come, also on a busy machine
    dist.barrier()
    process_group.barrier(options).wait()
    if dist.get_rank() == 1:
        time.sleep(2.0)
    dist.barrier()


@pytest.mark.ranks(2)
def test_every_signature_of_barrier(process_group: Any) -> None:
    blocking = dist.BarrierOptions()
    blocking.asyncOp = False
    group = process_group.comm.transport.group
    before = group.state()["calls"]
    assert process_group.barrier(blocking) is None
    assert process_group.barrier(opts=blocking) is None
    process_group.barrier().wait()
    process_group.barrier(timedelta(seconds=60)).wait()
    process_group.barrier(dist.BarrierOptions()).wait()
    assert group.state()["calls"] == before + 5


@pytest.mark.ranks(2)
def test_a_blocking_barrier_may_have_a_timeout_of_its_own(process_group: Any) -> None:
    group: Any = dist.new_group()
    options = dist.BarrierOptions()
    options.asyncOp = False
    options.timeout = timedelta(seconds=1)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            group.barrier(opts=options)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["new_group", "set_timeout"])
def test_a_group_may_have_a_timeout_of_its_own(process_group: Any, how: str) -> None:
    limit = timedelta(seconds=1)
    group = dist.new_group(timeout=limit) if how == "new_group" else dist.new_group()
    if how == "set_timeout":
        group.set_timeout(limit)
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="rank 1 never arrived"):
            dist.all_reduce(full(1), group=group)
        assert time.monotonic() - began < 10
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_future_of_a_work_that_fails_raises(process_group: Any) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        future = dist.all_reduce(full(1), group=group, async_op=True).get_future()
        chained = future.then(lambda done: done.wait())
        with pytest.raises(PeerLost):
            future.wait()
        with pytest.raises(PeerLost):
            chained.wait()
    else:
        dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_the_end_of_a_group_completes_its_futures(process_group: Any) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        collective = dist.all_reduce(full(1), group=group, async_op=True).get_future()
        message = dist.irecv(full(1), 1, group=group)
        assert message is not None
        received = message.get_future()
        dist.destroy_process_group(group)
        for future in (collective, received):
            with pytest.raises(GroupError, match="closed"):
                future.wait()
    dist.barrier()
