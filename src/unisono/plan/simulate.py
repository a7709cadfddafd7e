"""How long a schedule takes on a topology, and what it keeps busy: the model of docs/scale.md.

Messages of an earlier step are served first. A send ends when the last byte has left the port; a
receive ends when the last byte has arrived and, in a reduction, the receiver has added it.
Receivers buffer what arrives early. Where ranks share a card, a delay can save time: a message that
comes late lets another pass that a rank is waiting for (Graham's anomalies, 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.plan.schedule import Schedule, Step
from unisono.plan.topology import Topology

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]
# For a step's messages: source, destination, how long each occupies its sender's port; when each
# rank begins the step; when each message is done.
OnStep = Callable[[Indices, Indices, Seconds, Seconds, Seconds], None]


_ALIKE = 1e-9


@dataclass(frozen=True)
class LinkUse:
    name: str
    bytes: float
    busy_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The simulation of `schedule` with a tensor of `total_bytes` on `topology`.

    `finish_s` is when each rank is done, `time_s` when the last one is, `reducing_s` how long each
    rank was busy adding. See also `simulate`.

    >>> from unisono import plan
    >>> ring = plan.find("all_reduce", "ring").schedule(16)
    >>> timeline = plan.simulate(ring, plan.find_topology("h100"), 1 << 20)
    >>> timeline.time_s == max(timeline.finish_s.tolist())
    True
    """

    schedule: Schedule
    topology: Topology
    total_bytes: float
    time_s: float
    finish_s: Seconds
    reducing_s: Seconds
    _parts: Parts = field(repr=False)
    _busy_s: Seconds = field(repr=False)
    _bytes: Seconds = field(repr=False)

    @property
    def links(self) -> Iterator[LinkUse]:
        """Every port and card, each direction by itself."""
        for index, name in enumerate(self._parts.names()):
            yield LinkUse(name, float(self._bytes[index]), float(self._busy_s[index]))

    def most_bytes(self, kind: Literal["port", "card"]) -> float:
        """The bytes that went through the busiest direction of a port or card."""
        parts = self._parts
        begin, end = (0, parts.card_out) if kind == "port" else (parts.card_out, parts.reducer)
        return float(self._bytes[begin:end].max(initial=0.0))


def simulate(
    schedule: Schedule,
    topology: Topology,
    total_bytes: float,
    *,
    slow_ranks: Mapping[int, float] | None = None,
    late_s: Mapping[int, float] | None = None,
    on_step: OnStep | None = None,
) -> Timeline:
    """Simulate `schedule` on `topology`, with a tensor of `total_bytes`.

    `slow_ranks` maps ranks to the factor by which their overhead and their additions slow down,
    `late_s` maps ranks to how much later they begin. `on_step` is called for every step in order,
    repeated ones included. Raises ValueError for ranks that do not exist. See also `Timeline`,
    `costs`.

    >>> from unisono import plan
    >>> ring, h100 = plan.find("all_reduce", "ring").schedule(16), plan.find_topology("h100")
    >>> late = plan.simulate(ring, h100, 1 << 20, late_s={3: 0.001})
    >>> late.time_s > plan.simulate(ring, h100, 1 << 20).time_s
    True
    """
    if total_bytes < 0:
        raise ValueError(f"a tensor cannot have {total_bytes} bytes")
    simulation = _Simulation(schedule, topology, total_bytes, slow_ranks or {}, on_step)
    for rank, seconds in (late_s or {}).items():
        simulation.parts.check_rank(rank)
        simulation.ready[rank] += seconds
    for step, times in schedule.counted():
        simulation.run(step, times)
    return simulation.timeline()


