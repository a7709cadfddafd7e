"""How long a schedule takes on a topology, and what it keeps busy.

The model. A rank begins a step when it is done with its messages of the step before. A message
then passes, one after the other, its sender's port, its node's card and the other node's card if
it leaves the node, and its receiver's port. Each of them serves one message at a time, first come
first served, messages of an earlier step first; bytes flow through all of them at once, so that
the slowest counts; the latency comes on top, once. Sending is over when the last byte has left
the port; receiving when the last byte is in and, in a reduction, the receiver has added it.
Receivers have room for what comes early. Queues can be lucky: where ranks share a card, a message
that comes later than before may leave it to one that is waited for (Graham's anomalies, 1969).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono.plan.schedule import Schedule, Step
from unisono.plan.topology import Topology

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]

# Up to this many (steps x ranks) it is remembered what every rank waited for in every step.
_REMEMBERED = 4_000_000


@dataclass(frozen=True)
class Hop:
    """A part of the critical path: a message, or a rank's own sending (source = destination)."""

    step: int
    source: int
    destination: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class LinkUse:
    """What went through one direction of a port or a card."""

    name: str
    bytes: float
    busy_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """What happens when `schedule` moves a tensor of `total_bytes` on `topology`.

    `finish_s` is when each rank is done, `time_s` when the last one is. `critical_path` is the
    longest chain of messages, first hop first; it is empty where the schedule is too
    large to remember (steps x ranks above four million). `sending_s`, `receiving_s` and
    `reducing_s` say how long each rank was busy with what.
    """

    schedule: Schedule
    topology: Topology
    total_bytes: float
    time_s: float
    finish_s: Seconds
    critical_path: tuple[Hop, ...]
    sending_s: Seconds
    receiving_s: Seconds
    reducing_s: Seconds
    _parts: _Parts = field(repr=False)
    _busy_s: Seconds = field(repr=False)
    _bytes: Seconds = field(repr=False)

    @property
    def links(self) -> Iterator[LinkUse]:
        """Every port and card, each direction by itself."""
        for index, name in enumerate(self._parts.names()):
            yield LinkUse(name, float(self._bytes[index]), float(self._busy_s[index]))

    @property
    def busiest_link(self) -> LinkUse:
        """The port or card that was busy for longest."""
        end = self._parts.reducer
        return list(self.links)[int(np.argmax(self._busy_s[:end]))]


def simulate(
    schedule: Schedule,
    topology: Topology,
    total_bytes: float,
    *,
    slow_ranks: Mapping[int, float] | None = None,
    slow_links: Mapping[str, float] | None = None,
    late_s: Mapping[int, float] | None = None,
) -> Timeline:
    """Simulate `schedule` on `topology`, with a tensor of `total_bytes`.

    `slow_ranks` maps ranks to how many times longer their overhead and their adding take;
    `slow_links` maps "rank 3" (its port) or "node 2 card 0" to how many times less bandwidth they
    have; `late_s` maps ranks to how much later they begin. Raises ValueError for ranks and links
    that are not there.
    """
    if total_bytes < 0:
        raise ValueError(f"a tensor cannot have {total_bytes} bytes")
    parts = _Parts(schedule.ranks, topology)
    slowness = parts.slowness(slow_ranks or {}, slow_links or {})
    simulation = _Simulation(schedule, topology, parts, slowness, schedule.chunk_bytes(total_bytes))
    for rank, seconds in (late_s or {}).items():
        parts.check_rank(rank)
        simulation.ready[rank] += seconds
    for phase in schedule.phases:
        if phase.turn:
            for time in range(phase.times):
                simulation.run(schedule.at(phase, time), 1)
        else:
            simulation.run(phase.step, phase.times)
    return simulation.timeline(total_bytes)


