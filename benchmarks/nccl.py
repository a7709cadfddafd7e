"""NCCL's own model of latency: what its tuner would say about a small all_reduce.

The constants and the formulas are those of NCCL 2.30 (src/graph/tuning.cc). NCCL uses them to
choose among its algorithms, not to predict: docs/scale.md compares them with measured times.
"""

from __future__ import annotations

# Microseconds by protocol, for rings and for trees: a hop inside a node over NVLink, a hop over the
# network, and what a call costs before the first hop.
HOPS_US = {
    "LL": {"inside": (0.6, 0.6), "between": (2.7, 5.0), "call": (6.6, 6.8)},
    "LL128": {"inside": (1.9, 1.25), "between": (4.0, 8.5), "call": (14.0, 14.0)},
    "Simple": {"inside": (3.4, 4.0), "between": (14.0, 14.0), "call": (8.4, 8.4)},
}


def ring_latency_s(ranks: int, nodes: int, protocol: str) -> float:
    """base + (2(N - 1) - 2(M - 1)) inside + 2(M - 1) between, N ranks on M nodes."""
    hops = HOPS_US[protocol]
    far = 2 * (nodes - 1)
    near = 2 * (ranks - 1) - far
    return (hops["call"][0] + near * hops["inside"][0] + far * hops["between"][0]) * 1e-6


def tree_latency_s(ranks: int, nodes: int, protocol: str) -> float:
    """base + 2((N / M - 1) inside + floor(log2 M) between): a chain in each node, a tree above."""
    hops = HOPS_US[protocol]
    near = 2 * (ranks / nodes - 1)
    far = 2 * (nodes.bit_length() - 1)
    return (hops["call"][1] + near * hops["inside"][1] + far * hops["between"][1]) * 1e-6
