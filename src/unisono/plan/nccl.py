"""NCCL's own formulas for the latency of a ring and of a tree, with which docs/scale.md compares
simulated times. Constants and formulas are those of NCCL 2.30.7, src/graph/tuning.cc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROTOCOLS = ("LL", "LL128", "Simple")
CALL_US: Mapping[str, Sequence[float]] = {"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4)}
"""The fixed cost of a call, by protocol."""
HOP_US: Mapping[str, Mapping[str, Sequence[float]]] = {
    "Tree": {"inside": (0.6, 1.25, 4.0), "between": (5.0, 8.5, 14.0)},
    "Ring": {"inside": (0.6, 1.9, 3.4), "between": (2.7, 4.0, 14.0)},
}
"""The latency of a hop over NVLink and over the network, by protocol."""


def ring_latency_us(ranks: int, nodes: int, protocol: str, post_us: float = 1.0) -> float:
    """The latency of an all_reduce: twice around a ring. A hop between nodes takes at least as long
    as posting a message. With one rank per node nothing hides the network: a hop costs a tree's."""
    which = PROTOCOLS.index(protocol)
    near_us = HOP_US["Ring"]["inside"][which]
    if nodes > 1:
        near_us = max(near_us, post_us * (3 if protocol == "Simple" else 1))
    far_us = HOP_US["Tree" if nodes == ranks else "Ring"]["between"][which]
    near, far = 2 * (ranks - nodes), 2 * (nodes - 1)
    return CALL_US["Ring"][which] + near * near_us + far * far_us


def tree_latency_us(ranks: int, nodes: int, protocol: str) -> float:
    """The latency up and down a chain in each node and a tree between the nodes."""
    which = PROTOCOLS.index(protocol)
    near, far = ranks // nodes - 1, nodes.bit_length() - 1
    hops = HOP_US["Tree"]
    one_way_us = near * hops["inside"][which] + far * hops["between"][which]
    return CALL_US["Tree"][which] + 2 * one_way_us
