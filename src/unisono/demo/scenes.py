"""The primitives on real ranks, on numbers that a reader can follow; then two faulty programs. A
rank returns what its tensors held before and after, and the process that draws checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from unisono.comm.communicator import Communicator
from unisono.errors import GroupError, UnisonoError
from unisono.plan.expectations import CUT_INPUTS, Array, compute, origins
from unisono.world.world import init, shutdown

Numbers = tuple[float, ...]
BeforeAndAfter = tuple[Array | None, Array | None]
Run = Callable[[Communicator], BeforeAndAfter]
OWNER = 10
"""Where data only moves, a number's tens are its owner: 23 is number 3 of rank 2."""

DEADLOCK = """\
other = 1 - group.rank
group.send(numbers, other)
group.recv(numbers, other)
"""
MISMATCH = """\
last = group.rank == group.size - 1
group.all_reduce(numbers[:5] if last else numbers[:4])
"""


@dataclass(frozen=True)
class Scene:
    """One primitive, whose `title` begins with its name. `flow` says how data moves: "from 0",
    "to 0", "all", "ring"; `run` makes the call."""

    title: str
    sentence: str
    flow: str
    run: Run

    @property
    def adds(self) -> bool:
        return self.title.endswith("(sum)")


@dataclass(frozen=True)
class RankOutcome:
    """What one rank saw: before and after of each scene, and the faults' errors."""

    rows: tuple[tuple[Numbers, Numbers], ...]
    deadlock: GroupError | None
    mismatch: GroupError | None


def run_all_scenes() -> RankOutcome:
    """Run by every rank: all scenes, then two faults."""
    try:
        return run_scenes(init("unisono", with_torch=False))
    finally:
        shutdown()


def run_scenes(comm: Communicator) -> RankOutcome:
    """All scenes on this group; each fault on its own group."""
    seen = [scene.run(comm) for scene in SCENES]
    return RankOutcome(
        tuple((_numbers(before), _numbers(after)) for before, after in seen),
        _error_of(comm.split([0, 1]), DEADLOCK, "both_send.py"),
        _error_of(comm.split(range(comm.size)), MISMATCH, "one_too_many.py"),
    )


def _error_of(group: Communicator | None, program: str, name: str) -> GroupError | None:
    """What a program raises; None if this rank is not in the group. It runs as shown, so that the
    line numbers of its error fit."""
    if group is None:
        return None
    try:
        with group:
            exec(compile(program, name, "exec"), {"group": group, "numbers": numpy.zeros(5)})
    except GroupError as error:
        return error
    return None


def check(outcomes: Sequence[RankOutcome]) -> None:
    """Raise UnisonoError unless every rank has the right numbers, and every fault was found."""
    for number, scene in enumerate(SCENES):
        name = "ring" if scene.flow == "ring" else scene.title.split()[0]
        expected = _expected(name, [outcome.rows[number][0] for outcome in outcomes])
        for rank, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
            got = outcome.rows[number][1]
            if got != right:
                raise UnisonoError(
                    f"{scene.title}: rank {rank} has {list(got)} but should have {list(right)}"
                )
    for rank, outcome in enumerate(outcomes):
        if outcome.mismatch is None or (outcome.deadlock is None and rank < 2):
            raise UnisonoError(f"a fault: rank {rank} should have an error")


def _expected(collective: str, had: Sequence[Numbers]) -> list[Numbers]:
    """What each rank must have afterwards; what it had, or no tensor, if it gets nothing."""

    def brought(rank: int, part: int) -> Array:
        numbers = numpy.array(had[rank])
        return numbers[part : part + 1] if collective in CUT_INPUTS else numbers

    rows: list[Numbers] = []
    for rank in range(len(had)):
        parts = origins(collective, rank, len(had))
        if parts is None:
            rows.append(had[rank] if collective == "reduce" else ())
        else:
            rows.append(_numbers(numpy.concatenate([compute(part, brought) for part in parts])))
    return rows


def _numbers(tensor: Array | None) -> Numbers:
    return () if tensor is None else tuple(tensor.tolist())


# -- the scenes ------------------------------------------------------------------------------------


def _moved(comm: Communicator, count: int) -> Array:
    """This rank's numbers 0, 1, ... under its own tens."""
    return numpy.arange(count, dtype=numpy.float32) + OWNER * comm.rank


def _counted(comm: Communicator) -> Array:
    """[0, 1, 2, ...] + rank: on four ranks the sum is [6, 10, 14, 18]."""
    return numpy.arange(comm.size, dtype=numpy.float32) + comm.rank


def _empty(count: int) -> Array:
    return numpy.full(count, -1, numpy.float32)


def _in_place(before: Array, call: Callable[[Array], object]) -> BeforeAndAfter:
    after = before.copy()
    call(after)
    return before, after


def _into(after: Any, before: Any, call: Callable[[Any, Any], object]) -> BeforeAndAfter:
    call(after, before)
    return before, after


SCENES: list[Scene] = []


def _scene(title: str, sentence: str, flow: str) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        SCENES.append(Scene(title, sentence, flow, run))
        return run

    return add


@_scene("broadcast", "rank 0's numbers go to every rank", "from 0")
def _broadcast(comm: Communicator) -> BeforeAndAfter:
    return _in_place(_moved(comm, 3), comm.broadcast)


@_scene("scatter", "part r of rank 0's numbers goes to rank r", "from 0")
def _scatter(comm: Communicator) -> BeforeAndAfter:
    return _into(_empty(1), None if comm.rank else _moved(comm, comm.size), comm.scatter)


@_scene("gather", "every rank's number goes to rank 0, in rank order", "to 0")
def _gather(comm: Communicator) -> BeforeAndAfter:
    return _into(None if comm.rank else _empty(comm.size), _moved(comm, 1), comm.gather)


@_scene("reduce (sum)", "the numbers are added up on rank 0; the others keep theirs", "to 0")
def _reduce(comm: Communicator) -> BeforeAndAfter:
    return _in_place(_counted(comm), comm.reduce)


@_scene("all_gather", "every rank has every rank's number", "all")
def _all_gather(comm: Communicator) -> BeforeAndAfter:
    return _into(_empty(comm.size), _moved(comm, 1), comm.all_gather)


@_scene("all_reduce (sum)", "every rank has the sums", "all")
def _all_reduce(comm: Communicator) -> BeforeAndAfter:
    return _in_place(_counted(comm), comm.all_reduce)


@_scene("reduce_scatter (sum)", "the first half of an all_reduce: rank r has sum r", "all")
def _reduce_scatter(comm: Communicator) -> BeforeAndAfter:
    return _into(_empty(1), _counted(comm), comm.reduce_scatter)


@_scene("all_gather of these sums", "the second half: the all_reduce again", "all")
def _gather_again(comm: Communicator) -> BeforeAndAfter:
    _, part = _reduce_scatter(comm)
    return _into(_empty(comm.size), part, comm.all_gather)


@_scene("all_to_all", "part j of rank i becomes part i of rank j", "all")
def _all_to_all(comm: Communicator) -> BeforeAndAfter:
    return _into(_empty(comm.size), _moved(comm, comm.size), comm.all_to_all)


@_scene("send and recv around a ring", "every rank to the next, the last to the first", "ring")
def _ring(comm: Communicator) -> BeforeAndAfter:
    before, after = _moved(comm, 2), _empty(2)
    sent = comm.isend(before, comm.next)
    comm.recv(after, comm.prev)
    sent.wait()
    return before, after
