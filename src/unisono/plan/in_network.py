"""An all_reduce in which switches add (NVLink SHARP, SHARP), simulated without a schedule.

Graham and others, "Scalable hierarchical aggregation protocol (SHArP): a hardware architecture for
efficient data reduction", 2016; for the switch inside a node, NCCL's src/device/all_reduce.h. The
ways are NCCL's algorithms. With g ranks in a node, each with its own card (with fewer cards there
are as many shares as cards), a port and a card send, and receive, this many tensors S:

| way            | inside a node                          | between nodes    | a port  | a card |
|----------------|----------------------------------------|------------------|---------|--------|
| nvls           | the switch adds and multicasts         | SHARP, if any    | 1 + 1/g | 1/g    |
| nvls_tree      | the switch adds and multicasts         | two binary trees | 1 + 1/g | 2/g    |
| collnet_direct | each to each, ranks add                | SHARP            | 2 - 2/g | 1/g    |
| collnet_chain  | chains to the cards and back, they add | SHARP            | 2 - 2/g | 1/g    |

With nvls each rank reads its share of the sum from the switch, which reads it from all ranks: S
leaves every port and S/g comes in. The rank then writes its share once, and the switch sends it to
all ranks: S/g leaves and S comes in. Both happen at once, on different pieces, so a tensor takes
(1 + 1/g) S in each direction where a ring takes 2(g - 1)/g S.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.plan.algorithms.binary_trees import both_trees, depths
from unisono.plan.topology import Topology

PIECES = (1, 8, 64)
"""The numbers of pieces to try for a pipeline; the best one counts."""

Stage = tuple[dict[str, float], float]
"""How long a piece keeps each part busy, and its latency to the next stage."""


@dataclass(frozen=True)
class InNetwork:
    """The cost of an all_reduce by switches, in one `way`.

    It takes `time_s`, in `pieces` pieces. `levels` is the number of network switches that a sum
    passes on its way up, `switches` the number of switches per card of a node. `card_bytes` is what
    a card sends, `rank_bytes` what a rank sends inside its node, `added_bytes` what the rank adds
    itself. See also `reduce_in_network`.

    >>> from unisono import plan
    >>> sharp = plan.reduce_in_network(64, plan.find_topology("h100_sharp"), 1 << 20)
    >>> sharp.way, sharp.levels, sharp.time_s > 0
    ('nvls', 1, True)
    """

    way: str
    time_s: float
    pieces: int
    levels: int
    switches: int
    card_bytes: float
    rank_bytes: float
    added_bytes: float

    @property
    def label(self) -> str:
        """The way, and the number of pieces if it is above 1."""
        return self.way + (f" ({self.pieces} pieces)" if self.pieces > 1 else "")


def ways(ranks: int, topology: Topology) -> tuple[str, ...]:
    """The ways in which the switches of `topology` can do an all_reduce on `ranks` ranks."""
    several = topology.nodes(ranks) > 1
    possible = {
        "nvls": topology.inside_switch_adds and (not several or topology.switch_ports > 0),
        "nvls_tree": topology.inside_switch_adds and several,
        "collnet_direct": several and topology.switch_ports > 0,
        "collnet_chain": several and topology.switch_ports > 0,
    }
    return tuple(way for way, is_possible in possible.items() if is_possible)


def switch_tree(nodes: int, ports: int) -> list[NDArray[np.int64]]:
    """For each level, from the nodes up, the index of the switch above each node or switch; the
    last level is a single switch. Half of a switch's ports lead down."""
    if ports < 4:
        raise ValueError(f"a switch that reduces needs at least 4 ports, not {ports}")
    levels: list[NDArray[np.int64]] = []
    below = nodes
    while not levels or below > 1:
        levels.append(np.arange(below) // (ports // 2))
        below = int(levels[-1][-1]) + 1
    return levels


def reduce_in_network(
    ranks: int, topology: Topology, total_bytes: float, way: str | None = None
) -> InNetwork:
    """An all_reduce of `total_bytes` on `ranks` ranks by the switches of `topology`, in `way` (by
    default the fastest) and with the best number of pieces.

    Raises ValueError for no ranks, or if the switches cannot reduce in that way. See also
    `InNetwork`.

    >>> from unisono import plan
    >>> h100 = plan.find_topology("h100_sharp")
    >>> ring = plan.simulate(plan.find("all_reduce", "ring").schedule(64), h100, 1 << 20)
    >>> plan.reduce_in_network(64, h100, 1 << 20).time_s < ring.time_s
    True
    """
    if ranks < 1:
        raise ValueError(f"an all_reduce needs at least one rank, not {ranks}")
    possible = ways(ranks, topology)
    if not possible or (way is not None and way not in possible):
        by = f" by {way}" if possible else ""
        raise ValueError(f"the switches of topology {topology.name} cannot reduce{by} here")
    found = [
        _Model(ranks, topology, total_bytes, pieces).reduce(each)
        for each in ([way] if way else possible)
        for pieces in PIECES
    ]
    return min(found, key=lambda in_network: in_network.time_s)


class _Model:
    """All nodes, ranks and cards are alike, so one of each is simulated."""

    def __init__(self, ranks: int, topology: Topology, total_bytes: float, pieces: int) -> None:
        self.topology, self.total, self.pieces = topology, total_bytes, pieces
        self.local, self.nodes = min(ranks, topology.node_size), topology.nodes(ranks)
        self.cards = min(topology.cards, self.local)
        self.shares = self.cards if self.nodes > 1 else self.local

    def reduce(self, way: str) -> InNetwork:
        inside = {"collnet_direct": self._direct, "collnet_chain": self._chain}.get(way, self._nvls)
        up, down, sent, added = inside() if self.local > 1 else ([], [], 0.0, 0.0)
        between: list[Stage] = []
        levels = switches = 0
        card_bytes = 0.0
        if self.nodes > 1 and way == "nvls_tree":
            between, tensors = self._trees()
            card_bytes = self.total / self.cards * tensors
            added += 1 / self.cards
        elif self.nodes > 1:
            tree = switch_tree(self.nodes, self.topology.switch_ports)
            between = self._switches(len(tree))
            levels, switches = len(tree), sum(int(above[-1]) + 1 for above in tree)
            card_bytes = self.total / self.cards
        stages = [*up, *between, *down]
        time_s = self.topology.call_s + _pipelined_s(stages, self.pieces)
        moved_bytes = (card_bytes, self.total * sent, self.total * added)
        return InNetwork(way, time_s, self.pieces, levels, switches, *moved_bytes)

    # Inside a node: (stages up, stages down, tensors that a rank sends, tensors that it adds).

    def _nvls(self) -> tuple[list[Stage], list[Stage], float, float]:
        hop_s = self.topology.inside_latency_s
        whole_s, share_s = self._port_s(1), self._port_s(1 / self.shares)
        read = ({"out": whole_s, "in": share_s}, 2 * hop_s)  # the request and the reply
        write = ({"out": share_s, "in": whole_s}, hop_s)
        return [read], [write], 1 + 1 / self.shares, 0

    def _direct(self) -> tuple[list[Stage], list[Stage], float, float]:
        hop_s, others = self.topology.inside_latency_s, self.local - 1
        sent = others / self.local if self.shares == self.local else 1
        out_s, in_s = self._port_s(sent, others), self._port_s(others / self.shares, others)
        add = ({"adder": self._add_s(others / self.shares)}, 0.0)
        up, down = [({"out": out_s, "in": in_s}, hop_s), add], [({"out": in_s, "in": out_s}, hop_s)]
        return up, down, sent + others / self.shares, others / self.shares

    def _chain(self) -> tuple[list[Stage], list[Stage], float, float]:
        hops, sent = self.local - 1, 1 / self.local  # per hop; each chain begins at another rank
        port_s, hop_s = self._port_s(sent), self.topology.inside_latency_s
        hop_s += self._port_s(1 / self.shares) - port_s
        hop = ({"out": port_s, "in": port_s}, hop_s)
        add = ({"adder": self._add_s(sent)}, 0.0)
        return [hop, add] * hops, [hop] * hops, 2 * hops * sent, hops * sent

    # Between nodes.

    def _switches(self, levels: int) -> list[Stage]:
        """Up a tree of switches that add, and down the same links."""
        hop_s = self.topology.between_latency_s / 2  # a switch is halfway between two nodes
        link_s = self._card_s(1)
        add_s = self.total / self.pieces / self.cards / self.topology.switch_bytes_per_s
        up: list[Stage] = []
        down: list[Stage] = []
        for level in range(levels):
            busy_s = link_s + (0.0 if level else self.topology.overhead_s)  # ranks only
            up += [({f"up {level}": busy_s}, hop_s), ({f"switch {level}": add_s}, 0.0)]
            down.insert(0, ({f"down {level}": busy_s}, hop_s))
        return up + down

    def _trees(self) -> tuple[list[Stage], float]:
        """Up and down two binary trees of nodes, each with half the tensor; what a card sends."""
        trees = both_trees(self.nodes)
        sent = sum(
            np.bincount(tree[tree >= 0], minlength=self.nodes) + (tree >= 0) for tree in trees
        )
        busiest = float(np.max(sent)) / 2
        hops = 2 * max(int(depths(tree).max()) for tree in trees)
        busy_s = self._card_s(busiest / hops)
        passing_s = max(self._card_s(1 / 2), busy_s)
        latency_s = self.topology.between_latency_s + self.topology.overhead_s + passing_s - busy_s
        hop = ({"up 0": busy_s, "down 0": busy_s}, latency_s)
        add = ({"adder": self._add_s(2 / hops / self.cards)}, 0.0)
        return [hop, add] * (hops // 2) + [hop] * (hops // 2), busiest

    def _port_s(self, tensors: float, messages: int = 1) -> float:
        overhead_s = self.topology.overhead_s * messages
        return overhead_s + self.total * tensors / self.pieces / self.topology.inside_bytes_per_s

    def _card_s(self, shares: float) -> float:
        port_bytes_per_s = self.topology.inside_bytes_per_s * self.local / self.cards
        bytes_per_s = min(self.topology.card_bytes_per_s, port_bytes_per_s)
        return self.total * shares / self.cards / self.pieces / bytes_per_s

    def _add_s(self, tensors: float) -> float:
        return self.total * tensors / self.pieces / self.topology.reduce_bytes_per_s


def _pipelined_s(stages: Sequence[Stage], pieces: int) -> float:
    """When the last piece has passed all stages. Each part serves one piece at a time, first come
    first served; a piece starts when the one before it has passed the first stage."""
    free: defaultdict[str, float] = defaultdict(float)
    waiting = [(0.0, 0, 0)] if stages else []
    last_s = 0.0
    while waiting:
        ready_s, piece, number = heapq.heappop(waiting)
        busy, latency_s = stages[number]
        passed_s = ready_s
        for part, seconds in busy.items():
            free[part] = max(ready_s, free[part]) + seconds
            passed_s = max(passed_s, free[part])
        if number == 0 and piece + 1 < pieces:
            heapq.heappush(waiting, (passed_s, piece + 1, 0))
        if number + 1 < len(stages):
            heapq.heappush(waiting, (passed_s + latency_s, piece, number + 1))
        last_s = max(last_s, passed_s + latency_s)
    return last_s
