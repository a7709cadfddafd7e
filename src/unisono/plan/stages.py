"""What messages pass on their way: ports, cards and adding units, each one message at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.plan.schedule import Step
from unisono.plan.topology import Topology

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]


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

    def slowness(self, ranks: Mapping[int, float]) -> Seconds:
        slow = np.ones(self.ranks)
        for rank, factor in ranks.items():
            self.check_rank(rank)
            if factor <= 0:
                raise ValueError("a factor of slowness must be more than 0")
            slow[rank] = factor
        return slow


@dataclass(frozen=True)
class Stage:
    """The parts that some messages pass, how long each is busy, and whether each has its own."""

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
        """When each message begins to pass, where it could from `begin`; moves `free` on."""
        if self.alone:
            begin = np.maximum(begin, free[self.at])
            free[self.at] = begin + self.busy_s
            return begin
        order, starts = self.order, self.starts
        length = np.diff(starts, append=len(order))
        overtakes = np.diff(begin[order], prepend=-np.inf) < 0
        overtakes[starts] = False
        if overtakes.any():  # only these parts' messages are put in order: by time, then as listed
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

    def pass_on(self, ready: Seconds, free: Seconds) -> Seconds:
        """When each message has been dealt with. Moves `ready` and `free` on."""
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
