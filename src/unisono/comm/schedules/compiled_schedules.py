"""A schedule compiled for one rank: what it sends and receives, in order, verified once."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.plan.catalog import find_to_run
from unisono.plan.proof import verify
from unisono.plan.schedule import Schedule, Step

BUSIEST = 8192
"""How many chunks one rank may send another in a compiled schedule: UN_BUSIEST."""

_SEND, _COPY, _COMBINE = range(3)  # csrc/unisono.h's un_action


@dataclass(frozen=True, slots=True)
class Move:
    """`count` chunks, beginning with `chunk`, to or from `peer`."""

    peer: int
    chunk: int
    count: int
    reduces: bool


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank sends and receives in one step, in the order of the schedule."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True)
class CompiledSchedule:
    """One rank's part of a schedule: a round for each step, of which many may be empty.
    `fingerprint` is the same for equal schedules, on every rank. `busiest` is the largest number
    of chunks that any rank sends to any other one."""

    title: str
    chunks: int
    rounds: tuple[Round, ...]
    fingerprint: int
    busiest: int

    @property
    def receives(self) -> bool:
        return any(round.receives for round in self.rounds)

    def encode(self) -> bytes:
        """As the engine reads it (un_schedule_read in csrc/unisono.h)."""
        if self.busiest > BUSIEST:
            raise ValueError(
                f"{self.title} sends up to {self.busiest} chunks between two ranks, but the "
                f"engine's limit is {BUSIEST}: use unisono.run_schedule"
            )
        starts, moves = [0], []
        for round in self.rounds:
            moves += [(_SEND, move.peer, move.chunk, move.count) for move in round.sends]
            starts.append(len(moves))
            for move in round.receives:
                action = _COMBINE if move.reduces else _COPY
                moves.append((action, move.peer, move.chunk, move.count))
            starts.append(len(moves))
        head = [self.fingerprint, len(self.rounds), self.chunks, self.busiest]
        flat = [number for move in moves for number in move]
        return np.array(head + starts + flat, np.int64).tobytes()


def schedule_for(collective: str, algorithm: str | Schedule, ranks: int, root: int = 0) -> Schedule:
    """The schedule that `algorithm` stands for: a name of the catalog, or a schedule itself."""
    if isinstance(algorithm, str):
        entry = find_to_run(collective, algorithm)
        built = _built.get((entry.make, ranks, root))
        if built is None:
            built = _built[entry.make, ranks, root] = entry.schedule(ranks, root=root)
        return built
    if not isinstance(algorithm, Schedule):
        raise ValueError(f"algorithm= takes a name or a Schedule, not {type(algorithm).__name__}")
    if algorithm.collective != collective:
        raise ValueError(f"{algorithm.title()} is not a schedule for {collective}")
    if algorithm.ranks != ranks:
        raise ValueError(f"{algorithm.title()} does not fit this group of {ranks} ranks")
    if algorithm.root != root:
        raise ValueError(f"{algorithm.title()} does not fit this call, whose root is {root}")
    return algorithm


def compile_schedule(schedule: Schedule, rank: int) -> CompiledSchedule:
    """What `rank` does in `schedule`. Raises ScheduleError if the schedule is wrong: it is
    verified once for each schedule object."""
    compiled = _compiled.get(id(schedule))
    if compiled is None:
        verify(schedule)
        compiled = _compiled[id(schedule)] = {}
        weakref.finalize(schedule, _compiled.pop, id(schedule), None).atexit = False
    if rank not in compiled:
        compiled[rank] = _compile_for(schedule, rank)
    return compiled[rank]


_built: dict[tuple[Callable[..., Schedule], int, int], Schedule] = {}
_compiled: dict[int, dict[int, CompiledSchedule]] = {}


def _compile_for(schedule: Schedule, rank: int) -> CompiledSchedule:
    rounds = []
    sent = np.zeros(schedule.ranks**2, np.int64)
    for step in schedule.steps:
        np.add.at(sent, step.source * schedule.ranks + step.destination, step.count)
        sends = _moves(step, step.destination, step.source == rank)
        receives = _moves(step, step.source, step.destination == rank)
        rounds.append(Round(sends, receives))
    digest = hashlib.blake2b(schedule.to_json().encode(), digest_size=8).digest()
    return CompiledSchedule(
        schedule.title(),
        schedule.chunks,
        tuple(rounds),
        int.from_bytes(digest, "little", signed=True),
        int(sent.max()),
    )


def _moves(step: Step, peer: NDArray[np.int64], which: NDArray[np.bool_]) -> tuple[Move, ...]:
    columns = (peer, step.chunk, step.count, step.reduces)
    rows = zip(*(column[which].tolist() for column in columns), strict=True)
    return tuple(Move(*row) for row in rows)
