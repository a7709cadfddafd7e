"""Schedules on real ranks: every algorithm in the catalog, by messages and inside the engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch

import unisono
from expected import FLOATS, OPS, REDUCIBLE, after, assert_same, inputs, meaningful, reduced, values
from ranks import RankPool, attempt, subgroup
from unisono import CollectiveMismatch, PeerLost, PremulSum, run_schedule
from unisono.cases.primitives import PRIMITIVES
from unisono.comm.communicator import Communicator
from unisono.comm.engine.numbers import REDUCTION_NUMBERS
from unisono.comm.factory import connect_on_host, wrap
from unisono.comm.meeting.board import FileBoard
from unisono.comm.on_rows.mismatches import algorithm_mark
from unisono.plan import Schedule, ScheduleError, Transfer, algorithm, catalog, find
from unisono.plan.schedule import COLLECTIVES

RANKS = [2, 3, 4, 5, 8]
ALL_REDUCE = [entry.name for entry in catalog("all_reduce") if not entry.only_planned]
LENGTHS = (0, 3, 1009)
LARGE = 700_001  # several slices
DTYPE = torch.int32


def schedules(collective: str, ranks: int) -> list[Schedule]:
    """Every algorithm for a collective, from two roots where it has one, and with its options."""
    roots = {0, ranks - 1} if PRIMITIVES[collective].is_rooted else {0}
    options: list[dict[str, int]] = [{}, {"pieces": 3}]
    if ranks % 2 == 0:
        options.append({"node_size": 2})
    made = [
        entry.schedule(ranks, root=root, **more)
        for entry in catalog(collective)
        for root in sorted(roots)
        for more in options
        if not more or set(more) <= set(entry.options)
    ]
    assert made
    return made


def run_and_check(schedule: Schedule, comm: Communicator, length: int, seed: int) -> None:
    """Run it on `length` elements per part, and compare with NumPy's result from all inputs."""
    primitive, rank, size, root = schedule.primitive, comm.rank, comm.size, schedule.root
    if primitive.is_empty:
        run_schedule(schedule, comm)
        return
    all_inputs = inputs(size, DTYPE, length * (size if "input" in primitive.wide else 1), seed)
    mine, wanted = all_inputs[rank].clone(), after(primitive.name, all_inputs, rank, root)
    what = f"{schedule.title()}, {length} elements"
    output = None if wanted is None else torch.full_like(wanted, 99)
    gives = primitive.name != "scatter" or rank == root
    if primitive.is_in_place:
        run_schedule(schedule, comm, output := mine)
    else:
        run_schedule(schedule, comm, output, mine if gives else None)
        assert_same(mine, all_inputs[rank], f"{what}: the input is untouched")
    if wanted is not None:
        assert_same(output, wanted, what)


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm_of_the_catalog(comm: Communicator, collective: str) -> None:
    for schedule in schedules(collective, comm.size):
        for seed, length in enumerate(LENGTHS):
            run_and_check(schedule, comm, length, seed)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_tensors_of_several_slices(comm: Communicator, collective: str) -> None:
    for schedule in schedules(collective, comm.size):
        wide = schedule.blocks > 1
        run_and_check(schedule, comm, LARGE // comm.size if wide else LARGE, 7)


@pytest.mark.ranks([2, 3], backend="gloo")
def test_the_same_over_gloo(process_group: Any) -> None:
    comm = wrap(process_group)
    for collective in COLLECTIVES:
        for schedule in schedules(collective, comm.size)[:4]:
            for seed, length in enumerate((0, 3, 1001)):
                run_and_check(schedule, comm, length, seed)
    tensor = torch.arange(1000) + comm.rank
    by_engine(comm, tensor, "max", "double_tree")
    assert_same(tensor, torch.arange(1000) + comm.size - 1)
    with pytest.raises(ValueError, match=r"ring.* async_op"):
        comm.all_reduce(tensor, algorithm="ring", async_op=True)
    with pytest.raises(CollectiveMismatch, match="by binomial"):
        by_engine(comm, tensor, "sum", "ring" if comm.rank else "binomial")
    by_engine(comm, tensor, "max", "ring")
    assert_same(tensor, torch.arange(1000) + comm.size - 1)


def test_a_group_of_one() -> None:
    from unisono.comm.factory import alone

    comm = alone()
    for collective in COLLECTIVES:
        for schedule in schedules(collective, 1):
            run_and_check(schedule, comm, 5, 0)
    tensor = torch.ones(3)
    comm.all_reduce(tensor, PremulSum(2.0), algorithm="ring")
    assert tensor.tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"no algorithm 'no such', only .*ring"):
        comm.all_reduce(tensor, algorithm="no such")


