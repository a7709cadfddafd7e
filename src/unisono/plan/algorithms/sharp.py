"""Reduction inside the network's switches (SHARP), as a formula: no rank runs a schedule for it.

Graham and others, "Scalable hierarchical aggregation protocol (SHArP): a hardware architecture for
efficient data reduction", 2016. Every rank sends its tensor up once and gets the sum once; the
switches add on the way. With switches of k ports there are ceil(log_k/2(nodes)) levels at least.

| steps            | a rank sends |
|------------------|--------------|
| up and down once | 1            |

A ring's rank sends 2(n - 1)/n, so that SHARP is at most twice as fast for large tensors; for small
ones it has the latency of a tree with a very wide fan-out.
"""

from __future__ import annotations

from unisono.plan.topology import Topology


def all_reduce_s(ranks: int, total_bytes: float, topology: Topology, ports: int = 40) -> float:
    """Seconds for an all_reduce with one tensor per node in the network, `ports` ports per switch.

    Inside a node the ranks first reduce and scatter and at last gather, straight to each other;
    the cards then carry the node's tensor once out and once in. Raises ValueError for no ranks.
    """
    if ranks < 1:
        raise ValueError(f"an all_reduce needs at least one rank, not {ranks}")
    if ports < 4:
        raise ValueError(f"a switch that adds has at least 4 ports, not {ports}")
    local = min(ranks, topology.node_size)
    nodes = topology.nodes(ranks)
    time_s = topology.call_s
    if local > 1:
        moved = total_bytes * (local - 1) / local
        hop = topology.inside_latency_s + (local - 1) * topology.overhead_s
        time_s += 2 * (hop + moved / topology.inside_bytes_per_s)
        time_s += moved / topology.reduce_bytes_per_s
    if nodes > 1:
        levels = 1
        while (ports // 2) ** levels < nodes:
            levels += 1
        # Half of a hop's latency is the way to a switch, half the way from it.
        hops = 2 * levels * topology.between_latency_s / 2
        bandwidth = min(topology.cards * topology.card_bytes_per_s, topology.inside_bytes_per_s)
        time_s += topology.overhead_s + hops + total_bytes / bandwidth
    return time_s
