"""The primitives on real ranks, on numbers that a reader can follow; then two faulty programs. A
rank returns what its tensors held before and after, and the process that draws checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy

from unisono.cases.primitives import PRIMITIVES
from unisono.cases.results import Array, Example
from unisono.comm.communicator import Communicator
from unisono.errors import GroupError, UnisonoError
from unisono.world.world import init, shutdown

Numbers = tuple[float, ...]
BeforeAndAfter = tuple[Array | None, Array | None]
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
    "to 0", "all", "ring". Each part of a tensor has `count` numbers; 0: one for each rank."""

    title: str
    sentence: str
    flow: str
    count: int = 1

    @property
    def adds(self) -> bool:
        return self.title.endswith("(sum)")

    def example(self, size: int) -> Example:
        def sums(rank: int, index: Array) -> Array:
            return reduce(numpy.add, [_counted(source, index + rank) for source in range(size)])

        value = _counted if self.adds else sums if self.title.endswith("sums") else _moved
        return Example(PRIMITIVES[self.title.split()[0]], size, self.count or size, value)

    def run(self, comm: Communicator) -> BeforeAndAfter:
        if self.flow == "ring":
            return _pass_on(comm)
        example = self.example(comm.size)
        before, after = example.input(comm.rank), example.output(comm.rank)
        example.bind(comm, after, before)()
        return before, after

    def result(self, rank: int, size: int) -> Array | None:
        """What a rank must have afterwards."""
        if self.flow == "ring":
            return _moved((rank - 1) % size, numpy.arange(2))
        return self.example(size).result(rank)


def _moved(rank: int, index: Array) -> Array:
    """A rank's numbers 0, 1, ... under its own tens."""
    return (index + OWNER * rank).astype(numpy.float32)


def _counted(rank: int, index: Array) -> Array:
    """[0, 1, 2, ...] + rank: on four ranks the sum is [6, 10, 14, 18]."""
    return (index + rank).astype(numpy.float32)


def _pass_on(comm: Communicator) -> BeforeAndAfter:
    before = _moved(comm.rank, numpy.arange(2))
    sent = comm.isend(before, comm.next)
    comm.recv(after := numpy.full_like(before, -1), comm.prev)
    sent.wait()
    return before, after


SCENES = (
    Scene("broadcast", "rank 0's numbers go to every rank", "from 0", 3),
    Scene("scatter", "part r of rank 0's numbers goes to rank r", "from 0"),
    Scene("gather", "every rank's number goes to rank 0, in rank order", "to 0"),
    Scene("reduce (sum)", "the numbers are added up on rank 0; the others keep theirs", "to 0", 0),
    Scene("all_gather", "every rank has every rank's number", "all"),
    Scene("all_reduce (sum)", "every rank has the sums", "all", 0),
    Scene("reduce_scatter (sum)", "the first half of an all_reduce: rank r has sum r", "all"),
    Scene("all_gather of these sums", "the second half: the all_reduce again", "all"),
    Scene("all_to_all", "part j of rank i becomes part i of rank j", "all"),
    Scene("send and recv around a ring", "every rank to the next, the last to the first", "ring"),
)


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
        for rank, outcome in enumerate(outcomes):
            got, right = outcome.rows[number][1], _numbers(scene.result(rank, len(outcomes)))
            if got != right:
                raise UnisonoError(
                    f"{scene.title}: rank {rank} has {list(got)} but should have {list(right)}"
                )
    for rank, outcome in enumerate(outcomes):
        if outcome.mismatch is None or (outcome.deadlock is None and rank < 2):
            raise UnisonoError(f"a fault: rank {rank} should have an error")


def _numbers(tensor: Array | None) -> Numbers:
    return () if tensor is None else tuple(tensor.tolist())