# -- inside the engine -----------------------------------------------------------------------------


@pytest.mark.ranks(RANKS)
def test_every_all_reduce_compiled(comm: Communicator) -> None:
    for seed, length in enumerate((*LENGTHS, LARGE)):
        all_inputs = inputs(comm.size, DTYPE, length, seed)
        wanted = reduced(all_inputs, "sum")
        for schedule in schedules("all_reduce", comm.size):
            tensor = all_inputs[comm.rank].clone()
            comm.all_reduce(tensor, algorithm=schedule)
            assert_same(tensor, wanted, f"{schedule.title()}, {length} elements")


@pytest.mark.ranks([2, 3])
def test_an_algorithm_again(comm: Communicator) -> None:
    """The second call by an algorithm takes a shorter path, with the same rules."""
    for dtype, op in ((torch.int64, "sum"), (torch.float32, "max"), (torch.int64, "product")):
        for length in (1009, 0, 3):
            all_inputs = inputs(comm.size, dtype, length)
            tensor = all_inputs[comm.rank].clone()
            comm.all_reduce(tensor, op, algorithm="ring")
            assert_same(tensor, reduced(all_inputs, op), f"{op} of {dtype}")
    for root in (0, comm.size - 1, 0):
        tensor = torch.full((3, 2), comm.rank)[:, 1]
        comm.broadcast(tensor, root, algorithm="binomial")
        assert tensor.tolist() == [root] * 3
    whole = torch.ones(4)
    with pytest.raises(TypeError, match="avg is not defined for int64"):
        comm.all_reduce(torch.ones(2, dtype=torch.int64), "avg", algorithm="ring")
    with pytest.raises((TypeError, ValueError), match="unknown reduction 0"):
        comm.all_reduce(whole, 0, algorithm="ring")  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="root"):
        comm.broadcast(whole, [0], algorithm="binomial")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory"):
        comm.all_reduce([whole, whole[1:]], algorithm="ring")
    name = "ring" if comm.rank else "recursive_doubling"
    comm.all_reduce(whole, algorithm="recursive_doubling")
    with pytest.raises(CollectiveMismatch, match="ring"):
        comm.all_reduce(whole, algorithm=name)


