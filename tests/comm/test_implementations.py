"""Every make of the Communicator keeps the same promises: one set of tests over all of them.

Expectations are computed in one process from all ranks' inputs. Floats that a torch backend adds in
an order of its own are compared with a tolerance; everything else bit for bit. What only the native
make has (posts, cuts, slots) is tested in test_conformance.py, which also takes the torch make
through all of it on two ranks, where no order can differ.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import unisono
from expected import (
    COMPLEXES,
    FLOATS,
    OPS,
    REDUCIBLE,
    assert_same,
    copy_of,
    inputs,
    meaningful,
    raw,
    reduced,
    values,
)
from ranks import attempt
from unisono import Message, PremulSum
from unisono.comm.base import Communicator
from unisono.comm.over_torch.communicator import TorchCommunicator
from unisono.world.world import resolve

MAKES = [("solo", 1), ("native", 3), *(("torch", ranks) for ranks in (1, 2, 3, 4))]
MANY = [("torch", 8)]


def over(makes: list[tuple[str, int]]) -> Any:
    """Run a test on these makes; `comm` is then a Communicator of that make."""
    return pytest.mark.parametrize(
        "comm",
        [
            pytest.param(
                make,
                id=f"{make}-{ranks}",
                marks=pytest.mark.ranks(ranks, backend="gloo" if make == "torch" else "unisono"),
            )
            for make, ranks in makes
        ],
        indirect=True,
    )


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Communicator:
    make = request.param
    group = request.getfixturevalue("process_group")
    made = resolve(group)
    if make == "solo":
        assert type(made).__name__ == "SoloCommunicator"
    else:
        assert isinstance(made, TorchCommunicator) == (make == "torch")
    return made


def assert_close(comm: Communicator, actual: Any, expected: torch.Tensor, what: object) -> None:
    """The same bits, but for the order in which a torch backend adds floats."""
    if comm.backend == "unisono" or comm.size < 3 or actual.dtype not in FLOATS + COMPLEXES:
        assert_same(actual, expected, what)
        return
    assert actual.dtype == expected.dtype
    steps = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.complex64: 1e-3}
    torch.testing.assert_close(
        actual,
        expected,
        rtol=steps.get(actual.dtype, 1e-10),
        atol=1e-3,
        msg=lambda m: f"{what}: {m}",
    )


def counts_for(size: int) -> list[int]:
    """A different count for each rank, one of them zero."""
    return [(3 * rank % (size + 1)) * 7 for rank in range(size)]


@over(MAKES)
def test_every_reduction_of_every_dtype_that_has_a_meaning(comm: Communicator) -> None:
    few = comm.size > 3
    for dtype in (torch.bfloat16, torch.uint16, torch.bool) if few else REDUCIBLE:
        for op in (*OPS, PremulSum(-3), PremulSum(0.3)):
            if not meaningful(dtype, op):
                continue
            given = inputs(comm.size, dtype, 37)
            comm.all_reduce(tensor := copy_of(given[comm.rank]), op)
            assert_close(comm, tensor, reduced(given, op), (dtype, op))


@over(MAKES)
def test_reduce_leaves_the_others_alone_and_reduce_scatter_the_input(comm: Communicator) -> None:
    rank, size, root = comm.rank, comm.size, comm.size - 1
    for dtype, op in (
        (torch.float32, "sum"),
        (torch.int16, "max"),
        (torch.bool, "bxor"),
        (torch.uint64, "min"),
        (torch.bfloat16, "avg"),
        (torch.complex64, "product"),
        (torch.int64, PremulSum(5)),
    ):
        given = inputs(size, dtype, 5 * size)
        result = reduced(given, op)
        comm.reduce(tensor := copy_of(given[rank]), root, op)
        assert_close(comm, tensor, result if rank == root else given[rank], (dtype, op, "reduce"))
        source, output = copy_of(given[rank]), torch.zeros(5, dtype=dtype)
        comm.reduce_scatter(output, source, op)
        assert_close(comm, output, result[5 * rank : 5 * rank + 5], (dtype, op, "scattered"))
        assert_same(source, given[rank], (dtype, op, "the input"))


@over(MAKES)
def test_one_nan_wins_every_minimum_and_maximum(comm: Communicator) -> None:
    for dtype in FLOATS:
        for op in ("min", "max"):
            given = [
                torch.tensor([rank + 1.0, -rank - 1.0], dtype=dtype) for rank in range(comm.size)
            ]
            given[-1][0] = float("nan")
            comm.all_reduce(tensor := given[comm.rank].clone(), op)
            assert tensor[0].isnan()
            assert tensor[1] == (-1 if op == "max" else -comm.size)


@over(MAKES)
def test_what_has_no_meaning_is_refused_and_the_group_goes_on(comm: Communicator) -> None:
    refused = [
        attempt(comm.all_reduce, torch.ones(3, dtype=torch.int32), "avg"),
        attempt(comm.all_reduce, torch.ones(3), "band"),
        attempt(comm.all_reduce, torch.ones(3), "total"),
        attempt(comm.all_reduce, torch.ones(1).expand(3)),
        attempt(comm.all_reduce, torch.ones(3, dtype=torch.int8), PremulSum(0.5)),
        attempt(comm.broadcast, torch.ones(3), comm.size),
        attempt(comm.all_gather, torch.ones(3 * comm.size + 1), torch.ones(3)),
        attempt(comm.all_reduce, "three"),
        attempt(comm.all_reduce, torch.ones(3, device="meta")),
    ]
    assert all(isinstance(error, (TypeError, ValueError)) for error in refused), refused
    comm.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [comm.size] * 3


@over(MAKES)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_way_to_move(comm: Communicator, count: int) -> None:
    rank, size = comm.rank, comm.size
    for dtype in (torch.float32, torch.int16, torch.float8_e4m3fn, torch.complex128, torch.bool):
        given = inputs(size, dtype, count * size)
        root, mine = count % size, slice(rank * count, (rank + 1) * count)
        own = [one[r * count : (r + 1) * count] for r, one in enumerate(given)]
        comm.broadcast(tensor := copy_of(given[rank]), root)
        assert_same(tensor, given[root], "broadcast")
        wide = torch.zeros(count * size * dtype.itemsize, dtype=torch.uint8).view(dtype)
        comm.all_gather(wide, own[rank])
        assert numpy.array_equal(raw(wide), numpy.concatenate([raw(one) for one in own]))
        parts = [copy_of(wide[:count]) for _ in range(size)]
        comm.all_gather(parts, own[rank])
        for part, expected in zip(parts, own, strict=True):
            assert_same(part, expected, "all_gather of a list")
        comm.all_to_all(wide, given[rank])
        assert numpy.array_equal(raw(wide), numpy.concatenate([raw(one[mine]) for one in given]))
        comm.scatter(output := copy_of(wide[:count]), given[rank] if rank == root else None, root)
        assert_same(output, given[root][mine], "scatter")
        comm.gather(wide if rank == root else None, own[rank], root)
        if rank == root:
            assert numpy.array_equal(raw(wide), numpy.concatenate([raw(one) for one in own]))


@over([*MAKES, *MANY])
def test_parts_of_different_sizes(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    counts = counts_for(size)
    given = [values(torch.int16, count, 3, r) for r, count in enumerate(counts)]
    parts = [torch.zeros(count, dtype=torch.int16) for count in counts]
    comm.all_gather(parts, given[rank])
    for part, expected in zip(parts, given, strict=True):
        assert_same(part, expected)
    for root in range(size):
        parts = [torch.zeros(count, dtype=torch.int16) for count in counts]
        comm.gather(parts if rank == root else None, given[rank], root)
        for part, expected in zip(parts, given, strict=True):
            assert_same(part, expected if rank == root else torch.zeros_like(expected))
        output = torch.zeros(counts[rank], dtype=torch.int16)
        comm.scatter(output, given if rank == root else None, root)
        assert_same(output, given[rank])
    whole = inputs(size, torch.int32, sum(counts))
    comm.reduce_scatter(
        output := torch.zeros(counts[rank], dtype=torch.int32), list(whole[rank].split(counts))
    )
    assert_same(output, reduced(whole, "sum").split(counts)[rank])
    sent = [[torch.full(((r + 2 * s) % 4,), 10 * r + s) for s in range(size)] for r in range(size)]
    arrived = [torch.zeros_like(sent[r][rank]) for r in range(size)]
    comm.all_to_all(arrived, sent[rank])
    for r, part in enumerate(arrived):
        assert_same(part, sent[r][rank])


@over(MAKES)
def test_strided_tensors_and_their_neighbours(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    base = torch.full((12,), -1.0)
    base[::2] = torch.arange(6.0) + rank
    comm.all_reduce(base[::2])
    assert base[1::2].tolist() == [-1.0] * 6
    assert base[::2].tolist() == [size * k + sum(range(size)) for k in range(6)]
    square = (torch.arange(9) + 100 * rank).view(3, 3)
    comm.broadcast(square.t(), size - 1)
    assert torch.equal(square, (torch.arange(9) + 100 * (size - 1)).view(3, 3))
    wide = torch.zeros(3, size, 2)
    comm.all_gather(wide.permute(1, 2, 0)[:, 1], torch.full((3,), rank + 1.0))
    assert torch.equal(wide[:, :, 1], torch.arange(1.0, size + 1).expand(3, size))
    assert not wide[:, :, 0].any()
    lines = torch.arange(4.0 * size).view(size, 2, 2).transpose(1, 2) + rank
    output = torch.zeros(8)
    comm.reduce_scatter(output[::2], lines)
    mine = sum(torch.arange(4.0 * size).view(size, 2, 2)[rank].t() + r for r in range(size))
    assert torch.equal(output[::2], mine.flatten())
    assert not output[1::2].any()


@over(MAKES)
def test_coalesced_lists_of_several_dtypes(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    a, b = torch.full((3,), rank, dtype=torch.int16), torch.full((2, 2), rank + 0.5)
    c = torch.full((4,), rank, dtype=torch.int16)[::2]
    comm.all_reduce([a, b, c], "max")
    assert (a == size - 1).all()
    assert (b == size - 0.5).all()
    assert (c == size - 1).all()
    comm.broadcast([a.fill_(rank), b.fill_(rank)], size - 1)
    assert (a == size - 1).all()
    assert (b == size - 1).all()
    wide = [torch.zeros(size, 3, dtype=torch.int16), torch.zeros(size * 2)]
    comm.all_gather(wide, [torch.full((3,), rank, dtype=torch.int16), torch.full((2,), rank + 0.5)])
    assert wide[0].tolist() == [[r] * 3 for r in range(size)]
    assert wide[1].tolist() == [r + 0.5 for r in range(size) for _ in range(2)]
    outputs = [torch.zeros(1, dtype=torch.int64), torch.zeros(2)]
    comm.reduce_scatter(outputs, [torch.arange(size) + rank, torch.ones(size, 2)])
    assert outputs[0].item() == size * rank + sum(range(size))
    assert outputs[1].tolist() == [size] * 2
    comm.all_reduce([])


@over(MAKES)
def test_numpy_arrays(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    array = numpy.arange(6, dtype=numpy.uint16).reshape(2, 3)[:, ::-1] + numpy.uint16(rank)
    expected = size * numpy.arange(6).reshape(2, 3)[:, ::-1] + sum(range(size))
    comm.all_reduce(array)
    assert (array == expected).all()
    spaced = numpy.zeros((size, 4), numpy.float64)
    comm.all_gather(spaced[:, ::2], numpy.array([rank, -rank], numpy.float64))
    assert spaced.tolist() == [[r, 0, -r, 0] for r in range(size)]
    frozen = numpy.ones(2)
    frozen.flags.writeable = False
    assert isinstance(attempt(comm.all_reduce, frozen), ValueError)
    mixed = torch.zeros(size)
    comm.all_gather(mixed, numpy.array([rank], numpy.float32))
    assert mixed.tolist() == list(range(size))


@over(MAKES)
def test_works_finish_in_any_order_of_waiting_and_when_dropped(comm: Communicator) -> None:
    tensors = [torch.full((1000,), float(k)) for k in range(8)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    strided = torch.zeros(6)
    comm.all_reduce(strided[::2].fill_(1), async_op=True)  # nobody waits for it
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    comm.barrier()
    assert strided.tolist() == [comm.size, 0] * 3
    for k, tensor in enumerate(tensors):
        assert (tensor == comm.size * k).all()
    output = torch.zeros(comm.size)
    gathered = comm.all_gather(output, torch.tensor([float(comm.rank)]), async_op=True)
    rest = comm.barrier(async_op=True)
    assert rest is not None
    assert gathered is not None
    rest.wait(timeout_s=30)
    gathered.wait(timeout_s=30)
    assert output.tolist() == list(range(comm.size))


@over(MAKES)
def test_parameters_and_inference_tensors_are_written_to(comm: Communicator) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    comm.all_reduce(parameter)
    assert parameter.tolist() == [comm.size] * 3
    assert parameter.requires_grad
    with torch.inference_mode():
        tensor = torch.ones(6)[::2]
        comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.size] * 3


@over([("native", 3), ("torch", 2), ("torch", 3), ("torch", 4)])
def test_messages_with_tags_and_from_anybody(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((3,), 10 * rank + tag, dtype=torch.int16) for tag in range(3)]
    works = [comm.isend(tensor, after, tag) for tag, tensor in enumerate(sent)]
    for tag in (2, 0, 1):
        got = torch.zeros(6, dtype=torch.int16)
        assert comm.recv(got[::2], before, tag) == before
        assert got.tolist() == [10 * before + tag, 0] * 3
    for work in works:
        work.wait()
    if rank == 0:
        found = set()
        for _ in range(size - 1):
            work = comm.irecv(tensor := torch.zeros(2), tag=7)
            work.wait(timeout_s=30)
            assert tensor.tolist() == [work.source_rank()] * 2
            found.add(work.source_rank())
        assert found == set(range(1, size))
    else:
        comm.send(torch.full((2,), float(rank)), 0, tag=7)
    got = torch.zeros(4)
    batch = [Message("recv", got, before), Message("send", torch.full((4,), float(rank)), after)]
    for work in comm.batch_isend_irecv(batch):
        work.wait()
    assert got.tolist() == [before] * 4
    array = numpy.zeros(2)
    if rank == 0:
        comm.send(numpy.ones(2), 1)
    elif rank == 1:
        comm.recv(array, 0)
        assert array.tolist() == [1, 1]
    for wrong in (attempt(comm.send, got, size), attempt(comm.recv, got, -1)):
        assert isinstance(wrong, ValueError)


@over([("native", 3), ("torch", 3), ("torch", 4)])
def test_groups_are_made_by_their_members_alone_in_the_order_given(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    if rank < 2:  # a group more on some ranks than on others must not confuse the next
        first = comm.split([0, 1])
        assert first is not None
        first.barrier()
    members = [size - 1, 0]
    sub = comm.split(members)
    assert (sub is None) == (rank not in members)
    if sub is not None:
        assert (sub.rank, sub.size, sub.global_ranks) == (members.index(rank), 2, tuple(members))
        sub.all_gather(output := torch.zeros(2), torch.tensor([float(rank)]))
        assert output.tolist() == members
        sub.broadcast(tensor := torch.tensor([rank]), 0)
        assert tensor.item() == size - 1
        sub.close()
        sub.close()
        assert isinstance(attempt(sub.barrier), unisono.GroupClosed)
    again = comm.split(list(range(size)))
    assert again is not None
    one, two = torch.ones(5), torch.ones(7)
    works = [again.all_reduce(one, async_op=True), comm.all_reduce(two, async_op=True)]
    works += [comm.all_reduce(two, async_op=True), again.all_reduce(one, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    assert one.tolist() == [size**2] * 5
    assert two.tolist() == [size**2] * 7
    again.close()
    comm.barrier()
    for wrong in ([], [0, 0], [size]):
        assert isinstance(attempt(comm.split, wrong), ValueError)


# -- the torch make alone --------------------------------------------------------------------------


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("difference", ["size", "dtype", "op", "operation", "root"])
def test_a_mismatch_on_gloo_raises_on_every_rank(process_group: Any, difference: str) -> None:
    comm = resolve()
    odd = comm.rank == 1
    tensor = torch.ones(12 if odd and difference == "size" else 10)
    if odd and difference == "dtype":
        tensor = tensor.int()
    error = None
    if difference == "root":
        error = attempt(comm.broadcast, tensor, 2 if odd else 0)
    elif difference == "operation" and odd:
        error = attempt(comm.barrier)
    else:
        error = attempt(comm.all_reduce, tensor, "max" if odd and difference == "op" else "sum")
    assert isinstance(error, unisono.CollectiveMismatch), error
    assert error.culprits == (1,)
    assert (tensor == 1).all()
    assert isinstance(attempt(comm.barrier), unisono.CollectiveMismatch)
    assert isinstance(comm.errored, unisono.CollectiveMismatch)


@pytest.mark.ranks(3, backend="gloo")
def test_a_pair_that_disagrees_on_gloo_is_told(process_group: Any) -> None:
    comm = resolve()
    sent = [torch.ones(2) for _ in range(3)]
    taken = [torch.ones(3 if comm.rank == 2 and r == 0 else 2) for r in range(3)]
    error = attempt(comm.all_to_all, taken, sent)
    assert isinstance(error, unisono.CollectiveMismatch), error
    assert "rank 0 gives 2 elements to rank 2, which wants 3" in str(error)


@pytest.mark.ranks(2, backend="gloo")
def test_one_rank_that_refuses_its_arguments_does_not_leave_the_others_waiting(
    process_group: Any,
) -> None:
    comm = resolve()
    if comm.rank == 0:
        with pytest.raises(TypeError, match="avg has no meaning for int32"):
            comm.all_reduce(torch.ones(3, dtype=torch.int32), "avg")
    else:
        with pytest.raises(unisono.CollectiveMismatch, match="refused"):
            comm.all_reduce(torch.ones(3))
    assert isinstance(attempt(comm.barrier), unisono.CollectiveMismatch)


@pytest.mark.ranks(2, backend="gloo")
def test_a_late_peer_is_a_timeout_on_both_sides(process_group: Any, shared_tmp_path: Any) -> None:
    comm = resolve()
    gave_up = shared_tmp_path / "gave-up"
    if comm.rank == 0:
        with pytest.raises(unisono.CollectiveTimeout, match="barrier on group") as caught:
            comm.barrier(timeout_s=0.3)
        assert isinstance(caught.value.__cause__, RuntimeError)
        gave_up.touch()
        assert isinstance(attempt(comm.all_reduce, torch.ones(1)), unisono.CollectiveTimeout)
    else:
        while not gave_up.exists():
            pass
        error = attempt(comm.barrier)
        assert isinstance(error, unisono.CollectiveTimeout), error
        assert "told by rank 0" in str(error)


@pytest.mark.ranks(3, backend="gloo")
def test_abort_ends_the_calls_of_every_rank_with_its_reason(process_group: Any) -> None:
    comm = resolve()
    if comm.rank == 1:
        comm.abort("enough")
    error = attempt(comm.all_reduce, torch.ones(3))
    assert isinstance(error, unisono.GroupAborted), error
    assert "rank 1 ended group" in str(error)
    assert "enough" in str(error)


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_that_closes_ends_what_is_under_way(
    process_group: Any, shared_tmp_path: Any
) -> None:
    comm = resolve().split([0, 1])
    assert comm is not None
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        comm.close()
        comm.close()
        assert isinstance(attempt(work.wait), unisono.GroupError)
        assert isinstance(attempt(comm.barrier), unisono.GroupClosed)
        (shared_tmp_path / "closed").touch()
    else:
        while not (shared_tmp_path / "closed").exists():
            pass
        error = attempt(comm.barrier)
        assert isinstance(error, unisono.PeerLost), error
        assert "rank 0 closed group" in str(error)
    dist.barrier()  # its parent goes on


@pytest.mark.ranks(2, backend="gloo")
def test_an_error_of_a_work_comes_out_at_wait(process_group: Any) -> None:
    comm = resolve()
    work = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
    assert work is not None
    assert isinstance(attempt(work.wait), unisono.CollectiveMismatch)
    assert isinstance(attempt(work.wait), unisono.CollectiveMismatch)
    assert work.is_completed()
    assert isinstance(work.exception(), unisono.CollectiveMismatch)


@pytest.mark.ranks(2, backend="gloo")
def test_a_foreign_group_is_wrapped_once_and_goes_with_its_group(process_group: Any) -> None:
    assert resolve() is resolve(process_group) is resolve(dist.group.WORLD)
    assert resolve().backend == "gloo"
    sub = dist.new_group([1, 0])
    comm = resolve(sub)
    assert comm is resolve(sub)
    assert comm.global_ranks == (0, 1)
    comm.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [2, 2]
    dist.barrier()
    dist.destroy_process_group(sub)
    del sub
    assert isinstance(attempt(comm.barrier), unisono.UnisonoError)
    closed = resolve()
    closed.close()
    assert isinstance(attempt(closed.barrier), unisono.GroupClosed)
    dist.barrier()  # closing has not destroyed what it did not make
    resolve().barrier()
