"""Blocking calls of torch.distributed that are one call into the engine: what the engine reads from
torch's options, which calls take the general path, and that both give the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from torch_names import all_gather_single, reduce_scatter_single
from unisono.comm.engine import Operation, Status
from unisono.comm.shared_memory.torch_reductions import reductions_by_hash
from unisono.errors import CollectiveMismatch, CollectiveTimeout

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # about old names
OPTIONS: dict[Operation, type] = {
    Operation.ALL_REDUCE: AllreduceOptions,
    Operation.REDUCE: ReduceOptions,
    Operation.BROADCAST: BroadcastOptions,
    Operation.ALL_GATHER: AllgatherOptions,
    Operation.REDUCE_SCATTER: ReduceScatterOptions,
    Operation.ALL_TO_ALL: AllToAllOptions,
}
EXPECTED = {  # of [3, 5] and [6, 5]
    "SUM": [9, 10],
    "PRODUCT": [18, 25],
    "MIN": [3, 5],
    "MAX": [6, 5],
    "BAND": [2, 5],
    "BOR": [7, 5],
    "BXOR": [5, 0],
}


def options_of(operation: Operation, **fields: Any) -> Any:
    options = OPTIONS[operation]()
    options.asyncOp = False
    for name, value in fields.items():
        setattr(options, name, value)
    return options


@pytest.fixture
def rehash(
    process_group: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Any], int]], None]]:
    """Give torch's reductions other hashes, as other numbers would, and have them looked up
    again."""

    def learn() -> None:
        reductions_by_hash.cache_clear()
        process_group._names_of_ops = reductions_by_hash()

    def change(hash_of: Callable[[Any], int]) -> None:
        monkeypatch.setattr(dist.ReduceOp, "__hash__", hash_of)
        learn()

    yield change
    monkeypatch.undo()
    learn()


@pytest.mark.ranks(2)
def test_reductions_are_known_by_name(process_group: Any, rehash: Any) -> None:
    number_of, ops, rank = dist.ReduceOp.__hash__, dist.ReduceOp, dist.get_rank()
    rehash(lambda op: 8 - number_of(op))
    for name, expected in EXPECTED.items():
        x = torch.tensor([6, 5]) if rank else torch.tensor([3, 5])
        dist.all_reduce(x, getattr(ops, name))
        assert x.tolist() == expected, name
    x = torch.tensor([3.0, 5.0]) + rank
    dist.all_reduce(x, ops.AVG)
    assert x.tolist() == [3.5, 5.5]
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
    assert x.tolist() == [14.0, 22.0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("hash_of", [lambda op: id(op), lambda op: 7], ids=["object", "none"])
def test_hashes_that_do_not_tell_reductions_apart(rehash: Any, hash_of: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot identify the reductions"):
        rehash(hash_of)


@pytest.mark.ranks(2)
def test_plain_calls_go_straight(process_group: Any) -> None:
    rank, straight = dist.get_rank(), process_group._run_given
    for name, expected in EXPECTED.items():
        x = torch.tensor([6, 5]) if rank else torch.tensor([3, 5])
        options = options_of(Operation.ALL_REDUCE, reduceOp=getattr(dist.ReduceOp, name))
        assert straight(Operation.ALL_REDUCE, [x], None, options) == Status.OK
        assert x.tolist() == expected
    for root in (0, 1):
        x = torch.tensor([float(rank)])
        options = options_of(Operation.BROADCAST, rootRank=root)
        assert straight(Operation.BROADCAST, [x], None, options) == Status.OK
        assert x.item() == root
        x = torch.tensor([rank + 1.0])
        options = options_of(Operation.REDUCE, rootRank=root, reduceOp=dist.ReduceOp.SUM)
        assert straight(Operation.REDUCE, [x], None, options) == Status.OK
        assert x.item() == (3.0 if rank == root else rank + 1.0)
    mine, wide = torch.tensor([rank + 1.0]), torch.zeros(2)
    gathers = options_of(Operation.ALL_GATHER)
    assert straight(Operation.ALL_GATHER, wide, mine, gathers) == Status.OK
    assert wide.tolist() == [1.0, 2.0]
    parts = [torch.zeros(1), torch.zeros(1)]
    assert straight(Operation.ALL_GATHER, [parts], [mine], gathers) == Status.OK
    assert torch.cat(parts).tolist() == [1.0, 2.0]
    scatters = options_of(Operation.REDUCE_SCATTER, reduceOp=dist.ReduceOp.MAX)
    given = torch.tensor([1.0, 9.0]) + rank
    assert straight(Operation.REDUCE_SCATTER, mine, given, scatters) == Status.OK
    assert mine.item() == (10.0 if rank else 2.0)
    given_parts = [torch.tensor([4.0]), torch.tensor([5.0])]
    assert straight(Operation.REDUCE_SCATTER, [mine], [given_parts], scatters) == Status.OK
    assert mine.item() == 4.0 + rank
    taken, exchanges = torch.zeros(2), options_of(Operation.ALL_TO_ALL)
    given = torch.tensor([0.0, 1.0]) + 10 * rank
    assert straight(Operation.ALL_TO_ALL, taken, given, exchanges) == Status.OK
    assert taken.tolist() == [0.0 + rank, 10.0 + rank]


@pytest.mark.ranks(2)
def test_other_calls_are_left_to_the_long_way(process_group: Any) -> None:
    """They return ASK_AGAIN on this rank alone: had a peer seen them, the last call would not
    match."""
    x, wide, straight = torch.ones(2), torch.ones(4), process_group._run_given
    sums = options_of(Operation.ALL_REDUCE, reduceOp=dist.ReduceOp.SUM)
    left = [
        (Operation.ALL_REDUCE, [x], options_of(Operation.ALL_REDUCE, asyncOp=True)),
        (Operation.ALL_REDUCE, [x], options_of(Operation.ALL_REDUCE, reduceOp=dist.ReduceOp.AVG)),
        (Operation.ALL_REDUCE, [x], options_of(Operation.BROADCAST)),
        (Operation.ALL_REDUCE, [x], None),
        (Operation.ALL_REDUCE, x, sums),
        (Operation.ALL_REDUCE, [x, x], sums),
        (Operation.ALL_REDUCE, [[x]], sums),
        (Operation.ALL_REDUCE, [x.to_sparse()], sums),
        (Operation.BROADCAST, [x], options_of(Operation.BROADCAST, rootRank=2)),
        (Operation.BROADCAST, [x], options_of(Operation.BROADCAST, rootRank=-1)),
    ]
    if dist.get_rank() == 0:
        for operation, tensors, options in left:
            assert straight(operation, tensors, None, options) == Status.ASK_AGAIN, operation
        gathers, exchanges = options_of(Operation.ALL_GATHER), options_of(Operation.ALL_TO_ALL)
        assert straight(Operation.ALL_GATHER, [wide], [x], gathers) == Status.ASK_AGAIN
        assert straight(Operation.ALL_GATHER, torch.ones(5), x, gathers) == Status.ASK_AGAIN
        assert straight(Operation.ALL_GATHER, [x, x], x, gathers) == Status.ASK_AGAIN
        rows = torch.ones(1, 4)  # four elements, but one row, which cannot be split
        assert straight(Operation.ALL_TO_ALL, rows, rows, exchanges) == Status.ASK_AGAIN
    assert straight(Operation.ALL_REDUCE, [x], None, sums) == Status.OK
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(3)
def test_both_ways_come_to_the_same(process_group: Any) -> None:
    """Averages take the general path, the rest the fast path."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        x = torch.tensor([rank + 1, -rank])
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [2, -1]
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert x.item() == 6.0
        dist.broadcast(x.mul_(rank), 2)
        assert x.item() == 12.0
        wide = torch.zeros(size)
        all_gather_single(wide, torch.tensor([float(rank)]))
        assert wide.tolist() == [0.0, 1.0, 2.0]
        reduce_scatter_single(x, wide + rank)
        assert x.item() == 3.0 * rank + 3.0
        dist.all_to_all_single(wide, torch.arange(3.0) + 10 * rank)
        assert wide.tolist() == [rank, 10.0 + rank, 20.0 + rank]
        dist.barrier()


@pytest.mark.ranks(2)
def test_what_goes_straight_is_checked(process_group: Any) -> None:
    x = torch.ones(2)
    call = partial(dist.all_reduce, x) if dist.get_rank() else partial(dist.broadcast, x, 0)
    with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: broadcast.*rank 1: all_reduce"):
        call()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_a_timeout_of_a_straight_call_is_told(process_group: Any) -> None:
    if dist.get_rank():
        process_group.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(CollectiveTimeout, match="all_gather"):
            all_gather_single(torch.zeros(2), torch.ones(1))
    else:
        while process_group.comm.errored is None:  # it is too late
            pass