class _Simulation:
    """The state of a simulation between two steps."""

    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        total_bytes: float,
        slow_ranks: Mapping[int, float],
        on_step: OnStep | None,
    ) -> None:
        self.schedule, self.topology, self.total_bytes = schedule, topology, total_bytes
        self.parts = parts = Parts(schedule.ranks, topology)
        self.slowness = parts.slowness(slow_ranks)
        self.ready = np.full(schedule.ranks, topology.call_s)
        self.free = np.zeros(parts.total)
        self.busy_s, self.bytes = np.zeros(parts.total), np.zeros(parts.total)
        self.latest: tuple[Step, Messages] | None = None
        self.on_step = on_step

    def run(self, step: Step, times: int) -> None:
        # A pipeline repeats a step with other chunks each time.
        if self.latest is None or not _same_but_for_chunks(step, self.latest[0]):
            chunk_bytes = self.schedule.chunk_bytes(self.total_bytes)
            made = Messages(step, self.topology, self.parts, self.slowness, chunk_bytes)
            self.latest = step, made
        messages = self.latest[1]
        self._count(messages, times)
        if self.on_step is not None:
            ends = messages.source, messages.destination
            for _ in range(times):
                before = self.ready.copy()
                done = messages.deliver(self.ready, self.free)
                self.on_step(*ends, messages.sending.busy_s, before, done)
            return
        size = self.topology.node_size
        self._repeat(messages, times, size if size < self.schedule.ranks else 1)

    def _repeat(self, messages: Messages, times: int, period: int) -> None:
        """Send the messages `times` times. Times only add up and wait for each other. So once
        everything has moved on by the same time after a `period` (the ranks of a node, for a ring
        over equal nodes), the rest is one multiplication."""
        left = times
        while left:
            before_ready, before_free = self.ready.copy(), self.free.copy()
            for _ in range(min(period, left)):
                messages.deliver(self.ready, self.free)
            left -= min(period, left)
            rounds = left // period
            later, used = self.ready - before_ready, self.free > before_free
            shifts = np.concatenate([later, (self.free - before_free)[used]])
            if rounds and np.ptp(shifts) <= _ALIKE * shifts.max():
                self.ready += later[0] * rounds
                self.free[used] += later[0] * rounds
                left -= rounds * period

    def _count(self, messages: Messages, times: int) -> None:
        crossing = messages.bytes[messages.crossing]
        stages = (
            (messages.sending, messages.bytes),
            (messages.receiving, messages.bytes),
            (messages.leaving, crossing),
            (messages.entering, crossing),
            (messages.reducing, messages.bytes[messages.adding]),
        )
        for stage, amount in stages:
            for counted, each in ((self.busy_s, stage.busy_s), (self.bytes, amount)):
                if stage.alone:
                    counted[stage.at] += each * times
                else:
                    np.add.at(counted, stage.part, each * times)

    def timeline(self) -> Timeline:
        return Timeline(
            schedule=self.schedule,
            topology=self.topology,
            total_bytes=self.total_bytes,
            time_s=float(self.ready.max()),
            finish_s=self.ready,
            reducing_s=self.busy_s[self.parts.reducer :],
            _parts=self.parts,
            _busy_s=self.busy_s,
            _bytes=self.bytes,
        )


def _same_but_for_chunks(one: Step, other: Step) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("source", "destination", "count", "reduces")
    )


# -- what messages pass: ports, cards and adding units, each one message at a time ---------------


class Parts:
    """The index of each port, card and adder in the arrays of the simulation."""

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
        for direction in ("out", "in"):
            yield from (f"rank {rank} {direction}" for rank in range(self.ranks))
        for direction in ("out", "in"):
            for card in range(self.cards):
                node, number = divmod(card, self.topology.cards)
                yield f"node {node} card {number} {direction}"

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not among {self.ranks} ranks")

    def slowness(self, ranks: Mapping[int, float]) -> Seconds:
        slow = np.ones(self.ranks)
        for rank, factor in ranks.items():
            self.check_rank(rank)
            if factor <= 0:
                raise ValueError(f"the factor of slow rank {rank} must be above 0, not {factor}")
            slow[rank] = factor
        return slow


