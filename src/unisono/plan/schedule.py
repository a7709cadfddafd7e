"""A collective algorithm as data: who sends which chunk to whom, at which step.

docs/schedules.md defines what a schedule means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.cases.primitives import PRIMITIVES, Primitive
from unisono.errors import name_number

Action = Literal["copy", "reduce"]

COLLECTIVES = tuple(PRIMITIVES)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """`count` chunks, starting at `chunk`, go from `source` to `destination`. `action` says whether
    they are added to what is there ("reduce") or replace it ("copy"). See also `Schedule`.

    >>> from unisono import plan
    >>> print(plan.Transfer(0, 1, 3, "reduce"))
    0 +> 1 c3
    """

    source: int
    destination: int
    chunk: int
    action: Action
    count: int = 1

    def __str__(self) -> str:
        arrow = "+>" if self.action == "reduce" else "->"
        return f"{self.source} {arrow} {self.destination} {self.chunk_name}"

    @property
    def chunk_name(self) -> str:
        """ "c3", or "c3-5" for several chunks."""
        last = self.chunk + self.count - 1
        return f"c{self.chunk}" if self.count == 1 else f"c{self.chunk}-{last}"


@dataclass(frozen=True, eq=False)
class Step:
    """Transfers that happen together, as arrays of one length: `count` chunks, starting at `chunk`,
    go from `source` to `destination` and are added where `reduces`. Iterating gives `Transfer`s.

    >>> from unisono import plan
    >>> [str(transfer) for transfer in plan.Step.of([0, 1], [1, 0], 0, "copy")]
    ['0 -> 1 c0', '1 -> 0 c0']
    """

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    chunk: NDArray[np.int64]
    reduces: NDArray[np.bool_]
    count: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        source: ArrayLike,
        destination: ArrayLike,
        chunk: ArrayLike,
        action: Action | ArrayLike,
        count: ArrayLike = 1,
    ) -> Step:
        """A step from columns; a single value is repeated.

        `action` is "copy" or "reduce" for all, or a column of booleans: True means reduce.
        """
        if isinstance(action, str):
            if action not in ("copy", "reduce"):
                raise ValueError(f"the action must be copy or reduce, not {action!r}")
            action = action == "reduce"
        columns = np.broadcast_arrays(
            *(np.asarray(values, np.int64) for values in (source, destination, chunk, count)),
            np.asarray(action, np.bool_),
        )
        if columns[0].ndim > 1:
            raise ValueError("the columns of a step must have one dimension")
        source, destination, chunk, count, reduces = (np.array(each, ndmin=1) for each in columns)
        for values in (source, destination, chunk, count, reduces):
            values.setflags(write=False)
        return cls(source, destination, chunk, reduces, count)

    @classmethod
    def wrapping(
        cls,
        source: ArrayLike,
        destination: ArrayLike,
        chunk: ArrayLike,
        action: Action,
        count: ArrayLike,
        *,
        chunks: int,
    ) -> Step:
        """Like `of`, but chunks past the last of `chunks` chunks wrap around to the first."""
        step = cls.of(source, destination, chunk, action, count)
        over = step.chunk + step.count - chunks
        wraps = over > 0
        return cls.of(
            np.append(step.source, step.source[wraps]),
            np.append(step.destination, step.destination[wraps]),
            np.append(step.chunk, np.zeros(wraps.sum(), np.int64)),
            action,
            np.append(np.where(wraps, step.count - over, step.count), over[wraps]),
        )

    @classmethod
    def listing(cls, transfers: Iterable[tuple[int, int, int, Action] | Transfer]) -> Step:
        """A step from transfers: `(source, destination, chunk, action)` or `Transfer`s."""
        rows = [row if isinstance(row, Transfer) else Transfer(*row) for row in transfers]
        for row in rows:
            if row.action not in ("copy", "reduce"):
                raise ValueError(f"the action must be copy or reduce, not {row.action!r}")
        return cls.of(
            [row.source for row in rows],
            [row.destination for row in rows],
            [row.chunk for row in rows],
            [row.action == "reduce" for row in rows],
            [row.count for row in rows],
        )

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Transfer]:
        for source, destination, chunk, reduces, count in zip(*self.columns(), strict=True):
            yield Transfer(source, destination, chunk, "reduce" if reduces else "copy", count)

    def columns(self) -> tuple[list[int], list[int], list[int], list[bool], list[int]]:
        """The arrays as lists: source, destination, chunk, reduces, count."""
        return (
            self.source.tolist(),
            self.destination.tolist(),
            self.chunk.tolist(),
            self.reduces.tolist(),
            self.count.tolist(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.columns() == other.columns()

    def __hash__(self) -> int:
        return hash((self.source.tobytes(), self.destination.tobytes(), self.chunk.tobytes()))

    def __str__(self) -> str:
        return ", ".join(map(str, self))


@dataclass(frozen=True)
class Phase:
    """A `step`, or a step repeated `times` times in a regular way: the compact form.

    Each time every destination grows by `turn`, modulo the number of ranks, and every chunk moves
    on by `shift` inside its own block of `within` chunks, and wraps around there. `step` is the
    first.

    >>> from unisono import plan
    >>> [phase.times for phase in plan.find("all_reduce", "ring").schedule(8).phases]
    [7, 7]
    """

    step: Step
    times: int = 1
    shift: int = 0
    within: int = 1
    turn: int = 0


@dataclass(frozen=True)
class Schedule:
    """A collective on `ranks` ranks as a sequence of steps: `phases` is what is stored, `steps`
    what happens. `collective` and `algorithm` are names, `chunks` is the number of chunks that the
    tensor is cut into, `root` the root rank of collectives that have one.

    Raises ValueError for transfers from or to ranks or chunks that do not exist, or from a rank to
    itself. `verify` checks that it does what the collective guarantees.

    >>> from unisono import plan
    >>> step = plan.Step.of([0, 1], [1, 0], 0, "reduce")
    >>> schedule = plan.Schedule.from_steps("all_reduce", "exchange", 2, 1, [step])
    >>> plan.verify(schedule)
    >>> schedule.rounds
    1
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    phases: tuple[Phase, ...] = field(repr=False)
    root: int = 0

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"there is no collective {self.collective!r}, only {known}")
        if self.ranks < 1:
            raise ValueError(f"a schedule needs at least one rank, not {self.ranks}")
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root {self.root} is not among {self.ranks} ranks")
        if self.root and not self.primitive.is_rooted:
            raise ValueError(f"{self.collective} has no root")
        if self.chunks < 1 or self.chunks % self.blocks:
            raise ValueError(
                f"{self.collective} on {self.ranks} ranks needs a multiple of {self.blocks} "
                f"chunks, not {self.chunks}"
            )
        for phase in self.phases:
            self._check(phase)

    @classmethod
    def from_steps(
        cls,
        collective: str,
        algorithm: str,
        ranks: int,
        chunks: int,
        steps: Iterable[Step | Phase | Iterable[tuple[int, int, int, Action] | Transfer]],
        root: int = 0,
    ) -> Schedule:
        """A schedule from steps, phases, or lists of transfers; empty steps are left out."""
        phases = []
        for step in steps:
            if isinstance(step, Phase):
                phase = step
            else:
                phase = Phase(step if isinstance(step, Step) else Step.listing(step))
            if len(phase.step) and phase.times:
                phases.append(phase)
        return cls(collective, algorithm, ranks, chunks, tuple(phases), root)

    @property
    def primitive(self) -> Primitive:
        """What holds of its collective."""
        return PRIMITIVES[self.collective]

    # --- what happens ----------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """How many steps there are."""
        return sum(phase.times for phase in self.phases)

    @property
    def steps(self) -> Sequence[Step]:
        """Every step; built when you ask for it."""
        return _Steps(self)

    def at(self, phase: Phase, time: int) -> Step:
        """The step that `phase` takes the `time`-th time, counted from 0."""
        step = phase.step
        if time == 0 or (phase.shift == 0 and phase.turn == 0):
            return step
        offset = step.chunk % phase.within
        chunk = step.chunk - offset + (offset + phase.shift * time) % phase.within
        destination = step.destination
        if phase.turn:
            destination = (destination + phase.turn * time) % self.ranks
        return Step(step.source, destination, chunk, step.reduces, step.count)

    # --- how much is moved -----------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """How many equal parts the collective itself cuts its data into; it divides `chunks`."""
        return int(self.ranks ** len(self.primitive.wide))

    def chunk_bytes(self, total_bytes: float) -> float:
        """The size of a chunk if the whole tensor (docs/schedules.md) has `total_bytes`."""
        if self.collective == "barrier":
            return 0.0
        tensors = self.ranks if self.collective == "all_to_all" else 1
        return total_bytes * tensors / self.chunks

    def chunks_sent(self) -> NDArray[np.int64]:
        """How many chunks each rank sends."""
        sent = np.zeros(self.ranks, np.int64)
        for step, times in self.counted():
            np.add.at(sent, step.source, step.count * times)
        return sent

    def counted(self) -> Iterator[tuple[Step, int]]:
        """Steps, each with how often it repeats between the same sources and destinations."""
        for phase in self.phases:
            if phase.turn:
                yield from ((self.at(phase, time), 1) for time in range(phase.times))
            else:
                yield phase.step, phase.times

    # --- as text ---------------------------------------------------------------------------

    def __str__(self) -> str:
        """Step by step, who sends what to whom: `step 0: 0 +> 1 c3, 1 +> 2 c0`."""
        steps = (f"step {number}: {step}" for number, step in enumerate(self.steps))
        return "\n".join([self.title(), *steps])

    def title(self) -> str:
        """The schedule in one line."""
        root = f", root {self.root}" if self.primitive.is_rooted else ""
        return (
            f"{self.collective} by {self.algorithm}: {name_number(self.ranks, 'rank')}, "
            f"{name_number(self.chunks, 'chunk')}, {name_number(self.rounds, 'step')}{root}"
        )

    def _repr_html_(self) -> str:
        """A notebook shows the schedule animated (docs/schedules.md)."""
        from unisono.plan.player import schedule_frame

        return schedule_frame(self)

    def to_json(self) -> str:
        """The schedule as JSON, which other programs and `from_json` can read."""
        names = ("source", "destination", "chunk", "reduces", "count")
        phases = [
            dict(zip(names, phase.step.columns(), strict=True))
            | {name: getattr(phase, name) for name in ("times", "shift", "within", "turn")}
            for phase in self.phases
        ]
        fields = ("collective", "algorithm", "ranks", "chunks", "root")
        return json.dumps({name: getattr(self, name) for name in fields} | {"phases": phases})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote as `text`. Raises ValueError for anything else."""
        try:
            parts = json.loads(text)
            names = ("source", "destination", "chunk", "reduces", "count")
            phases = tuple(
                Phase(Step.of(*(phase.pop(name) for name in names)), **phase)
                for phase in parts.pop("phases")
            )
            return cls(**parts, phases=phases)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the text is not a schedule in JSON: {error!r}") from error

    # --- invalid schedules -----------------------------------------------------------------

    def _check(self, phase: Phase) -> None:
        step = phase.step
        within, shift = phase.within, phase.shift
        if phase.times < 1:
            raise ValueError(f"a phase must happen at least once, not {phase.times} times")
        if len(step) == 0:
            return
        if shift and (within < 1 or self.chunks % within):
            raise ValueError(f"{self.chunks} chunks cannot be divided into blocks of {within}")
        if shift and any(np.any(each % step.count) for each in (step.chunk, shift, within)):
            raise ValueError("chunks that move together must stay together when they are shifted")
        for name in ("source", "destination"):
            ranks = getattr(step, name)
            if ranks.min() < 0 or ranks.max() >= self.ranks:
                bad = next(t for t in step if not 0 <= getattr(t, name) < self.ranks)
                raise ValueError(f"{bad}: its {name} is not among {self.ranks} ranks")
        ends = step.chunk + step.count
        if step.chunk.min() < 0 or step.count.min() < 1 or ends.max() > self.chunks:
            bad = next(
                t for t in step if t.chunk < 0 or t.count < 1 or t.chunk + t.count > self.chunks
            )
            raise ValueError(f"{bad}: not all of these chunks are among {self.chunks} chunks")
        distance = (step.destination - step.source) % self.ranks
        for time in range(phase.times if phase.turn else 1):
            alone = np.flatnonzero((distance + phase.turn * time) % self.ranks == 0)
            if len(alone):
                rank, chunk = step.source[alone[0]], step.chunk[alone[0]]
                raise ValueError(f"rank {rank} would send chunk {chunk} to itself")


class _Steps(Sequence[Step]):
    """The steps of a schedule, built one at a time."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __len__(self) -> int:
        return self._schedule.rounds

    def __iter__(self) -> Iterator[Step]:
        for phase in self._schedule.phases:
            for time in range(phase.times):
                yield self._schedule.at(phase, time)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        for phase in self._schedule.phases:
            if 0 <= number < phase.times:
                return self._schedule.at(phase, number)
            number -= phase.times
        raise IndexError(f"step {index} is not among {len(self)} steps")
