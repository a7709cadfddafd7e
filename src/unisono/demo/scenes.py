"""The primitives on real ranks, on numbers that a reader can follow, each result checked.

A rank returns only what its tensors held before and after. What they must hold is computed from
what all ranks returned, in the process that draws the pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from unisono.comm.base import Communicator
from unisono.demo.faults import Moment, deadlock, meet, mismatch
from unisono.errors import GroupError, UnisonoError
from unisono.plan.expectations import CUT_INPUTS, Array, compute, origins
from unisono.world.world import init, shutdown

Numbers = tuple[float, ...]
Rows = Sequence[Numbers]
BeforeAndAfter = tuple[Array | None, Array | None]
OWNER = 10
"""Where data only moves, a number's tens say whose it was: 23 is number 3 of rank 2."""


class WrongResult(UnisonoError):
    """A rank has another value than arithmetic says."""


@dataclass(frozen=True)
class Scene:
    """One primitive, whose `title` begins with its name. `flow` says how data moves: "from 0",
    "to 0", "all", "ring"; `run` makes the call."""

    title: str
    sentence: str
    flow: str
    run: Callable[[Communicator], BeforeAndAfter]

    @property
    def adds(self) -> bool:
        """Whether data is added up on the way."""
        return self.title.endswith("(sum)")

    @property
    def collective(self) -> str:
        """What must come out, as expectations.py names it."""
        return "ring" if self.flow == "ring" else self.title.split()[0]


@dataclass(frozen=True)
class RankOutcome:
    """What one rank saw: before and after of each scene, the barrier, and the faults' errors."""

    rows: tuple[tuple[Numbers, Numbers], ...]
    barrier: Moment
    deadlock: GroupError | None
    mismatch: GroupError | None


def run_all_scenes() -> RankOutcome:
    """Run by every rank: all scenes, then a barrier, then two faults on groups of their own."""
    try:
        return run_scenes(init("unisono", with_torch=False))
    finally:
        shutdown()


def run_scenes(comm: Communicator) -> RankOutcome:
    """All of it on this group."""
    rows = [tuple(map(_numbers, scene.run(comm))) for scene in SCENES]
    return RankOutcome(
        rows=tuple((before, after) for before, after in rows),
        barrier=meet(comm),
        deadlock=deadlock(comm),
        mismatch=mismatch(comm),
    )


def check(outcomes: Sequence[RankOutcome]) -> None:
    """Raise WrongResult unless every rank has what arithmetic says, and every fault was found."""
    for number, scene in enumerate(SCENES):
        expected = _expected(scene.collective, [outcome.rows[number][0] for outcome in outcomes])
        for rank, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
            got = outcome.rows[number][1]
            if got != right:
                raise WrongResult(
                    f"{scene.title}: rank {rank} has {list(got)} and should have {list(right)}"
                )
    last = max(outcome.barrier.came_s for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.barrier.left_s < last:
            raise WrongResult(f"barrier: rank {rank} left before the last rank came")
        if (outcome.deadlock is None) == (rank < 2):
            raise WrongResult(f"deadlock: rank {rank} should{' not' * (rank > 1)} have an error")
        if outcome.mismatch is None:
            raise WrongResult(f"mismatch: rank {rank} should have an error")


def _expected(collective: str, had: Rows) -> list[Numbers]:
    """What each rank must have afterwards; where it gets nothing, what it had, or no tensor."""

    def brought(rank: int, part: int) -> Array:
        numbers = numpy.array(had[rank])
        return numbers[part : part + 1] if collective in CUT_INPUTS else numbers

    rows: list[Numbers] = []
    for rank in range(len(had)):
        parts = origins(collective, rank, len(had))
        if parts is None:
            rows.append(had[rank] if collective == "reduce" else ())
        else:
            values = numpy.concatenate([compute(part, brought) for part in parts])
            rows.append(tuple(values.tolist()))
    return rows


# -- the scenes ------------------------------------------------------------------------------------


def _moved(comm: Communicator, count: int) -> Array:
    """This rank's numbers 0, 1, ... under its own tens."""
    return numpy.arange(count, dtype=numpy.float32) + OWNER * comm.rank


def _counted(comm: Communicator) -> Array:
    """[0, 1, 2, ...] + rank: on four ranks the sum is [6, 10, 14, 18]."""
    return numpy.arange(comm.size, dtype=numpy.float32) + comm.rank


def _empty(count: int) -> Array:
    return numpy.full(count, -1, numpy.float32)


def _at_root(comm: Communicator, numbers: Array) -> Array | None:
    return numbers if comm.rank == 0 else None


def _in_place(before: Array, call: Callable[[Array], object]) -> BeforeAndAfter:
    after = before.copy()
    call(after)
    return before, after


def _into(after: Any, before: Any, call: Callable[[Any, Any], object]) -> BeforeAndAfter:
    call(after, before)
    return before, after


def _gather_again(comm: Communicator) -> BeforeAndAfter:
    before = _empty(1)
    comm.reduce_scatter(before, _counted(comm))
    return _into(_empty(comm.size), before, comm.all_gather)


def _ring(comm: Communicator) -> BeforeAndAfter:
    before, after = _moved(comm, 2), _empty(2)
    sent = comm.isend(before, (comm.rank + 1) % comm.size)
    comm.recv(after, (comm.rank - 1) % comm.size)
    sent.wait()
    return before, after


SCENES = (
    Scene(
        "broadcast",
        "rank 0's numbers go to every rank",
        "from 0",
        lambda comm: _in_place(_moved(comm, 3), comm.broadcast),
    ),
    Scene(
        "scatter",
        "part r of rank 0's numbers goes to rank r",
        "from 0",
        lambda comm: _into(_empty(1), _at_root(comm, _moved(comm, comm.size)), comm.scatter),
    ),
    Scene(
        "gather",
        "every rank's number goes to rank 0, in rank order",
        "to 0",
        lambda comm: _into(_at_root(comm, _empty(comm.size)), _moved(comm, 1), comm.gather),
    ),
    Scene(
        "reduce (sum)",
        "the numbers are added up on rank 0; the others keep theirs",
        "to 0",
        lambda comm: _in_place(_counted(comm), comm.reduce),
    ),
    Scene(
        "all_gather",
        "every rank has every rank's number",
        "all",
        lambda comm: _into(_empty(comm.size), _moved(comm, 1), comm.all_gather),
    ),
    Scene(
        "all_reduce (sum)",
        "every rank has the sums",
        "all",
        lambda comm: _in_place(_counted(comm), comm.all_reduce),
    ),
    Scene(
        "reduce_scatter (sum)",
        "the first half of an all_reduce: rank r has sum r",
        "all",
        lambda comm: _into(_empty(1), _counted(comm), comm.reduce_scatter),
    ),
    Scene(
        "all_gather of these sums",
        "the second half: the all_reduce again",
        "all",
        _gather_again,
    ),
    Scene(
        "all_to_all",
        "part j of rank i becomes part i of rank j",
        "all",
        lambda comm: _into(_empty(comm.size), _moved(comm, comm.size), comm.all_to_all),
    ),
    Scene(
        "send and recv around a ring",
        "every rank to the next, the last to the first",
        "ring",
        _ring,
    ),
)


def _numbers(tensor: Array | None) -> Numbers:
    return () if tensor is None else tuple(tensor.tolist())