@dataclass(frozen=True)
class Stage:
    """The parts that some messages pass, how long each message occupies its part, and whether each
    message has a part to itself."""

    part: Indices
    at: Indices | slice
    busy_s: Seconds
    alone: bool
    order: Indices
    """By part, then as listed."""
    starts: Indices
    """Where in `order` each part's messages begin."""

    @classmethod
    def of(cls, part: Indices, busy_s: Seconds) -> Stage:
        order = np.argsort(part, kind="stable")
        starts = np.flatnonzero(np.diff(part[order], prepend=-1))
        alone = len(starts) == len(part)
        return cls(part, _as_slice(part) if alone else part, busy_s, alone, order, starts)

    def serve(self, begin: Seconds, free: Seconds) -> Seconds:
        """When each message starts to pass, which it can from `begin`; updates `free`."""
        if self.alone:
            begin = np.maximum(begin, free[self.at])
            free[self.at] = begin + self.busy_s
            return begin
        order, starts = self.order, self.starts
        length = np.diff(starts, append=len(order))
        overtakes = np.diff(begin[order], prepend=-np.inf) < 0
        overtakes[starts] = False
        if overtakes.any():  # sort only these parts' messages: by time, then as listed
            where = np.flatnonzero(np.repeat(np.logical_or.reduceat(overtakes, starts), length))
            some = order[where]
            order = order.copy()
            order[where] = some[np.lexsort((begin[some], self.part[some]))]
        begin = begin.copy()
        for position in range(int(length.max())):
            turn = order[starts[length > position] + position]
            part = self.part[turn]
            begin[turn] = now = np.maximum(begin[turn], free[part])
            free[part] = now + self.busy_s[turn]
        return begin


def _as_slice(index: Indices) -> Indices | slice:
    """Consecutive indices as a slice, which is much faster in NumPy; others as they are."""
    if len(index) and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _all_differ(numbers: Indices) -> bool:
    if np.all(numbers[1:] > numbers[:-1]):
        return True
    in_order = np.sort(numbers)
    return bool(np.all(in_order[1:] > in_order[:-1]))


class Messages:
    """The messages of a step: transfers between the same two ranks travel together."""

    def __init__(
        self, step: Step, topology: Topology, parts: Parts, slow: Seconds, chunk_bytes: float
    ) -> None:
        self.source, self.destination = step.source, step.destination
        chunks = step.count.astype(float)
        added = chunks * step.reduces
        pair = step.source * parts.ranks + step.destination
        if not _all_differ(pair):
            unique, first, index = np.unique(pair, return_index=True, return_inverse=True)
            order = np.argsort(first)  # as listed
            position = np.empty_like(order)
            position[order] = np.arange(len(order))
            self.source, self.destination = np.divmod(unique[order], parts.ranks)
            chunks, added = (np.bincount(position[index], each) for each in (chunks, added))
        self.source_at = _as_slice(self.source)
        self.bytes = chunks * chunk_bytes
        away = self.source // topology.node_size != self.destination // topology.node_size
        self.crossing = np.flatnonzero(away)
        self.adding = np.flatnonzero(added > 0)
        self.overhead = topology.overhead_s * slow[self.source]
        self.wait_in = topology.overhead_s * slow[self.destination]
        self.latency = np.where(away, topology.between_latency_s, topology.inside_latency_s)
        port = self.bytes / topology.inside_bytes_per_s
        card = self.bytes[away] / topology.card_bytes_per_s
        add = added[self.adding] * chunk_bytes / topology.reduce_bytes_per_s
        out, into = parts.out + self.source, parts.into + self.destination
        card_out = parts.card_out + parts.card_of(self.source[away])
        card_into = parts.card_into + parts.card_of(self.destination[away])
        adder = self.destination[self.adding]
        self.sending = Stage.of(out, self.overhead + port)
        self.receiving = Stage.of(into, self.wait_in + port)
        self.leaving = Stage.of(card_out, card)
        self.entering = Stage.of(card_into, card)
        self.reducing = Stage.of(parts.reducer + adder, add * slow[adder])

    def deliver(self, ready: Seconds, free: Seconds) -> Seconds:
        """When each message is done. Updates `ready` and `free`."""
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
        done = np.maximum(head + self.receiving.busy_s, tail)
        if len(self.adding):
            at = self.adding
            begin = np.maximum(done[at], ready[self.destination[at]])
            done[at] = self.reducing.serve(begin, free) + self.reducing.busy_s
        if self.sending.alone and self.receiving.alone:
            ready[self.source_at] = np.maximum(ready[self.source_at], left)
            ready[self.destination] = np.maximum(ready[self.destination], done)
        else:
            np.maximum.at(ready, self.source, left)
            np.maximum.at(ready, self.destination, done)
        return done
