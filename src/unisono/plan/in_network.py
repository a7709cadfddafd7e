"""An all_reduce in which switches add (SHARP), simulated: no rank runs a schedule for it.

Graham and others, "Scalable hierarchical aggregation protocol (SHArP): a hardware architecture for
efficient data reduction", 2016; docs/scale.md says how it goes.

| steps                                | a card sends        | a rank adds              |
|--------------------------------------|---------------------|--------------------------|
| inside, up and down once, and inside | 1 / cards of tensor | (g - 1) / g, or nothing  |

A ring's cards send nearly 2 / cards, so that SHARP is at most about twice as fast for large
tensors; for small ones it has the latency of a tree whose nodes have half a switch's ports as
children. Where the switch inside a node adds, too (NVLink SHARP), the ranks add nothing at all.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.plan.catalog import find
from unisono.plan.simulate import simulate
from unisono.plan.topology import Topology

NAME = "sharp"
PIECES = (1, 8, 64)
"""Into how many pieces what is pipelined is cut, to find out how many are best."""


@dataclass(frozen=True)
class InNetwork:
    """What happens when switches reduce a tensor.

    `levels` is how many switches a sum passes on its way up, `switches` how many there are for each
    card of a node. `card_bytes` is what a card sends, `rank_bytes` what a rank sends, `added_bytes`
    what it adds itself. It takes `time_s`, in `pieces` pieces.

    >>> from unisono import plan
    >>> sharp = plan.reduce_in_network(64, plan.find_topology("h100_sharp"), 1 << 20)
    >>> sharp.levels, sharp.time_s > 0
    (1, True)
    """

    time_s: float
    pieces: int
    levels: int
    switches: int
    card_bytes: float
    rank_bytes: float
    added_bytes: float

    @property
    def label(self) -> str:
        """Its name in tables, and its pieces if it has any."""
        return NAME + (f" ({self.pieces} pieces)" if self.pieces > 1 else "")


def switch_tree(nodes: int, ports: int) -> list[NDArray[np.int64]]:
    """For each level, from the nodes up, the switch above each node or switch; the last is one.
    Half of a switch's ports lead down."""
    if ports < 4:
        raise ValueError(f"a switch that adds has at least 4 ports, not {ports}")
    levels: list[NDArray[np.int64]] = []
    below = nodes
    while not levels or below > 1:
        levels.append(np.arange(below) // (ports // 2))
        below = int(levels[-1][-1]) + 1
    return levels


def reduce_in_network(ranks: int, topology: Topology, total_bytes: float) -> InNetwork:
    """An all_reduce of `total_bytes` on `ranks` ranks by the switches of `topology`, in as many
    pieces as are best.

    Raises ValueError for no ranks, or switches that do not add.

    >>> from unisono import plan
    >>> h100 = plan.find_topology("h100_sharp")
    >>> ring = plan.simulate(plan.find("all_reduce", "ring").schedule(64), h100, 1 << 20)
    >>> plan.reduce_in_network(64, h100, 1 << 20).time_s < ring.time_s
    True
    """
    if ranks < 1:
        raise ValueError(f"an all_reduce needs at least one rank, not {ranks}")
    if not topology.switch_ports:
        raise ValueError(f"the switches of topology {topology.name} do not add")
    found = [_reduce(ranks, topology, total_bytes, pieces) for pieces in PIECES]
    return min(found, key=lambda in_network: in_network.time_s)


def _reduce(ranks: int, topology: Topology, total_bytes: float, pieces: int) -> InNetwork:
    local, nodes = min(ranks, topology.node_size), topology.nodes(ranks)
    shared = total_bytes * (local - 1) / local
    free_adding = dataclasses.replace(topology, reduce_bytes_per_s=math.inf)
    inside = free_adding if topology.inside_switch_adds else topology
    scatter = simulate(find("reduce_scatter", "direct").schedule(local), inside, total_bytes)
    gather = simulate(find("all_gather", "direct").schedule(local), topology, total_bytes)
    time_s, levels, switches, card_bytes = scatter.time_s, 0, 0, 0.0
    if nodes > 1:
        tree = switch_tree(nodes, topology.switch_ports)
        levels, switches = len(tree), sum(int(above[-1]) + 1 for above in tree)
        cards = min(topology.cards, local)
        card_bytes = total_bytes / cards
        port_bytes_per_s = topology.inside_bytes_per_s * local / cards
        bytes_per_s = min(topology.card_bytes_per_s, port_bytes_per_s)
        piece_bytes = card_bytes / pieces
        time_s = _up_and_down_s(tree, topology, piece_bytes, pieces, bytes_per_s, time_s)
    return InNetwork(
        time_s=time_s + gather.time_s - topology.call_s,
        pieces=pieces,
        levels=levels,
        switches=switches,
        card_bytes=card_bytes,
        rank_bytes=2 * shared + (total_bytes / local if nodes > 1 else 0.0),
        added_bytes=0.0 if topology.inside_switch_adds else shared,
    )


def _up_and_down_s(
    tree: list[NDArray[np.int64]],
    topology: Topology,
    piece_bytes: float,
    pieces: int,
    bytes_per_s: float,
    ready_s: float,
) -> float:
    """When the last node has the last piece; `ready_s` is when the nodes have the first."""
    hop_s = topology.between_latency_s / 2  # half of the way between nodes is to a switch
    link_s = piece_bytes / bytes_per_s
    overhead_s = [topology.overhead_s] + [0.0] * len(tree)  # of ranks; switches have none
    add_s = piece_bytes / topology.switch_bytes_per_s
    up = [np.full(len(above), ready_s) for above in tree]  # from when on a link is free
    down = [np.zeros(len(above)) for above in tree]
    adders = [np.zeros(int(above[-1]) + 1) for above in tree]
    sums = up[0]
    for _ in range(pieces):
        sums = up[0]
        for level, above in enumerate(tree):
            up[level] = np.maximum(up[level], sums) + overhead_s[level] + link_s
            starts = np.flatnonzero(np.append(True, np.diff(above)))
            arrived = np.maximum.reduceat(up[level], starts) + hop_s
            adders[level] = np.maximum(arrived, adders[level]) + add_s
            sums = adders[level]
        for level in reversed(range(len(tree))):
            down[level] = np.maximum(down[level], sums[tree[level]]) + overhead_s[level] + link_s
            sums = down[level] + hop_s
    return float(sums.max())
