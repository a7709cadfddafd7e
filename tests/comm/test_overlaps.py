"""Arguments whose tensors share memory: the right result, or an error on every rank.

Every case of the table in docs/collectives.md, on every transport. Expected results come from plain
lists of numbers. A call that only one rank rejects ends the group, so such cases have their own
group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from implementations import on_implementations
from ranks import attempt, raised, subgroup
from unisono import run_schedule
from unisono.comm.arguments import check_overlaps
from unisono.comm.communicator import Communicator
from unisono.comm.engine import native
from unisono.comm.engine.numbers import Operation
from unisono.errors import CollectiveMismatch, MessageMismatch
from unisono.plan import find
from unisono.world.world import resolve


@pytest.fixture
def comm(process_group: Any) -> Communicator:
    """The Communicator under the default group: native, or over gloo."""
    return resolve(process_group)


def on(ours: list[int], gloo: list[int]) -> pytest.MarkDecorator:
    """Run a test on groups of these many ranks, on our backend and on gloo."""
    chosen = [*(("native", ranks) for ranks in ours), *(("torch", ranks) for ranks in gloo)]
    return on_implementations(chosen, quick=chosen)


def row(rank: int, length: int, first: int = 0) -> torch.Tensor:
    """Numbers, each of which identifies a rank and an index."""
    return torch.arange(first, first + length, dtype=torch.float64) + 1_000_000 * (rank + 1)


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """All ranks raise the same error, and none waits for another."""
    error = attempt(call, *args, **options)
    assert type(error) is ValueError, (call, error)
    assert "share" in str(error), error


# -- in place: what has a meaning ----------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("length", [3, 20_000])  # in the descriptor, and in several steps
@on(ours=[1, 2, 3, 4], gloo=[1, 2, 3])
def test_in_place_forms_give_the_right_result(
    comm: Communicator, length: int, async_op: bool
) -> None:
    def done(work: Any) -> None:
        assert (work is not None) is async_op
        if work is not None:
            work.wait()

    rank, size = comm.rank, comm.size
    everyone = [row(other, length) for other in range(size)]
    wide = [row(other, size * length) for other in range(size)]
    total = torch.stack(wide).sum(0)
    own = slice(rank * length, (rank + 1) * length)

    output = torch.zeros(size * length, dtype=torch.float64)
    output[own] = row(rank, length)
    done(comm.all_gather(output, output[own], async_op=async_op))
    assert torch.equal(output, torch.cat(everyone))

    outputs = [torch.zeros(length, dtype=torch.float64) for _ in range(size)]
    outputs[rank].copy_(row(rank, length))
    done(comm.all_gather(outputs, outputs[rank], async_op=async_op))
    assert torch.equal(torch.cat(outputs), torch.cat(everyone))

    columns = torch.zeros(length, 2 * size, dtype=torch.float64).t()[::2]  # nothing is contiguous
    columns[rank] = row(rank, length)
    done(comm.all_gather(columns, columns[rank], async_op=async_op))
    assert torch.equal(columns, torch.stack(everyone))

    input = row(rank, size * length)
    done(comm.reduce_scatter(input[own], input, async_op=async_op))
    assert torch.equal(input[own], total[own])
    others = [part for part in range(size * length) if not own.start <= part < own.stop]
    assert torch.equal(input[others], wide[rank][others])

    parts = list(row(rank, size * length).split(length))
    done(comm.reduce_scatter(parts[rank], parts, async_op=async_op))
    assert torch.equal(parts[rank], total[own])

    for root in range(size):
        is_root = rank == root
        output = torch.zeros(size * length, dtype=torch.float64)
        output[own] = row(rank, length)
        done(comm.gather(output if is_root else None, output[own], root, async_op=async_op))
        if is_root:
            assert torch.equal(output, torch.cat(everyone))
        input = row(rank, size * length)
        done(comm.scatter(input[own], input if is_root else None, root, async_op=async_op))
        assert torch.equal(input[own], wide[root][own])

    exchanged = torch.cat([giver[own] for giver in wide])
    both = row(rank, size * length)
    done(comm.all_to_all(both, both, async_op=async_op))
    assert torch.equal(both, exchanged)
    both = row(rank, size * length)
    done(comm.all_to_all(list(both.split(length)), list(both.split(length)), async_op=async_op))
    assert torch.equal(both, exchanged)
    both = row(rank, size * length)
    done(comm.all_to_all(both, list(both.split(length)), async_op=async_op))
    assert torch.equal(both, exchanged)
    mixed = [part.clone() for part in both.split(length)]
    both.copy_(row(rank, size * length))
    mixed[0] = both[:length]  # one part in place, the others elsewhere
    done(comm.all_to_all(mixed, both, async_op=async_op))
    assert torch.equal(torch.cat(mixed), exchanged)


@on(ours=[1, 2, 3, 4], gloo=[1, 2])
def test_views_between_each_other_do_not_count_as_shared(comm: Communicator) -> None:
    """Views of one tensor that have no element in common are as good as any."""
    size = comm.size
    square = torch.zeros(5, 2 * size, dtype=torch.float64)
    mine = row(comm.rank, 10).view(5, 2)
    comm.all_gather(list(square.chunk(size, dim=1)), mine)
    assert torch.equal(square, torch.cat([row(r, 10).view(5, 2) for r in range(size)], dim=1))

    board = torch.zeros(4, 6, dtype=torch.float64)  # outputs and input interleaved
    board[:, 0] = row(comm.rank, 4)
    comm.all_reduce([board[:, 0], board[:, 3], board[1:3, 4:]])
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[:, 0] = sum(row(r, 4) for r in range(size))
    assert torch.equal(board, expected)

    knit = torch.zeros(8, dtype=torch.float64)  # 0 2 4 and 3 5 7: interleaved
    knit.as_strided((2, 3), (3, 2)).copy_(row(comm.rank, 6).view(2, 3))
    comm.all_reduce(knit.as_strided((2, 3), (3, 2)))
    total = sum(row(r, 6) for r in range(size))
    assert torch.equal(knit[[0, 2, 4, 3, 5, 7]], total)
    assert knit[[1, 6]].tolist() == [0, 0]

    reverse = numpy.arange(6.0)[::-1]
    comm.all_reduce([reverse[:3], reverse[3:]])
    assert reverse.tolist() == [size * x for x in range(5, -1, -1)]

    read_often = torch.ones(1, dtype=torch.float64) * comm.rank  # what is only read may overlap
    gathered = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
    comm.all_gather(gathered, read_often.expand(2))
    assert torch.cat(gathered).tolist() == [float(r) for r in range(size) for _ in range(2)]
    gathered = [torch.zeros(1, dtype=torch.float64) for _ in range(size)]
    comm.all_to_all(gathered, [read_often] * size)
    assert torch.cat(gathered).tolist() == [float(r) for r in range(size)]


# -- refused on every rank -----------------------------------------------------------------------


@on(ours=[1, 2, 3, 4], gloo=[1, 2, 3])
def test_what_has_no_meaning_is_refused_on_every_rank(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    length = 4
    for async_op in (False, True):
        option = {"async_op": async_op}
        windows = torch.ones(8).as_strided((3, 4), (2, 1))
        for itself in (windows, torch.ones(1).expand(4), torch.ones(13).as_strided((3, 4), (3, 2))):
            for call in (comm.all_reduce, comm.reduce, comm.broadcast):
                refused(call, itself, **option)
                refused(call, [torch.ones(3), itself], **option)
        out = torch.ones(size * length + 2).as_strided((size, length), (max(1, length - 1), 1))
        if size > 1:
            refused(comm.all_gather, out, torch.ones(length), **option)
            refused(comm.all_to_all, out, torch.ones(size, length), **option)
        refused(comm.reduce_scatter, windows, torch.ones(size, 3, 4), **option)
        refused(comm.scatter, windows, torch.ones(size, 3, 4) if rank == 0 else None, **option)

        memory = torch.arange(float(size * length + length))
        wide, shifted = memory[: size * length], memory[1 : size * length + 1]
        # an input inside the output that is no rank's part
        refused(comm.all_gather, wide, memory[1 : length + 1], **option)
        refused(comm.all_gather, list(wide.split(length)), memory[1 : length + 1], **option)
        refused(comm.reduce_scatter, memory[1 : length + 1], wide, **option)
        refused(comm.reduce_scatter, memory[1 : length + 1], list(wide.split(length)), **option)
        refused(comm.all_to_all, wide, shifted, **option)
        refused(comm.all_to_all, list(shifted.split(length)), list(wide.split(length)), **option)
        refused(comm.all_gather, [torch.zeros(size * 2), wide], [wide[1:3], wide[:4]], **option)
        if size > 1:
            turned = list(wide.split(length))
            refused(comm.all_to_all, turned[1:] + turned[:1], wide, **option)
            same = torch.zeros(length)
            refused(comm.all_gather, [same] * size, torch.ones(length), **option)
            refused(comm.all_to_all, [same] * size, torch.ones(size * length), **option)
            twice = list(torch.zeros(size, length))
            refused(comm.all_to_all, twice, [twice[0]] * size, **option)
            pair, own = torch.zeros(2, size, length), comm.rank
            crossed = [pair[1, own], pair[0, own]]  # each is in place, but in the other's output
            refused(comm.all_gather, list(pair), crossed, **option)
        for lists in ([memory, memory], [memory[:6], memory[5:]], [memory[::2], memory[2:4]]):
            refused(comm.all_reduce, lists, **option)
            refused(comm.reduce, lists, **option)
        refused(comm.all_reduce, [memory, memory.view(torch.int32)], **option)
    assert torch.equal(memory, torch.arange(float(size * length + length)))
    total = torch.ones(2)
    comm.all_reduce(total)
    assert total.tolist() == [size] * 2, "the group goes on"


def calls_that_one_rank_refuses(comm: Communicator) -> list[Callable[[Communicator], Any]]:
    """Calls whose arguments are invalid on one rank and valid on the others."""
    size, rank, last = comm.size, comm.rank, comm.size - 1
    memory = torch.zeros(size * 4)
    is_root = rank == 0
    own = memory[:4]  # rank 0's own part, and no other rank's
    windows = torch.zeros(size * 4 - size + 1).as_strided((size, 4), (3, 1))
    overlapping = torch.ones(1).expand(4) if rank == last else torch.ones(4)
    return [
        lambda group: group.all_gather(memory, own),
        lambda group: group.all_gather(list(memory.split(4)), own),
        lambda group: group.reduce_scatter(own, memory),
        lambda group: group.all_reduce(overlapping),
        lambda group: group.all_reduce(overlapping, async_op=True).wait(),
        lambda group: group.broadcast(overlapping, 0),
        lambda group: group.gather(windows if is_root else None, torch.ones(4), 0),
        lambda group: group.gather(memory if is_root else None, memory[1:5], 0),
        lambda group: group.scatter(memory[1:5], memory if is_root else None, 0),
        lambda group: group.gather(
            [memory[:4]] * size if is_root else None, torch.ones(4), 0, async_op=True
        ).wait(),
    ]


@pytest.mark.provokes
@on(ours=[2, 3], gloo=[2])
def test_what_one_rank_refuses_raises_on_all(comm: Communicator) -> None:
    for number, call in enumerate(calls_that_one_rank_refuses(comm)):
        group = subgroup(comm, range(comm.size), f"case{number}")
        group.timeout_s = 20
        error = attempt(call, group)
        assert isinstance(error, (ValueError, CollectiveMismatch)), (number, error)
        kinds: list[Any] = [None] * comm.size
        dist.all_gather_object(kinds, type(error).__name__)
        assert kinds.count("ValueError") >= 1, (number, kinds)
        assert kinds.count("CollectiveMismatch") >= 1, (number, kinds)
        group.close()


@pytest.mark.ranks([1, 2, 3])
def test_schedules_keep_to_the_same_rules(comm: Communicator) -> None:
    windows = torch.ones(8).as_strided((3, 4), (2, 1))
    refused(comm.all_reduce, windows, algorithm="ring")
    memory = torch.arange(4.0 * comm.size + 1)
    own = slice(comm.rank * 4, comm.rank * 4 + 4)
    gather, scatter = (
        find(name, "ring").schedule(comm.size) for name in ("all_gather", "reduce_scatter")
    )
    refused(run_schedule, gather, comm, memory[:-1], memory[1:5])
    refused(run_schedule, scatter, comm, memory[1:5], memory[:-1])
    memory[own] = comm.rank
    run_schedule(gather, comm, memory[:-1], memory[:-1][own])
    assert memory[:-1].tolist() == [r for r in range(comm.size) for _ in range(4)]
    run_schedule(scatter, comm, memory[:-1][own], memory[:-1])
    assert memory[own].tolist() == [comm.rank * comm.size] * 4


# -- broadcasts of lists: tied weights -----------------------------------------------------------


@on(ours=[2, 3], gloo=[2])
def test_a_broadcast_list_is_written_in_its_order(comm: Communicator) -> None:
    weight = row(comm.rank, 6)
    square = weight.view(2, 3)
    comm.broadcast([weight, torch.ones(2).double(), square, square[:, 1]], 0)
    assert torch.equal(weight, row(0, 6))
    for order in ([0, 1], [1, 0]):  # memory is shared only on some ranks, not on the last one
        alone = [torch.ones(2, 2), torch.zeros(2)]
        memory = torch.full((2, 2), 5.0)
        tied = [memory, memory[:, 1]]
        comm.broadcast([(alone if comm.rank == 0 else tied)[number] for number in order], 0)
        last = [1.0, 1.0] if order == [1, 0] else [0.0, 0.0]
        assert memory[:, 1].tolist() == ([5.0, 5.0] if comm.rank == 0 else last)
        shared = torch.full((4,), float(comm.rank))  # the root's own parts may overlap in any way
        pair = [shared, shared[1:]] if comm.rank == 0 else [torch.ones(4), torch.ones(3)]
        comm.broadcast(pair, 0)
        assert torch.cat(pair).eq(0).all()
    refused(comm.broadcast, [shared, shared.view(torch.int32)])


# -- messages, and torch.distributed -------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_message_is_not_received_into_memory_that_overlaps_itself(comm: Communicator) -> None:
    windows = torch.zeros(8).as_strided((3, 4), (2, 1))
    for receives in ("recv", "irecv"):
        with comm.split([0, 1], label=receives) as group:
            if comm.rank == 0:
                with pytest.raises(MessageMismatch, match="rank 1 refused its recv"):
                    group.send(windows, 1)
            else:
                refused(getattr(group, receives), windows, 0)
            comm.barrier()
    if comm.rank == 0:
        comm.send(windows, 1)  # what is only read may overlap
    else:
        comm.recv(torch.zeros(3, 4), 0)


@pytest.mark.ranks([1, 2, 3, 4])
def test_the_same_holds_through_torch_distributed(process_group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.zeros(size * 4)
    output[rank * 4 : rank * 4 + 4] = rank
    dist.all_gather_into_tensor(output, output[rank * 4 : rank * 4 + 4])
    assert output.tolist() == [r for r in range(size) for _ in range(4)]
    input = torch.arange(4.0 * size)
    dist.reduce_scatter_tensor(input[rank * 4 : rank * 4 + 4], input)
    assert input[rank * 4 : rank * 4 + 4].tolist() == [size * (rank * 4 + i) for i in range(4)]
    both = torch.full((size,), float(rank))
    dist.all_to_all_single(both, both)
    assert both.tolist() == list(range(size))
    both = torch.full((2 * size,), float(rank))
    dist.all_to_all_single(both, both, [2] * size, [2] * size)
    assert both.tolist() == [r for r in range(size) for _ in range(2)]
    memory = torch.zeros(size * 4 + 1)
    wide, shifted = memory[:-1], memory[1:]
    refused(dist.all_reduce, torch.ones(8).as_strided((3, 4), (2, 1)))
    refused(dist.broadcast, torch.ones(8).as_strided((3, 4), (2, 1)), 0)
    refused(dist.all_gather_into_tensor, wide, memory[1:5])
    refused(dist.all_gather, list(wide.split(4)), memory[1:5])
    refused(dist.reduce_scatter_tensor, memory[1:5], wide)
    refused(dist.all_to_all_single, wide, shifted)
    refused(dist.all_to_all, list(wide.split(4)), list(shifted.split(4)))
    dist.barrier()


# -- a tensor that says more than there is -------------------------------------------------------


def resized() -> list[torch.Tensor]:
    """Tensors whose storage was resized."""
    gone, gone_below_a_view, shorter = torch.ones(100), torch.ones(100), torch.ones(100)
    view, strided = gone_below_a_view[10:], torch.ones(100)
    column = strided.view(10, 10)[:, 9]
    gone.untyped_storage().resize_(0)
    gone_below_a_view.untyped_storage().resize_(0)
    shorter.untyped_storage().resize_(8)
    strided.untyped_storage().resize_(40)
    return [gone, view, shorter, column]


@on(ours=[1, 2, 3], gloo=[2])
def test_a_tensor_larger_than_its_storage_is_refused(comm: Communicator) -> None:
    size, is_root = comm.size, comm.rank == 0
    for tensor in resized():
        narrow, wide = torch.zeros(tensor.numel()), torch.zeros(size * tensor.numel())
        calls: list[tuple[Any, ...]] = [
            (comm.broadcast, tensor),
            (comm.all_reduce, tensor),
            (comm.all_reduce, [torch.ones(3), tensor]),
            (comm.reduce, tensor),
            (comm.all_gather, wide, tensor),
            (comm.reduce_scatter, tensor, wide),
            (comm.gather, wide if is_root else None, tensor),
            (comm.scatter, tensor, wide if is_root else None),
            (comm.all_to_all, [tensor] * size, [narrow] * size),
        ]
        for call in calls:
            for async_op in (False, True):
                error = attempt(*call, async_op=async_op)
                assert isinstance(error, (ValueError, TypeError)), error
                assert "resized" in str(error), error
        if size > 1:
            for message in (comm.send, comm.recv, comm.isend, comm.irecv):
                assert "resized" in str(attempt(message, tensor, comm.next))
    used = torch.ones(100)
    comm.broadcast(used)
    used.untyped_storage().resize_(8)
    assert "resized" in str(attempt(comm.broadcast, used)), "though it was all right before"
    used.untyped_storage().resize_(400)
    comm.broadcast(used.fill_(1))
    comm.barrier()


@pytest.mark.ranks([1, 2])
def test_lazy_tensors_with_several_elements_at_one_address_are_refused(comm: Communicator) -> None:
    lazy = torch._neg_view(torch.ones(1)).expand(4)
    assert "share an address" in str(raised(ValueError, comm.all_reduce, lazy))
    wide = torch.empty(4 * comm.size)
    comm.all_gather(wide, lazy)
    assert wide.eq(-1).all()


def without_plain_memory() -> list[Any]:
    """Tensors and arrays without plain memory of their own."""
    with FakeTensorMode():
        fake = torch.ones(3)
    return [
        fake,
        TwoTensor(torch.ones(2), torch.ones(2)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch._to_functional_tensor(torch.ones(3)),
        torch._efficientzerotensor(3),
        torch.ones(3, device="meta"),
        numpy.ma.array([1.0, 2.0], mask=[False, True]),
    ]


@on(ours=[1, 2], gloo=[2])
def test_what_has_no_plain_memory_is_refused_on_every_rank(comm: Communicator) -> None:
    tensors = without_plain_memory()
    comm.barrier()  # they take a while to create, and peers wait for a rejection for at most 2 s
    for tensor in tensors:
        for call in (comm.all_reduce, comm.broadcast):
            error = attempt(call, tensor)
            assert type(error) is TypeError, (type(tensor), error)
    inside: list[Any] = []

    def keep_error(x: torch.Tensor) -> torch.Tensor:
        inside.append(attempt(comm.all_reduce, x))
        return x.sum()

    torch.func.vmap(keep_error)(torch.ones(2, 3))
    torch.func.grad(keep_error)(torch.ones(3))
    assert [type(error) for error in inside] == [TypeError, TypeError]
    comm.barrier()


# -- what is looked at: memory, of any device and dtype ------------------------------------------


@pytest.mark.parametrize("other_type", [False, True])
def test_overlaps_are_found_exactly(other_type: bool) -> None:
    """Compared with sets of addresses, for every small layout; the same memory as floats and as
    ints."""
    memory = torch.zeros(64)
    views = []
    for a, b, s, t, first in itertools.product(
        (1, 2, 3), (1, 2, 4), (0, 1, 2, 3, 5), (0, 1, 2, 3), (0, 1, 4, 9)
    ):
        view = memory.as_strided((a, b), (s, t), first)
        addresses = [first + i * s + j * t for i in range(a) for j in range(b)]
        assert native.overlaps_itself(view) == (len(set(addresses)) < len(addresses)), (
            view.stride(),
        )
        views.append((view, set(addresses)))
    for view, its in views[::7]:
        for other, others in views[::11]:
            pair = [view, other.view(torch.int32) if other_type else other]
            for what in ("all_reduce", "broadcast") if other_type else ("all_reduce",):
                assert clash(what, pair) == bool(its & others), (what, pair)
            assert not clash("broadcast", [view, other])


def clash(what: str, tensors: list[torch.Tensor]) -> bool:
    return attempt(check_overlaps, Operation[what.upper()], tensors, [], 0, 1) is not None