@pytest.mark.ranks([2, 5])
def test_strided_lists_and_works(comm: Communicator) -> None:
    count = 60_000
    all_inputs = inputs(comm.size, torch.int64, count)
    total = reduced(all_inputs, "sum")
    for name in ALL_REDUCE:
        base = all_inputs[comm.rank].clone().reshape(200, 300)
        view = base[1::2, ::3]
        wanted = base.clone()
        wanted[1::2, ::3] = total.reshape(200, 300)[1::2, ::3]
        comm.all_reduce(view, algorithm=name)
        assert_same(base, wanted, f"{name}: a strided tensor")

        executed = all_inputs[comm.rank].clone().reshape(200, 300)
        run_schedule(find("all_reduce", name).schedule(comm.size), comm, executed[1::2, ::3])
        assert_same(executed, wanted, f"{name}: a strided tensor by messages")

        mine = all_inputs[comm.rank].clone()
        pieces = [mine[:7], mine[7:30_001], mine[30_001:]]
        comm.all_reduce(pieces, algorithm=name)
        assert_same(mine, total, f"{name}: a list")

        mine = all_inputs[comm.rank].clone()
        works = [comm.all_reduce(mine[:999], algorithm=name, async_op=True)]
        works.append(comm.all_reduce(mine[999:], algorithm=name, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        assert_same(mine, total, f"{name}: works")


@pytest.mark.ranks(RANKS)
def test_every_broadcast_compiled(comm: Communicator) -> None:
    names = {entry.name for entry in catalog("broadcast") if not entry.only_planned}
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e5m2)
    for root in {0, comm.size - 1}:
        for name in sorted(names):
            for length in (*LENGTHS, LARGE):
                sent = values(DTYPE, length, 5, root)
                x = sent.clone() if comm.rank == root else torch.zeros(length, dtype=DTYPE)
                comm.broadcast(x, root, algorithm=name)
                assert_same(x, sent, f"{name} from {root}, {length} elements")
            base = torch.full((6, 40), comm.rank, dtype=torch.int16)
            pieces = [torch.full((5,), comm.rank).to(dtype) for dtype in dtypes]
            works = [comm.broadcast(base[::2, ::3], root, algorithm=name, async_op=True)]
            works.append(comm.broadcast(pieces, root, algorithm=name, async_op=True))
            for work in works:
                assert work is not None
                work.wait()
            assert (base[::2, ::3] == root).all()
            assert (base[1::2] == comm.rank).all()
            assert all((piece.to(torch.complex128) == root).all() for piece in pieces)


@pytest.mark.ranks(3)
def test_no_name_of_an_algorithm_makes_a_broadcast_compute(comm: Communicator) -> None:
    """A descriptor holds a code for the algorithm's name where others hold a reduction: avg,
    premul_sum and the truncated average have the codes of these three."""
    marks = {algorithm_mark(name, 255) for name in ("mine1004", "mine1445", "mine106")}
    assert marks == {REDUCTION_NUMBERS[name] for name in ("avg", "premul_sum", "truncated_avg")}
    for name in ("mine1004", "mine1445", "mine106"):
        steps = [[Transfer(0, 1, 0, "copy")], [Transfer(1, 2, 0, "copy")]]
        schedule = Schedule.from_steps("broadcast", name, comm.size, 1, steps)
        for dtype in (torch.float32, torch.int64, torch.float8_e5m2, torch.bool):
            x = torch.ones(1009).to(dtype) if comm.rank == 0 else torch.zeros(1009).to(dtype)
            comm.broadcast(x, algorithm=schedule)
            assert (x.float() == 1).all(), f"{name}, {dtype}"


@pytest.mark.ranks(3)
def test_broadcasts_by_different_algorithms_move_nothing(comm: Communicator) -> None:
    with subgroup(comm, [0, 1, 2]) as group:
        x = torch.full((4,), comm.rank)
        with pytest.raises(CollectiveMismatch, match="by binomial"):
            group.broadcast(x, algorithm=None if comm.rank == 2 else "binomial")
        assert (x == comm.rank).all()


def by_messages(comm: Communicator, tensor: Any, op: Any, name: str) -> None:
    run_schedule(find("all_reduce", name).schedule(comm.size), comm, tensor, op=op)


def by_engine(comm: Communicator, tensor: Any, op: Any, name: str) -> None:
    comm.all_reduce(tensor, op, algorithm=name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", [by_messages, by_engine])
def test_every_dtype_and_reduction(comm: Communicator, way: Callable[..., None]) -> None:
    ops = (*OPS, PremulSum(3.0))
    for seed, dtype in enumerate(REDUCIBLE):
        all_inputs = inputs(comm.size, dtype, 1009, seed)
        for op in ops:
            if not meaningful(dtype, op):
                continue
            wanted = reduced(all_inputs, op)
            for name in ("ring", "recursive_doubling"):
                tensor = all_inputs[comm.rank].clone()
                way(comm, tensor, op, name)
                assert_close(tensor, wanted, f"{name}, {op} of {dtype}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Exactly, except for floats: these are added in another order and rounded at every step."""
    if not (actual.dtype in FLOATS or actual.dtype.is_complex):
        assert_same(actual, expected, what)
        return
    digits = torch.finfo(actual.dtype).eps
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    ours, theirs = actual.to(wide), expected.to(wide)
    limit = 8 * digits * max(64.0, float(theirs.abs().nan_to_num(posinf=0).max()))
    finite = theirs.isfinite()
    assert finite.float().mean() > 0.9
    worst = float((ours - theirs)[finite].abs().nan_to_num(nan=1e30, posinf=1e30).max())
    assert worst <= limit, f"{what}: off by {worst}, more than {limit}"


@pytest.mark.ranks([3, 4])
def test_both_ways_give_the_same_bits(comm: Communicator) -> None:
    """One order of sums, wherever it runs, and the same on every rank."""
    for dtype in FLOATS:
        for name in ALL_REDUCE:
            ours, theirs = (values(dtype, 997, 3, comm.rank) for _ in range(2))
            by_messages(comm, ours, "avg", name)
            by_engine(comm, theirs, "avg", name)
            assert_same(ours, theirs, f"{name} of {dtype}")
            everybody = torch.empty(comm.size * 997, dtype=dtype)
            comm.all_gather(everybody, ours)
            for rank in range(comm.size):
                assert_same(everybody[rank * 997 : (rank + 1) * 997], ours, f"{name} on {rank}")


@pytest.mark.ranks(3)
def test_numpy_arrays(comm: Communicator) -> None:
    for way in (by_messages, by_engine):
        array = numpy.arange(1000, dtype=numpy.uint16).reshape(10, 100)[:, ::3] * (comm.rank + 1)
        wanted = numpy.arange(1000, dtype=numpy.uint16).reshape(10, 100)[:, ::3] * 6
        way(comm, array, "sum", "double_tree")
        assert numpy.array_equal(array, wanted)
    output = numpy.zeros(6)
    run_schedule(
        find("all_gather", "bruck").schedule(3), comm, output, numpy.full(2, comm.rank + 0.5)
    )
    assert output.tolist() == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]


# -- invalid arguments -----------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_refusals_leave_the_group_well(comm: Communicator) -> None:
    tensor = torch.ones(4)
    ring = find("all_reduce", "ring")
    gather = find("all_gather", "ring").schedule(2)
    wrong = Schedule.from_steps("all_reduce", "wrong", 2, 1, [[Transfer(0, 1, 0, "reduce")]])
    two = ring.schedule(2)
    engine = partial(comm.all_reduce, tensor)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "no algorithm 'rnig', only .*ring", partial(engine, algorithm="rnig")),
        (ValueError, "by mates can only be planned", partial(engine, algorithm="mates")),
        (ValueError, "3 ranks.*of 2", partial(run_schedule, ring.schedule(3), comm, tensor)),
        (ValueError, "3 ranks.*of 2", partial(engine, algorithm=ring.schedule(3))),
        (ScheduleError, "rank 0 lacks", partial(run_schedule, wrong, comm, tensor)),
        (ScheduleError, "rank 0 lacks", partial(engine, algorithm=wrong)),
        (ValueError, "not a schedule for all_reduce", partial(engine, algorithm=gather)),
        (
            TypeError,
            "avg is not defined",
            partial(run_schedule, two, comm, tensor.long(), op="avg"),
        ),
        (ValueError, "unknown reduction", partial(run_schedule, two, comm, tensor, op="total")),
        (TypeError, "None .*instead of a tensor", partial(run_schedule, gather, comm, tensor)),
        (
            ValueError,
            "4 elements in the input",
            partial(run_schedule, gather, comm, tensor, tensor),
        ),
        (ValueError, "takes no input", partial(run_schedule, two, comm, tensor, tensor)),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    assert comm.errored is None
    by_engine(comm, tensor, "sum", "ring")
    assert tensor.tolist() == [2, 2, 2, 2]


@pytest.mark.ranks(3)
def test_ranks_with_different_algorithms_raise_before_anything_moves(comm: Communicator) -> None:
    tensor = torch.full((5000,), 1.0)
    with pytest.raises(CollectiveMismatch) as caught:
        by_messages(comm, tensor, "sum", "binomial" if comm.rank == 1 else "ring")
    assert caught.value.culprits == (1,)
    assert comm.errored is None
    with pytest.raises(CollectiveMismatch):
        by_messages(comm, tensor if comm.rank else tensor[1:], "sum", "ring")
    assert tensor.eq(1).all()
    with pytest.raises(CollectiveMismatch, match="rank 2 made a different call") as caught:
        by_engine(comm, tensor, "sum", "binomial" if comm.rank == 2 else "ring")
    assert "by ring" in str(caught.value)
    assert "by binomial" in str(caught.value)
    assert tensor.eq(1).all()


@pytest.mark.ranks(2)
def test_the_own_algorithm_and_a_named_one_do_not_mix(comm: Communicator) -> None:
    tensor = torch.ones(100_000)
    with pytest.raises(CollectiveMismatch, match="by double_tree"):
        comm.all_reduce(tensor, algorithm="double_tree" if comm.rank else None)
    assert tensor.eq(1).all()


@pytest.mark.ranks(3)
def test_own_messages_in_flight(comm: Communicator) -> None:
    """The program's own messages, started before a schedule runs and received after it."""
    to, source = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    letter, got = torch.tensor([float(comm.rank)]), torch.empty(1)
    work = comm.isend(letter, to)
    receiving = comm.irecv(got, source, tag=7)
    later = comm.isend(letter + 10, to, tag=7)
    for name in ALL_REDUCE:
        tensor = torch.arange(100)
        by_messages(comm, tensor, "sum", name)
        assert_same(tensor, torch.arange(100) * 3, name)
    receiving.wait()
    assert got.item() == source + 10
    comm.recv(got, source)
    assert got.item() == source
    work.wait()
    later.wait()


# -- choosing --------------------------------------------------------------------------------------


@pytest.fixture
def own_algorithm() -> None:
    algorithm("all_reduce", "through_the_last")(through_the_last)


def through_the_last(ranks: int) -> Schedule:
    """A program's own algorithm: everything to the last rank, and back."""
    last = ranks - 1
    there = [Transfer(rank, last, 0, "reduce") for rank in range(last)]
    back = [Transfer(last, rank, 0, "copy") for rank in range(last)]
    return Schedule.from_steps("all_reduce", "through_the_last", ranks, 1, [there, back])


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("own_algorithm")
def test_an_algorithm_of_ones_own(comm: Communicator) -> None:
    for way in (by_messages, by_engine):
        tensor = torch.arange(5) + comm.rank
        way(comm, tensor, "sum", "through_the_last")
        assert_same(tensor, torch.arange(5) * 4 + 6)


@pytest.mark.ranks(2)
def test_nccl_algo_is_mentioned_once(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0, and not if UNISONO_ALGO is set."""
    monkeypatch.setenv("NCCL_ALGO", "Tree,NVLS")
    monkeypatch.setenv("UNISONO_ALGO", "ring")
    subgroup(comm, [0, 1])
    assert caplog.messages == []
    monkeypatch.delenv("UNISONO_ALGO")
    for _ in range(2):
        subgroup(comm, [0, 1])
    said = ["NCCL_ALGO=Tree,NVLS is for NCCL: UNISONO_ALGO chooses here"]
    assert caplog.messages == (said if comm.rank == 0 else [])


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("own_algorithm")
def test_the_environment_chooses(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e8 swallows a 1 that is added to it, so the result shows the order of the sum."""
    mine = torch.tensor([[1.0, 1e8, 1.0, -1e8][comm.rank + shift] for shift in (0, 1)])
    monkeypatch.setenv("UNISONO_ALGO", "through_the_last")
    chosen = subgroup(comm, [0, 1, 2])
    by_name, by_environment, own = mine.clone(), mine.clone(), mine.clone()
    comm.all_reduce(by_name, algorithm="through_the_last")
    chosen.all_reduce(by_environment)
    comm.all_reduce(own)
    assert_same(by_environment, by_name)
    assert not torch.equal(own, by_name)
    monkeypatch.setenv("UNISONO_ALGO", " Through_the_LAST" if comm.rank else "through_the_last")
    in_capitals = subgroup(comm, [0, 1, 2])
    in_capitals.all_reduce(again := mine.clone())
    assert_same(again, by_name)
    monkeypatch.setenv("UNISONO_ALGO", "rnig")
    unknown = subgroup(comm, [0, 1, 2])
    with pytest.raises(ValueError, match=r"all_reduce has no algorithm 'rnig', only .*ring"):
        unknown.all_reduce(mine)
    monkeypatch.setenv("UNISONO_ALGO", "ring" if comm.rank == 1 else "")
    different = subgroup(comm, [0, 1, 2])
    with pytest.raises(CollectiveMismatch, match="rank 1 made a different call"):
        different.all_reduce(mine)


@pytest.mark.ranks([1, 3])
@pytest.mark.usefixtures("own_algorithm")
def test_the_function_takes_an_algorithm(comm: Communicator) -> None:
    name = "through_the_last"
    mine = torch.tensor([[1.0, 1e8, 1.0, -1e8][comm.rank + shift] for shift in (0, 1)])
    by_method = mine.clone()
    comm.all_reduce(by_method, algorithm=name)
    by_function = mine.clone()
    assert unisono.all_reduce(by_function, group=comm, algorithm=name) is by_function
    assert_same(by_function, by_method)
    schedule = find("all_reduce", name).schedule(comm.size)
    out = torch.empty(2)
    unisono.all_reduce(mine, group=comm, out=out, algorithm=schedule)
    assert_same(out, by_method)
    work = unisono.all_reduce(mine.clone(), group=comm, async_op=True, algorithm=name)
    assert_same(work.wait(), by_method)
    structure = {"loss": mine.clone(), "count": 1}
    found = unisono.all_reduce(structure, group=comm, algorithm=name)
    assert_same(found["loss"], by_method)
    assert found["count"] == comm.size
    with pytest.raises(ValueError, match=r"no algorithm 'rnig', only .*ring"):
        unisono.all_reduce(mine, group=comm, algorithm="rnig")


# -- a rank that dies ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [by_messages, by_engine])
def test_a_rank_that_dies_in_the_middle(fresh_pool: RankPool, way: Callable[..., None]) -> None:
    outcomes = fresh_pool.outcomes(die_in_the_middle, 3, way, connected=False)
    for outcome in outcomes[:2]:
        assert outcome.value == 2


def die_in_the_middle(rank: int, size: int, path: str, way: Callable[..., None]) -> int:
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(3_000_000)
    way(comm, tensor, "sum", "ring")
    if rank == 2:
        # Take part in the start of the call, and be killed by the first message, or slice.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.005)
    error: Any = None
    while error is None:
        error = attempt(way, comm, tensor, "sum", "ring")
    assert isinstance(error, PeerLost), error
    assert isinstance(attempt(comm.barrier), PeerLost)
    comm.close()
    return error.peer


def test_names_are_public() -> None:
    assert "run_schedule" in unisono.__all__
