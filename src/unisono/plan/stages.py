"""What messages pass on their way: ports, cards and adding units, each one message at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.plan.schedule import Step
from unisono.plan.topology import Topology

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]

_SHORT_QUEUE = 6
"""Up to so many messages of a step on one part are put in order column by column."""


class Parts:
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
class Stage:
    """The parts that some messages pass, how long each is busy, and whether each has its own."""

    part: Indices
    at: Indices | slice
    busy_s: Seconds
    alone: bool
    queues: tuple[Indices, ...] = ()
    """The messages that are listed first for their parts, those listed second, and so on. Parts
    that most messages pass come first: the n-th of every row pass the same one."""

    @classmethod
    def of(cls, part: Indices) -> Stage:
        """Messages that pass these parts, each for no time yet."""
        busy_s = np.zeros(len(part))
        longest = int(np.bincount(part).max()) if len(part) else 1
        if longest == 1:
            return cls(part, _as_slice(part), busy_s, True)
        return cls(part, part, busy_s, False, _queues(part) if longest <= _SHORT_QUEUE else ())

    def busy_for(self, busy_s: Seconds) -> Stage:
        """The same where each message takes so long."""
        return Stage(self.part, self.at, busy_s, self.alone, self.queues)

    def some(self, which: Indices) -> Stage:
        """The same for some of the messages."""
        return Stage(self.part[which], self.part[which], self.busy_s[which], self.alone)

    def serve(self, begin: Seconds, free: Seconds) -> Seconds:
        """When each message begins to pass, where it could from `begin`; moves `free` on."""
        if self.alone:
            begin = np.maximum(begin, free[self.at])
            free[self.at] = begin + self.busy_s
            return begin
        if self.queues:
            return self._serve_short_queues(begin, free)
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

    def _serve_short_queues(self, begin: Seconds, free: Seconds) -> Seconds:
        """The same where few messages pass each part: their order by exchanging neighbours."""
        rows = list(self.queues)
        times = [begin[row] for row in rows]
        sorted_together: tuple[list[Any], ...] = (rows, times)
        for last in reversed(range(1, len(rows))):
            for left in range(last):
                right = left + 1
                both = slice(len(rows[right]))
                swap = times[right] < times[left][both]
                if not swap.any():
                    continue
                for each in sorted_together:
                    one, other = each[left][both], each[right]
                    each[left] = each[left].copy()
                    each[left][both] = np.where(swap, other, one)
                    each[right] = np.where(swap, one, other)
        begin = begin.copy()
        at = self.part[rows[0]]
        busy_until = free[at]
        for row, time in zip(rows, times, strict=True):
            start = np.maximum(time, busy_until[: len(row)])
            busy_until[: len(row)] = start + self.busy_s[row]
            begin[row] = start
        free[at] = busy_until
        return begin


def _queues(part: Indices) -> tuple[Indices, ...]:
    order = np.argsort(part, kind="stable")
    ordered = part[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    length = np.diff(np.append(starts, len(part)))
    most_first = starts[np.argsort(-length, kind="stable")]
    with_turn = np.cumsum(np.bincount(length)[::-1])[::-1][1:]  # parts with so many, or more
    return tuple(order[most_first[:count] + turn] for turn, count in enumerate(with_turn))


def _as_slice(index: Indices) -> Indices | slice:
    """The same indices as a slice, which NumPy is much faster with, if they follow each other."""
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
        self.added_bytes = added[self.adding] * chunk_bytes
        self._first_reducer = parts.reducer
        self.sending = Stage.of(parts.out + self.source)
        self.receiving = Stage.of(parts.into + self.destination)
        self.leaving = Stage.of(parts.card_out + parts.card_of(self.source[away]))
        self.entering = Stage.of(parts.card_into + parts.card_of(self.destination[away]))
        self.reducing = Stage.of(parts.reducer + self.destination[self.adding])
        self._set_times(topology, slow)

    def at_speeds_of(self, topology: Topology, slow: Seconds) -> Messages:
        """The same messages on a topology that differs in nothing but its speeds."""
        others = copy.copy(self)
        others._set_times(topology, slow)
        return others

    def _set_times(self, topology: Topology, slow: Seconds) -> None:
        rank_slow = slow[self._first_reducer :]
        self.overhead = topology.overhead_s * rank_slow[self.source]
        self.wait_in = topology.overhead_s * rank_slow[self.destination]
        self.latency = np.full(len(self.source), topology.inside_latency_s)
        self.latency[self.crossing] = topology.between_latency_s
        port = self.bytes / topology.inside_bytes_per_s
        card = self.bytes[self.crossing] / topology.card_bytes_per_s
        add = self.added_bytes / topology.reduce_bytes_per_s
        self.sending = self.sending.busy_for(self.overhead + port * slow[self.sending.part])
        self.receiving = self.receiving.busy_for(self.wait_in + port * slow[self.receiving.part])
        self.leaving = self.leaving.busy_for(card * slow[self.leaving.part])
        self.entering = self.entering.busy_for(card * slow[self.entering.part])
        self.reducing = self.reducing.busy_for(add * slow[self.reducing.part])

    @property
    def alone(self) -> bool:
        """Whether no two messages pass the same part, or leave or reach the same rank."""
        stages = (self.sending, self.receiving, self.leaving, self.entering, self.reducing)
        return all(stage.alone for stage in stages)

    def some(self, which: Indices) -> Messages:
        """Some of the messages, by their numbers in rising order."""
        few = copy.copy(self)
        few.source, few.destination = self.source[which], self.destination[which]
        few.source_at = few.source
        few.bytes, few.latency = self.bytes[which], self.latency[which]
        few.overhead, few.wait_in = self.overhead[which], self.wait_in[which]
        few.sending, few.receiving = self.sending.some(which), self.receiving.some(which)
        few.crossing, at = _within(self.crossing, which)
        few.leaving, few.entering = self.leaving.some(at), self.entering.some(at)
        few.adding, at = _within(self.adding, which)
        few.reducing = self.reducing.some(at)
        return few

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


def _within(numbers: Indices, which: Indices) -> tuple[Indices, Indices]:
    """Where in `which`, and where in `numbers`, stands what they have in common; both rise."""
    if not len(numbers):
        return numbers, numbers
    at = np.minimum(np.searchsorted(numbers, which), len(numbers) - 1)
    common = np.flatnonzero(numbers[at] == which)
    return common, at[common]


def pass_on_repeatedly(few: Messages, ready: Seconds, free: Seconds, times: int) -> None:
    """`pass_on`, so many times, where no part serves two messages; moves `ready` and `free` on.

    What takes time where messages are few is the number of NumPy's calls, and how each finds its
    numbers: here they are half as many, on rows of these messages alone, which stand so that most
    are found by slices: senders in their order, messages to other nodes last.
    """
    inside = np.ones(len(few.source), bool)
    inside[few.crossing] = False
    order = np.concatenate([np.flatnonzero(inside), few.crossing])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    own, far = slice(len(order)), slice(len(order) - len(few.crossing), None)
    row = np.full(len(ready), -1)
    row[few.source[order]] = np.arange(len(order))
    ends = few.destination[row[few.destination] < 0]  # who only receives
    row[ends] = np.arange(len(order), len(order) + len(ends))
    ranks = np.concatenate([few.source[order], ends])
    to = row[few.destination[order]]
    by_place = np.argsort(place[few.adding])
    adding = _as_slice(place[few.adding][by_place])
    adding_to = to[adding]
    stages = (
        few.sending.some(order),
        few.leaving,
        few.entering,
        few.receiving.some(order),
        few.reducing.some(by_place),
    )
    now, latency = ready[ranks], few.latency[order]
    left, out, into, taken, added = (free[stage.part] for stage in stages)
    sends_s, leaves_s, enters_s, takes_s, adds_s = (stage.busy_s for stage in stages)
    far_latency = latency[far]
    far_overhead, far_wait = few.overhead[few.crossing], few.wait_in[few.crossing]
    for _ in range(times):
        begin = np.maximum(now[own], left)
        left = begin + sends_s
        head, tail = begin + latency, left + latency
        if len(few.crossing):
            leaving = np.maximum(begin[far] + far_overhead, out)
            out = leaving + leaves_s
            entering = np.maximum(leaving + far_latency, into)
            into = entering + enters_s
            head[far] = entering - far_wait
            tail[far] = np.maximum(into, np.maximum(out, left[far]) + far_latency)
        taken = np.maximum(head, taken) + takes_s
        done = np.maximum(taken, tail)
        if len(few.adding):
            added = np.maximum(np.maximum(done[adding], now[adding_to]), added) + adds_s
            done[adding] = added
        now[own] = left
        now[to] = np.maximum(now[to], done)
    ready[ranks] = now
    for stage, times_s in zip(stages, (left, out, into, taken, added), strict=True):
        free[stage.part] = times_s