class _Parts:
    """Where each port, card and adding unit stands in the arrays of the simulation."""

    def __init__(self, ranks: int, topology: Topology) -> None:
        self.ranks, self.topology = ranks, topology
        self.cards = topology.nodes(ranks) * topology.cards
        self.out, self.into = 0, ranks
        self.card_out, self.card_into = 2 * ranks, 2 * ranks + self.cards
        self.reducer = 2 * ranks + 2 * self.cards
        self.total = self.reducer + ranks

    def card_of(self, rank: Indices) -> Indices:
        size, cards = self.topology.node_size, self.topology.cards
        return rank // size * cards + rank % size * cards // size

    def names(self) -> Iterator[str]:
        for way in ("out", "in"):
            yield from (f"rank {rank} {way}" for rank in range(self.ranks))
        for way in ("out", "in"):
            for card in range(self.cards):
                node, number = divmod(card, self.topology.cards)
                yield f"node {node} card {number} {way}"

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not among {self.ranks} ranks")

    def slowness(self, ranks: Mapping[int, float], links: Mapping[str, float]) -> Seconds:
        """How many times longer each part takes; the last `ranks` entries are the ranks."""
        slow = np.ones(self.total)
        for rank, factor in ranks.items():
            self.check_rank(rank)
            slow[self.reducer + rank] = factor
        for name, factor in links.items():
            match = re.fullmatch(r"rank (\d+)|node (\d+) card (\d+)", name)
            if match is None:
                raise ValueError(f"{name!r} is not a link: write 'rank 3' or 'node 2 card 0'")
            if match[1] is not None:
                self.check_rank(int(match[1]))
                both = [self.out + int(match[1]), self.into + int(match[1])]
            else:
                card = int(match[2]) * self.topology.cards + int(match[3])
                if int(match[3]) >= self.topology.cards or card >= self.cards:
                    raise ValueError(f"there is no {name}")
                both = [self.card_out + card, self.card_into + card]
            slow[both] = factor
        if not np.all(slow > 0):
            raise ValueError("a factor of slowness must be more than 0")
        return slow


@dataclass(frozen=True)
class _Stage:
    """The parts that some messages pass, how long each is busy, and whether each has its own."""

    part: Indices
    at: Indices | slice
    busy_s: Seconds
    alone: bool

    @classmethod
    def of(cls, part: Indices, busy_s: Seconds) -> _Stage:
        alone = len(part) == 0 or int(np.bincount(part).max()) == 1
        return cls(part, _as_slice(part), busy_s, alone)

    def serve(self, begin: Seconds, free: Seconds) -> Seconds:
        """When each message begins to pass, where it could from `begin`; moves `free` on."""
        if self.alone:
            begin = np.maximum(begin, free[self.at])
            free[self.at] = begin + self.busy_s
            return begin
        order = np.lexsort((begin, self.part))  # by part, then time; stable, so then as listed
        part = self.part[order]
        starts = np.flatnonzero(np.append(True, part[1:] != part[:-1]))
        length = np.diff(np.append(starts, len(part)))
        begin = begin.copy()
        for position in range(int(length.max())):
            turn = order[starts[length > position] + position]
            begin[turn] = np.maximum(begin[turn], free[self.part[turn]])
            free[self.part[turn]] = begin[turn] + self.busy_s[turn]
        return begin


def _as_slice(index: Indices) -> Indices | slice:
    """The same indices as a slice, which NumPy is much faster with, if they follow each other."""
    if len(index) and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


class _Messages:
    """The messages of a step: transfers between the same two ranks travel together."""

    def __init__(
        self, step: Step, topology: Topology, parts: _Parts, slow: Seconds, chunk_bytes: float
    ) -> None:
        pair = step.source * parts.ranks + step.destination
        unique, first, index = np.unique(pair, return_index=True, return_inverse=True)
        order = np.argsort(first)  # as listed
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        self.source, self.destination = np.divmod(unique[order], parts.ranks)
        self.source_at = _as_slice(self.source)
        chunks = np.bincount(position[index], step.count)
        added = np.bincount(position[index], step.count * step.reduces)
        self.bytes = chunks * chunk_bytes
        rank_slow = slow[parts.reducer :]
        port = self.bytes / topology.inside_bytes_per_s
        out, into = parts.out + self.source, parts.into + self.destination
        self.overhead = topology.overhead_s * rank_slow[self.source]
        self.wait_in = topology.overhead_s * rank_slow[self.destination]
        self.sending = _Stage.of(out, self.overhead + port * slow[out])
        self.receiving = _Stage.of(into, self.wait_in + port * slow[into])
        away = self.source // topology.node_size != self.destination // topology.node_size
        self.crossing = np.flatnonzero(away)
        self.latency = np.where(away, topology.between_latency_s, topology.inside_latency_s)
        card = self.bytes[away] / topology.card_bytes_per_s
        leave = parts.card_out + parts.card_of(self.source[away])
        enter = parts.card_into + parts.card_of(self.destination[away])
        self.leaving = _Stage.of(leave, card * slow[leave])
        self.entering = _Stage.of(enter, card * slow[enter])
        self.adding = np.flatnonzero(added > 0)
        adder = parts.reducer + self.destination[self.adding]
        add = added[self.adding] * chunk_bytes / topology.reduce_bytes_per_s
        self.reducing = _Stage.of(adder, add * slow[adder])

    def pass_on(self, ready: Seconds, free: Seconds) -> tuple[Seconds, Seconds, Seconds]:
        """When each message has left, has arrived, and has been dealt with."""
        begin = self.sending.serve(ready[self.source_at], free)
        left = begin + self.sending.busy_s
        head, tail = begin + self.latency, left + self.latency
        if len(self.crossing):
            at = self.crossing
            head_out = self.leaving.serve(begin[at] + self.overhead[at], free)
            tail_out = np.maximum(head_out + self.leaving.busy_s, left[at])
            head_in = self.entering.serve(head_out + self.latency[at], free)
            tail_in = np.maximum(head_in + self.entering.busy_s, tail_out + self.latency[at])
            head[at], tail[at] = head_in - self.wait_in[at], tail_in
        head = self.receiving.serve(head, free)
        arrived = np.maximum(head + self.receiving.busy_s, tail)
        done = arrived
        if len(self.adding):
            at = self.adding
            begin = np.maximum(arrived[at], ready[self.destination[at]])
            done = arrived.copy()
            done[at] = self.reducing.serve(begin, free) + self.reducing.busy_s
        return left, arrived, done


