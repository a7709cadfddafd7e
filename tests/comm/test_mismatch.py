"""Ranks that make different calls: all ranks learn of it, no data moves, only that group ends."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from expected import assert_same
from ranks import RankPool, attempt, raised, signalled_while_waiting, subgroup
from unisono import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    PeerLost,
    PremulSum,
)
from unisono.comm.communicator import Communicator
from user_programs import eventually

Call = Callable[[Communicator, "Buffers"], None]


@dataclass
class Buffers:
    """Everything that a call may write to. `wide` has a part of four elements for each rank."""

    narrow: torch.Tensor
    wide: torch.Tensor
    other: torch.Tensor
    parts: list[torch.Tensor]
    longer: list[torch.Tensor]

    @staticmethod
    def of(group: Communicator, scale: int) -> Buffers:
        size, rank = group.size, group.rank
        first = 10 * rank + 1.0
        return Buffers(
            torch.full((4 * scale,), first),
            torch.full((4 * scale * size,), first + 1),
            torch.full((4 * scale * size,), first + 2),
            [torch.full(((r + 2) * scale,), first + 3) for r in range(size)],
            [torch.full(((r + 3) * scale,), first + 4) for r in range(size)],
        )

    def all(self) -> list[torch.Tensor]:
        return [self.narrow, self.wide, self.other, *self.parts, *self.longer]


def gathered(group: Communicator, tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if group.rank == 0 else None


# For each kind of mismatch: what the others call, and what the odd one calls.
KINDS: dict[str, tuple[Call, Call]] = {
    "another operation": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.broadcast(b.narrow),
    ),
    "a barrier instead": (lambda g, b: g.all_gather(b.wide, b.narrow), lambda g, b: g.barrier()),
    "a reduction instead of a barrier": (
        lambda g, b: g.barrier(),
        lambda g, b: g.all_reduce(b.narrow),
    ),
    "a gather instead of an exchange": (
        lambda g, b: g.all_to_all(b.wide, b.other),
        lambda g, b: g.gather(gathered(g, b.wide), b.narrow),
    ),
    "another dtype of the same size": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(b.narrow.view(torch.int32)),
    ),
    "another count": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(b.narrow[1:]),
    ),
    "nothing instead of something": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(b.narrow[:0]),
    ),
    "another reduction": (
        lambda g, b: g.reduce_scatter(b.narrow, b.wide, "sum"),
        lambda g, b: g.reduce_scatter(b.narrow, b.wide, "max"),
    ),
    "another factor": (
        lambda g, b: g.all_reduce(b.narrow, PremulSum(2)),
        lambda g, b: g.all_reduce(b.narrow, PremulSum(3)),
    ),
    "another root": (
        lambda g, b: g.broadcast(b.narrow, 0),
        lambda g, b: g.broadcast(b.narrow, 1),
    ),
    "another root of a reduce": (
        lambda g, b: g.reduce(b.narrow, 1),
        lambda g, b: g.reduce(b.narrow, 0),
    ),
    "other sizes of an all_gather": (
        lambda g, b: g.all_gather(b.longer, b.parts[g.rank].new_zeros(len(b.longer[g.rank]))),
        lambda g, b: g.all_gather(b.parts, b.longer[g.rank].new_zeros(len(b.parts[g.rank]))),
    ),
    "other sizes of a reduce_scatter": (
        lambda g, b: g.reduce_scatter(b.longer[g.rank], [part.clone() for part in b.longer]),
        lambda g, b: g.reduce_scatter(b.parts[g.rank], [part.clone() for part in b.parts]),
    ),
    "other tensors of the same total": (
        lambda g, b: g.all_reduce([b.narrow[:1], b.narrow[1:]]),
        lambda g, b: g.all_reduce([b.narrow[:2], b.narrow[2:]]),
    ),
    "a list instead of a tensor": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce([b.narrow[:2], b.narrow[2:]]),
    ),
}

ALIKE_BUT_FOR_A_HASH = (
    "another factor",
    "other tensors of the same total",
    "a list instead of a tensor",
)

# The odd one raises about its own argument.
REFUSALS: dict[str, tuple[Call, Call]] = {
    "a sparse tensor": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(torch.eye(3).to_sparse()),
    ),
    "a number": (lambda g, b: g.broadcast(b.narrow), lambda g, b: g.broadcast(3.0)),  # type: ignore[arg-type]
    "an unknown reduction": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(b.narrow, "total"),
    ),
    "a reduction that is no name": (
        lambda g, b: g.all_reduce(b.narrow),
        lambda g, b: g.all_reduce(b.narrow, ["sum"]),  # type: ignore[arg-type]
    ),
    "a factor that is no number": (
        lambda g, b: g.all_reduce(b.narrow, PremulSum(2)),
        lambda g, b: g.all_reduce(b.narrow, PremulSum("2x")),  # type: ignore[arg-type]
    ),
    "an average of integers": (
        lambda g, b: g.all_reduce(b.narrow, "avg"),
        lambda g, b: g.all_reduce(b.narrow.view(torch.int32), "avg"),
    ),
    "a root outside": (
        lambda g, b: g.broadcast(b.narrow, 0),
        lambda g, b: g.broadcast(b.narrow, g.size),
    ),
    "a root that is no rank": (
        lambda g, b: g.broadcast(b.narrow, 0),
        lambda g, b: g.broadcast(b.narrow, "0"),  # type: ignore[arg-type]
    ),
    "parts that do not fit": (
        lambda g, b: g.all_gather(b.wide, b.narrow),
        lambda g, b: g.all_gather(b.wide, b.narrow[1:]),
    ),
    "a list that is too short": (
        lambda g, b: g.all_to_all(b.longer, b.longer),
        lambda g, b: g.all_to_all(b.longer[1:], b.longer),
    ),
}

# Sends and receives differ; every rank posted the same, so no rank can be blamed.
PAIRS: dict[str, tuple[Call, Call]] = {
    "an exchange": (
        lambda g, b: g.all_to_all(b.wide, b.other),
        lambda g, b: g.all_to_all(
            list(b.wide.split(b.narrow.numel())),
            [b.other[: b.narrow.numel() + (r - g.rank) % g.size] for r in range(g.size)],
        ),
    ),
    "a gather": (
        lambda g, b: g.gather(gathered(g, b.wide), b.narrow),
        lambda g, b: g.gather(
            [b.narrow.clone(), *(b.longer[1:])] if g.rank == 0 else None,
            b.narrow if g.rank == 0 else b.narrow[1:],
        ),
    ),
    "a scatter": (
        lambda g, b: g.scatter(b.narrow, gathered(g, b.wide)),
        lambda g, b: g.scatter(
            b.narrow if g.rank == 0 else b.narrow[1:],
            [b.narrow.clone(), *(b.longer[1:])] if g.rank == 0 else None,
        ),
    ),
}


def differ(
    comm: Communicator, table: str, kind: str, odd: int, scale: int
) -> tuple[BaseException | None, float]:
    """One rank does something else. Returns what this rank raised, and after how long."""
    ranks = list(range(comm.size))
    group, bystander = subgroup(comm, ranks), subgroup(comm, ranks)
    group.all_reduce(torch.ones(3))
    buffers = Buffers.of(group, scale)
    before = [tensor.clone() for tensor in buffers.all()]
    usual, unusual = {"kinds": KINDS, "refusals": REFUSALS, "pairs": PAIRS}[table][kind]
    start = time.monotonic()
    error = attempt(unusual if comm.rank == odd else usual, group, buffers)
    took_s = time.monotonic() - start
    for tensor, old in zip(buffers.all(), before, strict=True):
        assert_same(tensor, old, f"{kind}: a buffer has changed")
    later = attempt(group.barrier)
    assert isinstance(later, CollectiveMismatch), f"not poisoned: {later!r}"
    if isinstance(error, CollectiveMismatch):
        assert str(later) == str(error)
    bystander.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == comm.size
    group.close()
    bystander.close()
    return error, took_s


@pytest.mark.parametrize("scale", [1, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks([2, 3, 4])
def test_a_mismatch_raises_on_every_rank_and_names_the_odd_one(
    comm: Communicator, kind: str, scale: int
) -> None:
    odd = random.Random(f"{kind}{comm.size}{scale}").randrange(comm.size)
    error, took_s = differ(comm, "kinds", kind, odd, scale)
    assert isinstance(error, CollectiveMismatch), error
    assert error.rank == comm.rank
    assert error.call == 2
    assert len(error.calls) == comm.size
    assert error.culprits == ((odd,) if comm.size > 2 else ())
    if comm.size > 2:
        assert str(error).startswith(f"rank {odd} made a different call")
    assert "#2" in str(error)
    assert error.group in str(error)
    assert ("with hash" in str(error)) == (kind in ALIKE_BUT_FOR_A_HASH)
    assert took_s < 3.0


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.ranks([2, 3], timeout_s=16)
def test_an_argument_that_one_rank_refuses_raises_on_all_at_once(
    comm: Communicator, kind: str
) -> None:
    odd = comm.size - 1
    error, took_s = differ(comm, "refusals", kind, odd, 1)
    if comm.rank == odd:
        assert isinstance(error, (TypeError, ValueError)), error
    else:
        assert isinstance(error, CollectiveMismatch), error
        assert "refused" in str(error)
        assert error.culprits == ((odd,) if comm.size > 2 else ())
    assert took_s < 3.0


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.ranks([2, 3, 4])
def test_what_is_given_must_be_what_is_taken(comm: Communicator, kind: str) -> None:
    for odd in (1, comm.size - 1):
        for scale in (1, 20_000):
            error, _ = differ(comm, "pairs", kind, odd, scale)
            assert isinstance(error, CollectiveMismatch), (odd, scale, error)
            assert "sends" in str(error)


@pytest.mark.ranks(8)
def test_eight_ranks_name_the_odd_one(comm: Communicator) -> None:
    error, _ = differ(comm, "kinds", "another count", 5, 1)
    assert isinstance(error, CollectiveMismatch)
    assert error.culprits == (5,)


@pytest.mark.ranks(4)
def test_without_a_majority_both_sides_are_shown(comm: Communicator) -> None:
    error = raised(
        CollectiveMismatch, comm.all_reduce, torch.ones(3), ("sum", "max")[comm.rank % 2]
    )
    assert error.culprits == ()
    assert "ranks 0 and 2: all_reduce of float32, 3 elements, sum" in str(error)
    assert "ranks 1 and 3: all_reduce of float32, 3 elements, max" in str(error)


@pytest.mark.ranks(4)
def test_groups_with_the_culprit_that_were_not_in_the_call_go_on(comm: Communicator) -> None:
    pairs = [comm.split([0, 1]), comm.split([2, 3])]
    mine = next(pair for pair in pairs if pair is not None)
    if comm.rank < 2:
        raised(CollectiveMismatch, mine.all_reduce, torch.ones(2 + comm.rank))
    for _ in range(10):
        comm.all_reduce(tensor := torch.ones(5))
        assert tensor.eq(4).all()
        if comm.rank >= 2:
            mine.all_reduce(tensor := torch.ones(5))
            assert tensor.eq(2).all()
    if comm.rank < 2:
        assert isinstance(attempt(mine.barrier), CollectiveMismatch)
    fresh = comm.split([0, 1])
    if fresh is not None:
        fresh.all_reduce(tensor := torch.ones(5))
        assert tensor.eq(2).all()


@pytest.mark.ranks(3)
def test_a_skipped_call_is_seen_at_the_next_different_one(comm: Communicator) -> None:
    error = None
    if comm.rank != 1:
        error = attempt(comm.all_reduce, torch.ones(4))
    if error is None:
        error = attempt(comm.broadcast, torch.ones(4))
    assert isinstance(error, CollectiveMismatch)
    assert error.culprits == (1,)
    assert error.call == 1


@pytest.mark.ranks(3)
def test_a_late_rank_is_still_in_the_report(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.4)
    error = raised(CollectiveMismatch, comm.all_reduce, torch.ones(2 + comm.rank // 2))
    assert None not in error.calls
    assert error.culprits == (2,)


# -- time --------------------------------------------------------------------------------------


@pytest.mark.ranks([2, 4])
def test_a_late_rank_is_named_at_the_deadline(comm: Communicator, shared_tmp_path: Path) -> None:
    late = comm.size - 1
    comm.barrier()
    comm.barrier()
    comm.timeout_s = 0.5
    if comm.rank == late:
        assert eventually(lambda: len(list(shared_tmp_path.iterdir())) == late)
    tensor = torch.ones(1000)
    start = time.monotonic()
    error = attempt(comm.all_reduce, tensor)
    took_s = time.monotonic() - start
    (shared_tmp_path / str(comm.rank)).touch()
    assert tensor.eq(1).all()
    assert repr(attempt(comm.barrier)) == repr(error), "the first cause stays"
    assert isinstance(error, CollectiveTimeout), error
    assert error.missing == (late,)
    assert set(error.arrived) == set(range(late))
    assert error.call == 3
    assert f"rank {late} never arrived" in str(error)
    if comm.rank != late:
        assert 0.45 <= took_s < 10.0, took_s


@pytest.mark.ranks(3)
def test_a_rank_that_comes_in_time_is_waited_for(comm: Communicator) -> None:
    comm.timeout_s = 5.0
    for late in range(3):
        if comm.rank == late:
            time.sleep(0.3)
        comm.all_reduce(tensor := torch.ones(70_000))
        assert tensor.eq(3).all()


@pytest.mark.ranks(2)
def test_the_deadline_counts_anew_for_every_call(comm: Communicator) -> None:
    comm.timeout_s = 3.0  # less than all pauses, far more than one: the machine may be busy
    for step in range(8):
        if comm.rank == step % 2:
            time.sleep(0.4)
        comm.barrier()


# -- signals -----------------------------------------------------------------------------------


def test_an_interrupt_ends_the_wait_at_once_and_the_group_for_all(fresh_pool: RankPool) -> None:
    (interrupted, took_s), *others = fresh_pool.run(the_first_is_interrupted, 3)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert took_s < 5.0
    for error, took_s in others:
        assert isinstance(error, GroupAborted), error
        assert "rank 0" in str(error)
        assert took_s < 5.0


def the_first_is_interrupted(comm: Communicator) -> tuple[BaseException | None, float]:
    comm.all_reduce(torch.ones(3))
    if comm.rank == 2:  # this one never waits: it arrives when everything is over
        assert eventually(lambda: comm.errored is not None)
    start = time.monotonic()
    interrupts = signalled_while_waiting() if comm.rank == 0 else nullcontext([start])
    with interrupts as moment:
        error = attempt(comm.all_reduce, torch.ones(5))
        took_s = time.monotonic() - moment[0]
    assert isinstance(attempt(comm.barrier), GroupError)
    return error, took_s


def test_a_signal_that_does_not_raise_does_no_harm(fresh_pool: RankPool) -> None:
    assert min(fresh_pool.run(signals_while_waiting, 2)) >= 10


def signals_while_waiting(comm: Communicator) -> int:
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        for step in range(60):
            if comm.rank == step % 2:
                time.sleep(0.01)
            comm.all_reduce(tensor := torch.ones(50_000))
            assert tensor.eq(2).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return seen


def test_an_exception_from_a_signal_handler_comes_out_of_the_call(fresh_pool: RankPool) -> None:
    first, second = fresh_pool.run(a_handler_raises, 2)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, (GroupAborted, PeerLost))


def a_handler_raises(comm: Communicator) -> BaseException | None:
    if comm.rank == 1:
        assert eventually(lambda: comm.errored is not None)
        return attempt(comm.barrier)
    with signalled_while_waiting(signal.SIGALRM, lambda *_: 1 // 0):
        return attempt(comm.barrier)
