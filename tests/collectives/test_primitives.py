"""The primitives as functions: inputs first, results returned, inputs unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import unisono
from expected import OPS, assert_same, inputs, meaningful, reduced, values
from ranks import attempt, subgroup
from unisono.comm.communicator import Communicator
from unisono.errors import CollectiveMismatch

RANKS = [1, 2, 3, 4, 8]


def done(result: Any, async_op: bool) -> Any:
    """The result of a call in either form."""
    return result.wait() if async_op else result


BOTH = pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])


# -- reducing ----------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce, unknown": lambda out, comm: unisono.all_reduce(torch.ones(4), "sun", out=out),
    "all_reduce, bits": lambda out, comm: unisono.all_reduce(torch.ones(4), "band", out=out),
    "all_reduce, no op": lambda out, comm: unisono.all_reduce(torch.ones(4), None, out=out),  # type: ignore[arg-type]
    "all_reduce, dtype": lambda out, comm: unisono.all_reduce(torch.ones(4).int(), out=out),  # type: ignore[type-var]
    "all_reduce, shape": lambda out, comm: unisono.all_reduce(torch.ones(2, 2), out=out),
    "all_reduce, algorithm": lambda out, comm: unisono.all_reduce(
        torch.ones(4), out=out, algorithm="rung"
    ),
    "all_reduce, both": lambda out, comm: unisono.all_reduce(
        torch.ones(4), out=out, algorithm="ring", reproducible=True
    ),
    "all_reduce, overlap": lambda out, comm: unisono.all_reduce(out[1:], out=out[:-1]),
    "all_reduce, expanded": lambda out, comm: unisono.all_reduce(
        torch.ones(2, 4), out=out.expand(2, 4)
    ),
    "all_reduce, read-only": lambda out, comm: unisono.all_reduce(
        numpy.ones(4, numpy.float32), out=numpy.broadcast_to(out.numpy(), (4,))
    ),
    "reduce, unknown": lambda out, comm: unisono.reduce(torch.ones(4), comm.rank, "sun", out=out),
    "reduce, read-only": lambda out, comm: unisono.reduce(
        numpy.ones(4, numpy.float32), comm.rank, out=numpy.broadcast_to(out.numpy(), (4,))
    ),
    "all_gather, shape": lambda out, comm: unisono.all_gather(torch.ones(3), out=out),
    "all_gather, overlap": lambda out, comm: unisono.all_gather(out[1:3], out=out),
    "gather, parts": lambda out, comm: unisono.gather(torch.ones(2), comm.rank, out=[out] * 3),
    "reduce_scatter, unknown": lambda out, comm: unisono.reduce_scatter(
        torch.ones(8), "sun", out=out
    ),
    "reduce_scatter, shape": lambda out, comm: unisono.reduce_scatter(torch.ones(4), out=out),
    "all_to_all, shape": lambda out, comm: unisono.all_to_all(torch.ones(6), out=out),
    "all_to_all, overlap": lambda out, comm: unisono.all_to_all(
        torch.ones(4), out=out[:1].expand(4)
    ),
}


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.ranks(2)
def test_a_refused_call_leaves_its_out_as_it_was(comm: Communicator, call: str) -> None:
    out = torch.full((4,), -7.0)
    error = attempt(lambda: REFUSED[call](out, comm))
    assert isinstance(error, (ValueError, TypeError)), error
    assert out.tolist() == [-7.0] * 4
    assert comm.name in str(error)
    comm.barrier()  # both refused it, so that the group is usable


@BOTH
@pytest.mark.ranks(RANKS)
def test_all_reduce_works_in_place_and_returns_the_tensor(
    comm: Communicator, async_op: bool
) -> None:
    for op in (*OPS, "prod", unisono.PremulSum(3.0)):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            known = "product" if op == "prod" else op
            if not meaningful(dtype, known):
                continue
            for count in (0, 1, 7, 3001):
                x = values(dtype, count, 1, comm.rank)
                result = done(unisono.all_reduce(x, op, comm, async_op=async_op), async_op)
                assert result is x
                assert_same(x, reduced(inputs(comm.size, dtype, count, 1), known), op)


@pytest.mark.ranks(2)
def test_torch_s_names_of_reductions(comm: Communicator) -> None:
    two = torch.tensor([2.0])
    pairs = {"SUM": 4, "AVG": 2, "PRODUCT": 4, "MIN": 2, "MAX": 2}
    for name, expected in pairs.items():
        for op in (getattr(dist.ReduceOp, name), dist.ReduceOp(getattr(dist.ReduceOp, name))):
            assert unisono.all_reduce(two.clone(), op).item() == expected
    assert unisono.all_reduce(torch.tensor([6]), dist.ReduceOp.BXOR).item() == 0
    premul = dist._make_nccl_premul_sum(0.5)
    assert unisono.all_reduce(two.clone(), premul).item() == 2


@pytest.mark.ranks([1, 3])
def test_the_mean_of_integers_is_refused_everywhere_and_says_what_to_do(comm: Communicator) -> None:
    x = torch.ones(3, dtype=torch.int64)
    for op in ("mean", "avg", dist.ReduceOp.AVG):
        for call in (unisono.all_reduce, unisono.reduce_tensor):
            with pytest.raises(TypeError, match=r'x\.float\(\).*op="sum" and divide'):
                call(x, op, group=comm)
    with pytest.raises(TypeError, match="divide"):
        unisono.all_reduce(x, "mean", comm, async_op=True)
    with pytest.raises(ValueError, match="unknown reduction 'middle'"):
        unisono.all_reduce(x, "middle", comm)
    assert unisono.all_reduce(x, group=comm).tolist() == [comm.size] * 3  # the group stays usable


@pytest.mark.ranks(3)
def test_one_rank_that_refuses_tells_the_others(comm: Communicator) -> None:
    dtype = torch.int64 if comm.rank == 1 else torch.float32
    error = attempt(unisono.all_reduce, torch.ones(3, dtype=dtype), "mean")
    kind = TypeError if comm.rank == 1 else unisono.CollectiveMismatch
    assert isinstance(error, kind), error


@BOTH
@pytest.mark.ranks(RANKS)
def test_reduce_has_its_result_on_one_rank(comm: Communicator, async_op: bool) -> None:
    for dst in {0, comm.size - 1}:
        for source in (torch.arange(12.0).reshape(3, 4).t(), torch.ones(1).expand(5)):
            x = source + comm.rank if source.is_contiguous() else source
            before = x.clone()
            result = done(unisono.reduce(x, dst, "sum", comm, async_op=async_op), async_op)
            assert torch.equal(x, before)
            if comm.rank == dst:
                assert torch.equal(result, comm.size * source)
            else:
                assert result is None


@pytest.mark.ranks(2)
def test_out_takes_the_result(comm: Communicator) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    assert unisono.all_reduce(x, out=out) is out
    assert (x.tolist(), out.tolist()) == ([1] * 3, [2] * 3)
    assert unisono.reduce(x, 1, out=out.zero_()) is (out if comm.rank == 1 else None)
    parts = [torch.zeros(3), torch.zeros(3)]
    assert unisono.all_gather(x, out=parts) is parts
    assert [part.tolist() for part in parts] == [[1] * 3] * 2
    wide = torch.zeros(6)
    assert unisono.all_gather(x, out=wide, async_op=True).wait() is wide
    assert wide.tolist() == [1] * 6
    for size in (3, 5000):
        x = torch.full((size,), float(comm.rank))
        buffers = [torch.full((size,), 9.0) for _ in range(2)] if comm.rank == 0 else None
        got = unisono.gather(x, out=buffers)
        if buffers is not None:
            assert all(tensor is other for tensor, other in zip(got, buffers, strict=True))
            assert [tensor[0].item() for tensor in buffers] == [0, 1]
    part = torch.zeros(2)
    assert unisono.reduce_scatter(torch.arange(4.0), out=part) is part
    assert part.tolist() == [4 * comm.rank, 4 * comm.rank + 2]
    assert unisono.all_to_all(torch.arange(4.0), out=wide[:4]).data_ptr() == wide.data_ptr()
    assert (
        unisono.scatter([part, part] if comm.rank == 0 else None, out=(got := torch.zeros(2)))
        is got
    )
    with pytest.raises(ValueError, match="out is"):
        unisono.all_reduce(torch.ones(3), out=torch.ones(4))


@BOTH
@pytest.mark.ranks(RANKS)
def test_all_reduce_is_reduce_scatter_then_all_gather(comm: Communicator, async_op: bool) -> None:
    x = torch.arange(4.0) + comm.rank
    padded = torch.cat([x, torch.zeros(-4 % comm.size)])
    part = done(unisono.reduce_scatter(padded, group=comm, async_op=async_op), async_op)
    whole = torch.cat(done(unisono.all_gather(part, comm, async_op=async_op), async_op))[:4]
    assert torch.equal(whole, unisono.all_reduce(x, group=comm))
    if comm.size == 4:
        assert whole.tolist() == [6, 10, 14, 18]


@pytest.mark.ranks(RANKS)
def test_reduce_scatter_takes_a_list_or_a_tensor(comm: Communicator) -> None:
    parts = [torch.full((r, 2), float(r + comm.rank)) for r in range(comm.size)]
    mine = unisono.reduce_scatter(parts, "max")
    assert torch.equal(mine, torch.full((comm.rank, 2), float(comm.rank + comm.size - 1)))
    wide = torch.arange(comm.size * 6.0).reshape(comm.size * 2, 3)
    assert torch.equal(unisono.reduce_scatter(wide, "mean"), wide[comm.rank * 2 :][:2])
    with pytest.raises(ValueError, match="cannot be cut evenly"):
        unisono.reduce_scatter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=f"{comm.size + 1} tensors for {comm.size} ranks"):
        unisono.reduce_scatter([torch.ones(1)] * (comm.size + 1))


# -- moving ------------------------------------------------------------------------------------

MOVED = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2)


def shape_of(rank: int, scale: int) -> tuple[int, ...]:
    """Shapes that differ in every way: dimensions, lengths, empty ones."""
    shapes: list[tuple[int, ...]] = [(3 * scale,), (), (2, scale, 5), (0, 4), (1,) * 11, (scale, 0)]
    return shapes[rank % len(shapes)]


@BOTH
@pytest.mark.ranks(RANKS)
def test_all_gather_and_gather_take_any_shapes(comm: Communicator, async_op: bool) -> None:
    for dtype in MOVED:
        for scale in (1, 7, 2000):
            everyone = []
            for rank in range(comm.size):
                shape = shape_of(rank, scale)
                count = int(numpy.prod(shape, dtype=int))
                everyone.append(values(dtype, count, scale, rank).reshape(shape))
            mine = everyone[comm.rank]
            got = done(unisono.all_gather(mine, comm, async_op=async_op), async_op)
            assert isinstance(got, list)
            for tensor, other in zip(got, everyone, strict=True):
                assert_same(tensor, other, (dtype, scale))
            dst = comm.size - 1
            got = done(unisono.gather(mine, dst, comm, async_op=async_op), async_op)
            if comm.rank != dst:
                assert got is None
                continue
            for tensor, other in zip(got, everyone, strict=True):
                assert_same(tensor, other, (dtype, scale))


@pytest.mark.ranks([1, 2, 4])
def test_gathers_of_changing_sizes_bring_everybody_s_elements(comm: Communicator) -> None:
    """Small tensors travel with their shapes, large ones do not: an earlier gather must not leak
    into this one."""

    def tensor_of(rank: int, turn: int) -> torch.Tensor:
        count = (turn * 37 + rank * 11) % 90
        if turn % 7 == 6:  # one of them is much larger than those before
            count += 50000 * (rank == comm.size - 1)
        x = torch.arange(2 * count, dtype=torch.float32) + 1000 * rank + turn
        return x[::2] if turn % 3 == 1 else x[:count].reshape(-1, 1) if turn % 3 else x[:count]

    for turn in range(24):
        wanted = [tensor_of(rank, turn) for rank in range(comm.size)]
        mine = wanted[comm.rank].clone()
        mine = mine.expand(3, *mine.shape)[1] if turn % 2 else mine
        if turn % 4 == 3:
            got = unisono.gather(mine, turn % comm.size)
            assert (got is None) is (comm.rank != turn % comm.size)
        else:
            got = unisono.all_gather(mine, async_op=True).wait()
        for row, expected in zip(got or (), wanted, strict=got is not None):
            assert row.shape == expected.shape
            assert torch.equal(row, expected)
            assert row.is_contiguous()


@pytest.mark.ranks(2)
def test_gather_into_tensors_that_lie_anyhow(comm: Communicator) -> None:
    for count in (3, 40000):  # the elements travel with the shapes, or after them
        wide = torch.zeros(2, 2 * count)
        out = [wide[0, ::2], wide[1, 1::2]] if comm.rank == 1 else None
        unisono.gather(torch.full((count,), comm.rank + 1.0), 1, out=out)
        if comm.rank == 1:
            assert wide[0].tolist() == [1.0, 0] * count
            assert wide[1].tolist() == [0, 2.0] * count


@pytest.mark.ranks([2, 3])
def test_gathers_at_the_sizes_at_which_the_way_changes(comm: Communicator) -> None:
    """Next to the descriptor, in a slot, or in a second call; for all ranks, or only for some."""
    for most in (1392, 1408, 1409, 4096, 128 * 1024, 128 * 1024 + 1):
        for largest in range(comm.size):
            sizes = [most if rank == largest else most - 3 * rank for rank in range(comm.size)]
            got = unisono.all_gather(values(torch.uint8, sizes[comm.rank], most, comm.rank))
            for rank, tensor in enumerate(got):
                assert_same(tensor, values(torch.uint8, sizes[rank], most, rank), (most, rank))


@pytest.mark.provokes
@pytest.mark.ranks(2)
def test_functions_that_gather_differently_do_not_match(comm: Communicator) -> None:
    """Whatever they share on the way: first shapes, lengths, or bytes."""
    x, long = torch.ones(88, dtype=torch.uint8), torch.ones(100_000)  # 88 bytes describe a tensor
    wide = torch.zeros(176, dtype=torch.uint8)
    pairs: list[tuple[Callable[[Communicator], Any], Callable[[Communicator], Any], str, str]] = [
        (
            lambda g: unisono.all_gather(x, g),
            lambda g: g.all_gather(wide, x),
            "any shapes",
            "uint8",
        ),
        (
            lambda g: unisono.all_gather(x, g),
            lambda g: unisono.gather(x, 0, g),
            "all_g",
            ": gather",
        ),
        (
            lambda g: unisono.all_gather(long, g, async_op=True).wait(),
            lambda g: unisono.gather(long, 0, g, async_op=True).wait(),
            "all_gather of",
            ": gather of",
        ),
        (lambda g: unisono.gather(x, 0, g), lambda g: unisono.gather(x, 1, g), "root 0", "root 1"),
        (
            lambda g: unisono.all_gather_object(1, g),
            lambda g: unisono.gather_object(1, 0, g),
            "all_gather of",
            ": gather of",
        ),
    ]
    for number, (one, other, says_one, says_other) in enumerate(pairs):
        group = subgroup(comm, [0, 1], f"pair{number}")
        with pytest.raises(CollectiveMismatch) as caught:
            (other if comm.rank else one)(group)
        assert says_one in str(caught.value), caught.value
        assert says_other in str(caught.value), caught.value
        group.close()
    assert not wide.any()


@pytest.mark.ranks(2)
def test_threads_that_gather_on_one_group_get_their_own_calls_results(comm: Communicator) -> None:
    """While one thread allocates tensors, no other call may come in between: threads take turns in
    the order of their calls."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    wrong: list[Any] = []

    def gather(number: int) -> None:
        for turn in range(50):
            turns[number].acquire()
            count = 3000 * number + 7 * turn
            got = unisono.all_gather(torch.full((count + comm.rank,), float(turn)), comm)
            if [len(part) for part in got] != [count, count + 1] or any(
                (part != turn).any() for part in got
            ):
                wrong.append((number, turn))
            turns[1 - number].release()

    threads = [threading.Thread(target=gather, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.ranks(2)
def test_shapes_of_many_dimensions_and_dtypes_are_told(comm: Communicator) -> None:
    shapes = [(1,) * 12 + (2,), (2, 1, 1, 1, 1, 1, 1, 1, 1, 3), (), (0, 3)]
    dtypes = [torch.bfloat16, torch.complex64, torch.bool, torch.int8]
    for turn in range(8):
        mine, theirs = (turn + comm.rank) % 4, (turn + 1 - comm.rank) % 4
        x = torch.ones(shapes[mine], dtype=dtypes[mine])
        got = unisono.all_gather(x)
        for rank, which in ((comm.rank, mine), (1 - comm.rank, theirs)):
            assert tuple(got[rank].shape) == shapes[which]
            assert got[rank].dtype is dtypes[which]
            assert bool((got[rank] == 1).all())


@pytest.mark.ranks([2, 3])
def test_gathered_dtypes_may_differ_and_views_are_read_as_they_are_seen(comm: Communicator) -> None:
    dtypes = (torch.int64, torch.float32, torch.complex64)
    for count in (4, 4000):
        got = unisono.all_gather(torch.ones(count, dtype=dtypes[comm.rank]))
        assert [tensor.dtype for tensor in got] == list(dtypes[: comm.size])
        assert all(tensor.shape == (count,) and (tensor == 1).all() for tensor in got)
        strided = torch.arange(2.0 * count).reshape(count, 2).t()[1]
        for row in unisono.all_gather(strided):
            assert torch.equal(row, torch.arange(1.0, 2 * count, 2))
        turned = torch.full((count,), 1 + 2j).conj()
        assert all((row == 1 - 2j).all() for row in unisono.all_gather(turned))
        negated = torch.full((3, count), 1 + 2j).conj().imag.t()
        assert negated.is_neg()
        for gather in (unisono.all_gather, unisono.differentiable.all_gather):
            assert all(row.eq(-2).all() and row.shape == (count, 3) for row in gather(negated))
        assert unisono.all_reduce(negated, "product") is negated
        assert negated.eq((-2) ** comm.size).all()


@pytest.mark.ranks(2)
def test_gathered_tensors_share_no_memory(comm: Communicator) -> None:
    for count in (3, 3000):
        x = torch.zeros(count)
        first, second = unisono.all_gather(x)
        first += 1
        assert not second.any()
        assert not x.any()


@BOTH
@pytest.mark.ranks(RANKS)
def test_broadcast_works_in_place(comm: Communicator, async_op: bool) -> None:
    for src in {0, comm.size - 1}:
        x = torch.full((5,), float(comm.rank))
        assert done(unisono.broadcast(x, src, comm, async_op=async_op), async_op) is x
        assert x.tolist() == [src] * 5


@BOTH
@pytest.mark.ranks(RANKS)
def test_scatter_needs_no_buffer(comm: Communicator, async_op: bool) -> None:
    src = comm.size - 1
    for scale in (1, 3000):
        shapes = [shape_of(rank, scale) for rank in range(comm.size)]
        parts = [torch.full(shape, float(rank)) for rank, shape in enumerate(shapes)]
        given = parts if comm.rank == src else None
        got = done(unisono.scatter(given, src, comm, async_op=async_op), async_op)
        assert_same(got, parts[comm.rank])
    wide = torch.arange(comm.size * 2).reshape(comm.size, 2)
    got = unisono.scatter(wide if comm.rank == src else None, src)
    assert got.tolist() == wide[comm.rank : comm.rank + 1].tolist()


@BOTH
@pytest.mark.ranks(RANKS)
def test_all_to_all_takes_any_shapes(comm: Communicator, async_op: bool) -> None:
    def part(source: int, to: int) -> torch.Tensor:
        return torch.full((source, to + 1), 10 * source + to)

    mine = [part(comm.rank, to) for to in range(comm.size)]
    got = done(unisono.all_to_all(mine, comm, async_op=async_op), async_op)
    for source, tensor in enumerate(got):
        assert_same(tensor, part(source, comm.rank))
    wide = torch.arange(comm.size) + 100 * comm.rank
    got = done(unisono.all_to_all(wide, comm, async_op=async_op), async_op)
    assert got.tolist() == [100 * source + comm.rank for source in range(comm.size)]


@pytest.mark.ranks([1, 2])
def test_arrays_come_back_as_arrays(comm: Communicator) -> None:
    array = numpy.full((2, comm.rank + 1), comm.rank, dtype=numpy.int32)
    for got in (unisono.all_gather(array), unisono.all_gather(array, async_op=True).wait()):
        for rank, tensor in enumerate(got):
            assert_same(tensor, numpy.full((2, rank + 1), rank, dtype=numpy.int32))
            assert isinstance(tensor, numpy.ndarray)
    ones = numpy.ones(3)
    assert unisono.all_reduce(ones) is ones
    assert ones.tolist() == [comm.size] * 3
    part = unisono.reduce_scatter(numpy.arange(2 * comm.size))
    assert part.tolist() == [2 * comm.rank * comm.size, (2 * comm.rank + 1) * comm.size]
    assert isinstance(unisono.reduce_tensor(ones), numpy.ndarray)


@pytest.mark.ranks([2, 3])
def test_ranks_and_arguments_that_make_no_sense(comm: Communicator) -> None:
    x = torch.ones(2)
    for call in (unisono.reduce, unisono.gather, unisono.scatter, unisono.broadcast):
        for rank in (comm.size, -1, "0"):
            with pytest.raises(ValueError, match="not a rank of a group"):
                call(None if call is unisono.scatter else x, rank)
    with pytest.raises(TypeError, match="str is neither"):
        unisono.all_gather("x")
    with pytest.raises(TypeError, match="dense"):
        unisono.all_gather(x.to_sparse())
    with pytest.raises(TypeError, match="dense"):
        unisono.reduce(x.to_sparse())
    with pytest.raises(TypeError, match="same dtype"):
        unisono.all_to_all([torch.ones(1), *[torch.ones(1).double()] * (comm.size - 1)])
    comm.barrier()


@pytest.mark.ranks([4])
def test_groups_are_communicators_and_their_ranks_count_from_zero(comm: Communicator) -> None:
    pair = comm.split([3, 1])
    if pair is None:
        return
    x = torch.tensor([float(comm.rank)])
    assert unisono.all_gather(x, pair) == [torch.tensor([3.0]), torch.tensor([1.0])]
    assert unisono.broadcast(x, 1, pair).item() == 1
    pair.close()


@pytest.mark.ranks(3)
def test_torch_groups_serve_as_groups(process_group: Any) -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    x = torch.ones(2)
    assert unisono.all_reduce(x, group=group).tolist() == [2, 2]
    assert unisono.all_reduce(torch.ones(1), group=group).item() == 2


# -- messages ----------------------------------------------------------------------------------


@pytest.mark.ranks([2, 3, 4, 8])
def test_messages_around_a_ring(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = unisono.isend(torch.tensor([comm.rank]), right, tag=4)
    box = torch.zeros(1, dtype=torch.int64)
    assert unisono.recv(box, left, tag=4) is box
    assert sent.wait() is None
    assert box.item() == left
    work = unisono.irecv(box.zero_())
    unisono.send(torch.tensor([comm.rank]), right)
    assert work.wait() is box
    assert (box.item(), work.source_rank()) == (left, left)
    messages = [
        unisono.Message("send", torch.full((5000,), comm.rank), right),
        unisono.Message("recv", big := torch.zeros(5000, dtype=torch.int64), left),
    ]
    for message_work in unisono.batch_isend_irecv(messages):
        message_work.wait()
    assert (big == left).all()


# -- one tensor --------------------------------------------------------------------------------


@pytest.mark.ranks([1, 2, 4])
def test_the_training_loop_s_three(comm: Communicator) -> None:
    losses = [0.5, 0.3, 0.7, 0.4][: comm.size]
    loss = torch.tensor(losses[comm.rank])
    assert unisono.reduce_tensor(loss, "sum").item() == pytest.approx(sum(losses))
    assert unisono.reduce_tensor(loss).item() == pytest.approx(sum(losses) / comm.size)
    assert loss.item() == pytest.approx(losses[comm.rank])
    assert not unisono.reduce_tensor(loss.clone().requires_grad_()).requires_grad
    got = unisono.gather_tensor(loss)
    assert got is None if comm.rank else got == [torch.tensor(value) for value in losses]
    config = torch.tensor([1.0, 2.0, 3.0]) if comm.rank == 0 else torch.zeros(3)
    assert unisono.broadcast_tensor(config) is config
    assert config.tolist() == [1, 2, 3]


def test_one_process_that_started_nothing_needs_no_world() -> None:
    x = torch.tensor([2.0])
    assert unisono.reduce_tensor(x).item() == 2
    assert unisono.gather_tensor(x) == [x]
    assert unisono.broadcast_tensor(x) is x
    assert unisono.all_gather(x)[0].item() == 2
    assert unisono.all_gather_object({"a": 1}) == [{"a": 1}]


@pytest.mark.ranks(2)
def test_works_are_works(comm: Communicator) -> None:
    work = unisono.all_reduce(torch.ones(3), async_op=True)
    assert isinstance(work, unisono.Work)
    first = work.wait()
    assert work.is_completed()
    assert work.exception() is None
    assert work.wait() is first