class _Simulation:
    """The state of a simulation between two steps."""

    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        parts: _Parts,
        slowness: Seconds,
        chunk_bytes: float,
    ) -> None:
        self.schedule, self.topology, self.parts = schedule, topology, parts
        self.slowness, self.chunk_bytes = slowness, chunk_bytes
        self.ready = np.full(schedule.ranks, topology.call_s)
        self.free = np.zeros(parts.total)
        self.busy_s, self.bytes = np.zeros(parts.total), np.zeros(parts.total)
        self.remembers = schedule.rounds * schedule.ranks <= _REMEMBERED
        self.past: list[tuple[Seconds, Indices]] = []

    def run(self, step: Step, times: int) -> None:
        """A step, taken `times` times."""
        messages = _Messages(step, self.topology, self.parts, self.slowness, self.chunk_bytes)
        self._count(messages, times)
        if self.remembers or times == 1:
            for _ in range(times):
                self._take(messages)
            return
        # Where everything is later by the same time after a round of the nodes, it will be so
        # after every further one: the rest need not be simulated.
        size = self.topology.node_size
        period = size if size < self.schedule.ranks else 1
        left = times
        while left:
            before_ready, before_free = self.ready, self.free.copy()
            for _ in range(min(period, left)):
                self._take(messages)
            left -= min(period, left)
            rounds = left // period
            later = self.ready - before_ready
            used = self.free > before_free
            shifts = np.concatenate([later, (self.free - before_free)[used]])
            if rounds and np.ptp(shifts) <= 1e-9 * shifts.max():
                self.ready = self.ready + later[0] * rounds
                self.free[used] += later[0] * rounds
                left -= rounds * period

    def _take(self, messages: _Messages) -> None:
        before = self.ready
        left, arrived, done = messages.pass_on(before, self.free)
        ready = before.copy()
        if messages.sending.alone and messages.receiving.alone:
            at = messages.source_at
            ready[at] = np.maximum(ready[at], left)
            ready[messages.destination] = np.maximum(ready[messages.destination], done)
        else:
            np.maximum.at(ready, messages.source, left)
            np.maximum.at(ready, messages.destination, done)
        self.ready = ready
        if self.remembers:
            cause = np.arange(len(ready), dtype=np.int64)
            to = messages.destination
            last = (done == ready[to]) & (arrived >= before[to])
            cause[to[last]] = messages.source[last]
            self.past.append((before, cause))

    def _count(self, messages: _Messages, times: int) -> None:
        crossing = messages.bytes[messages.crossing]
        stages = (
            (messages.sending, messages.bytes),
            (messages.receiving, messages.bytes),
            (messages.leaving, crossing),
            (messages.entering, crossing),
            (messages.reducing, messages.bytes[messages.adding]),
        )
        for stage, amount in stages:
            np.add.at(self.busy_s, stage.part, stage.busy_s * times)
            np.add.at(self.bytes, stage.part, amount * times)

    def timeline(self, total_bytes: float) -> Timeline:
        parts = self.parts
        return Timeline(
            schedule=self.schedule,
            topology=self.topology,
            total_bytes=total_bytes,
            time_s=float(self.ready.max()),
            finish_s=self.ready,
            critical_path=tuple(reversed(list(self._backwards()))),
            sending_s=self.busy_s[parts.out : parts.into],
            receiving_s=self.busy_s[parts.into : parts.card_out],
            reducing_s=self.busy_s[parts.reducer :],
            _parts=parts,
            _busy_s=self.busy_s,
            _bytes=self.bytes,
        )

    def _backwards(self) -> Iterator[Hop]:
        """From the last rank to finish back to the first message on its way."""
        rank, end = int(np.argmax(self.ready)), self.ready
        for step in reversed(range(len(self.past))):
            before, cause = self.past[step]
            source = int(cause[rank])
            if source != rank or end[rank] > before[rank]:
                yield Hop(step, source, rank, float(before[source]), float(end[rank]))
            rank, end = source, before
