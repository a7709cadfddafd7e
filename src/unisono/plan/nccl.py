"""What NCCL would choose for a collective, and its own estimate of the time (docs/nccl.md).

NCCL estimates a latency and a bandwidth for each algorithm and protocol, and takes the pair that it
expects to be fastest for a size. The constants (nccl.toml) and formulas are those of NCCL 2.30.7
(src/graph/tuning.cc; src/enqueue.cc chooses). Channels and their bandwidths are those that its
search (src/graph/search.cc) finds on a DGX H100 and a DGX A100. NCCL uses these estimates to
choose, not to predict.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import name_choices
from unisono.plan.topology import Topology

VERSION = "2.30.7"
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
FUNCTIONS = {
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}
"""The collectives that NCCL tunes, and its names for them."""

_CONSTANTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CALL_US: Mapping[str, Sequence[float]] = _CONSTANTS["call_us"]
HOP_US: Mapping[str, Mapping[str, Sequence[float]]] = _CONSTANTS["hop_us"]


@dataclass(frozen=True)
class Graph:
    """The number of channels, and the GB/s of each inside a node and between nodes. LL128 needs
    links that keep 128 bytes together; a plain tree enters and leaves a node at one rank."""

    channels: int
    inside: float
    between: float
    has_ll128: bool = True
    is_plain: bool = False


@dataclass(frozen=True)
class _Machine:
    """The highest bandwidth of a protocol or a tree, in GB/s, on 1, 2 and more nodes, for all
    channels together (LL) or for each; and the graphs by kind, for each number of ranks on a single
    node or on each of several."""

    ll: Sequence[float]
    ring_ll128: float
    tree_ll128: Sequence[float]
    tree: Sequence[float]
    nvls_tree: Sequence[float]
    nvls_share: float
    is_hopper: bool
    post_us: float
    one_node: Mapping[int, Mapping[str, Graph]]
    nodes_of: Mapping[int, Mapping[str, Graph]]


def _find_machine(name: str) -> _Machine | None:
    values = dict(_CONSTANTS["machines"].get(name, {}))
    for where in ("one_node", "nodes_of"):
        values[where] = {
            int(local): {kind: Graph(**graph) for kind, graph in kinds.items()}
            for local, kinds in values.get(where, {}).items()
        }
    return _Machine(**values) if name in _CONSTANTS["machines"] else None


_KINDS = {
    "Tree": "tree",
    "Ring": "ring",
    "CollNetDirect": "direct",
    "CollNetChain": "chain",
    "NVLS": "nvls",
    "NVLSTree": "nvls",
    "PAT": "tree",
}


@dataclass(frozen=True)
class Estimate:
    """What NCCL expects of an `algorithm` and a `protocol`: a latency, and GB/s of the tensor."""

    algorithm: str
    protocol: str
    latency_us: float
    gb_per_s: float


@dataclass(frozen=True)
class Tuning:
    """NCCL's `estimates` for a `collective` on `ranks` ranks of `nodes` nodes and its `channels`.

    >>> from unisono.plan import find_topology, nccl
    >>> tuning = nccl.tune("all_reduce", 64, find_topology("h100"), {})
    >>> estimate = tuning.choose(8)
    >>> estimate.algorithm, estimate.protocol
    ('Tree', 'LL')
    """

    collective: str
    ranks: int
    nodes: int
    channels: int
    estimates: tuple[Estimate, ...]

    def time_s(self, estimate: Estimate, total_bytes: int) -> float:
        """NCCL's estimate of the time for a tensor of `total_bytes`."""
        latency_us, gb_per_s = estimate.latency_us, estimate.gb_per_s
        if self.collective == "all_reduce" and estimate.algorithm == "Tree":
            shares = _CONSTANTS["tree_share"][estimate.protocol]
            power = (int(total_bytes) >> 6).bit_length() - 1
            gb_per_s *= shares[power] if 0 <= power < len(shares) else 1.0
        is_ring = (estimate.algorithm, estimate.protocol) == ("Ring", "Simple")
        is_plateau = self.nodes > 1 and total_bytes // (self.channels * self.ranks) >= 64
        if is_ring and is_plateau and self.collective == "all_reduce":
            latency_us *= 1.4
        return latency_us * 1e-6 + total_bytes / (gb_per_s * 1e9)

    def choose(self, total_bytes: int) -> Estimate:
        """NCCL's choice for a tensor of `total_bytes`; of equals, the first in NCCL's order."""
        return min(self.estimates, key=lambda estimate: self.time_s(estimate, total_bytes))


def tune(
    collective: str, ranks: int, topology: Topology, environment: Mapping[str, str] | None = None
) -> Tuning:
    """NCCL's estimates for `collective` on `ranks` ranks of `topology`: h100 or a100, or either
    with switches that reduce. `environment` (by default os.environ) has NCCL_ALGO and NCCL_PROTO.

    Raises ValueError for a collective that NCCL does not tune, a machine whose channels are
    unknown, and variables that leave nothing to choose.

    >>> from unisono.plan import find_topology, nccl
    >>> only = nccl.tune("all_reduce", 16, find_topology("h100"), {"NCCL_ALGO": "^Tree"})
    >>> "Tree" in {estimate.algorithm for estimate in only.estimates}
    False
    """
    if collective not in FUNCTIONS:
        choices = name_choices(FUNCTIONS, collective)
        raise ValueError(f"NCCL does not choose an algorithm for {collective}, only for {choices}")
    environment = os.environ if environment is None else environment
    chosen = {
        name: _allowed(environment.get(name, ""), name, names, FUNCTIONS[collective])
        for name, names in (("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS))
    }
    machine = _find_machine(topology.name.removesuffix("_sharp"))
    nodes = topology.nodes(ranks)
    local = ranks // nodes
    known: Mapping[int, Mapping[str, Graph]] = {}
    if machine is not None:
        known = machine.one_node if nodes == 1 else machine.nodes_of
    if machine is None or local not in known or ranks % nodes:
        raise ValueError(
            f"NCCL's channels for {ranks} ranks on {nodes} nodes of {topology.name} are unknown: "
            "take h100 or a100 (also _sharp), with 2, 4 or 8 ranks on one node, or 1 or 8 on each "
            "of several"
        )
    model = _Model(collective, ranks, nodes, machine, known[local], topology.switch_ports > 0)
    found = []
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            protocols = chosen["NCCL_PROTO"]
            by_default = protocols is None and model.has(algorithm, protocol)
            if not by_default and protocol not in (protocols or ()):
                continue
            if chosen["NCCL_ALGO"] is not None and algorithm not in chosen["NCCL_ALGO"]:
                continue
            gb_per_s = model.gb_per_s(algorithm, protocol)
            if gb_per_s > 0:
                latency_us = model.latency_us(algorithm, protocol)
                found.append(Estimate(algorithm, protocol, latency_us, gb_per_s))
    if not found:
        set_here = (name for name, allowed in chosen.items() if allowed is not None)
        settings = " and ".join(f"{name}={environment[name]}" for name in set_here)
        raise ValueError(f"{settings} leaves no algorithm for {collective} here: NCCL would fail")
    return Tuning(collective, ranks, nodes, model.channels, tuple(found))


def ring_latency_us(
    ranks: int, nodes: int, protocol: str, rounds: int = 2, post_us: float = 1.0
) -> float:
    """The latency of `rounds` times around a ring. A hop between nodes takes at least as long as
    posting a message. With one rank per node nothing hides the network: a hop costs a tree's."""
    which = PROTOCOLS.index(protocol)
    near_us = HOP_US["Ring"]["inside"][which]
    if nodes > 1:
        near_us = max(near_us, post_us * (3 if protocol == "Simple" else 1))
    far_us = HOP_US["Tree" if nodes == ranks else "Ring"]["between"][which]
    near, far = rounds * (ranks - nodes), rounds * (nodes - 1)
    return CALL_US["Ring"][which] + near * near_us + far * far_us


def tree_latency_us(ranks: int, nodes: int, protocol: str) -> float:
    """The latency up and down a chain in each node and a tree between the nodes."""
    which = PROTOCOLS.index(protocol)
    near, far = ranks // nodes - 1, nodes.bit_length() - 1
    hops = HOP_US["Tree"]
    one_way_us = near * hops["inside"][which] + far * hops["between"][which]
    return CALL_US["Tree"][which] + 2 * one_way_us


@dataclass
class _Model:
    """Latency and bandwidth of each algorithm and protocol."""

    collective: str
    ranks: int
    nodes: int
    machine: _Machine
    graphs: Mapping[str, Graph]
    switches_add: bool

    def __post_init__(self) -> None:
        self.local = self.ranks // self.nodes
        self.channels = 2 * self.graphs["ring"].channels
        steps = {"all_reduce": 2 * (self.ranks - 1), "broadcast": self.ranks, "reduce": self.ranks}
        self.steps = steps.get(self.collective, self.ranks - 1)

    def has(self, algorithm: str, protocol: str) -> bool:
        """Whether NCCL considers the protocol by default; only LL128 depends on the graph."""
        graph = self.graphs.get(_KINDS[algorithm])
        return protocol != "LL128" or (graph is not None and graph.has_ll128)

    def _is_possible(self, algorithm: str, protocol: str) -> bool:
        is_simple, several = protocol == "Simple", self.nodes > 1
        sums = self.collective == "all_reduce"
        scattered = self.collective in ("reduce_scatter", "all_gather")
        return {
            "Ring": True,
            "Tree": sums,
            "CollNetDirect": is_simple and sums and several and self.switches_add,
            "CollNetChain": is_simple and sums and several and self.switches_add,
            "NVLS": is_simple
            and (sums or (scattered and not several))
            and (self.switches_add or not several),
            "NVLSTree": is_simple and sums and several,
            "PAT": is_simple and scattered and several and self.local == 1,
        }[algorithm]

    def gb_per_s(self, algorithm: str, protocol: str) -> float:
        """The bandwidth, in tensor bytes; 0 if NCCL has no such algorithm here."""
        graph = self.graphs.get(_KINDS[algorithm])
        if graph is None or not self._is_possible(algorithm, protocol):
            return 0.0
        if algorithm in ("NVLS", "NVLSTree"):
            channel = self._nvls(graph, algorithm)
        else:
            inside = self.nodes <= 2 or algorithm.startswith("CollNet")
            channel = graph.inside if inside else graph.between
        bus = self._limited(algorithm, protocol, graph, graph.channels * channel)
        if algorithm != "Ring" and self.collective in ("reduce_scatter", "all_gather"):
            return bus
        is_ring = algorithm in ("Ring", "NVLS", "NVLSTree")
        return bus * (self.ranks / self.steps if is_ring else 0.5)

    def _nvls(self, graph: Graph, algorithm: str) -> float:
        """The bandwidth of the switch, or of the network if that is slower."""
        if graph.channels < 2:
            return 0.0
        inside = graph.inside * self.machine.nvls_share * (graph.channels - 1) / graph.channels
        inside *= 2 if self.collective == "all_reduce" else (self.local - 1) / self.local
        if algorithm == "NVLS":
            return min(inside, graph.between)
        between = graph.between * (2 if self.nodes <= 2 else 1)
        return min(inside, between, self.machine.nvls_tree[self._size_class])

    def _limited(self, algorithm: str, protocol: str, graph: Graph, bus: float) -> float:
        """The links' bandwidth less what the protocol, the tree or the switches cost."""
        machine, which, channels = self.machine, self._size_class, graph.channels
        if algorithm == "Ring" and protocol == "LL":
            return min(machine.ll[which], bus / 2)
        if algorithm == "Ring" and protocol == "LL128":
            return min(bus * 0.92, channels * machine.ring_ll128)
        if algorithm == "Tree":
            bus = min(bus * 0.92, channels * machine.tree[which])
            if protocol == "LL":
                bus = min(bus / 3.8, machine.ll[which])
            if protocol == "LL128":
                share = 7 / 9 if self.nodes == 1 else 120 / 128
                bus = min(bus * share, channels * machine.tree_ll128[which])
            return bus * (0.85 if graph.is_plain else 1)
        if algorithm == "PAT":
            return bus * 0.75
        if algorithm == "CollNetDirect":
            ranks_per_card = self.local / channels
            bus /= ranks_per_card - (ranks_per_card - 1) / 2
            return bus * (0.85 if machine.is_hopper else 1)
        return bus

    @property
    def _size_class(self) -> int:
        return min(self.nodes, 3) - 1

    def latency_us(self, algorithm: str, protocol: str) -> float:
        which = PROTOCOLS.index(protocol)
        call_us = CALL_US.get(algorithm, (0.0, 0.0, 0.0))[which]
        near_us = HOP_US[algorithm]["inside"][which]
        # With one rank per node nothing hides the network, so NCCL counts a tree's hops.
        far_us = HOP_US["Tree" if self.local == 1 else algorithm]["between"][which]
        levels, others = self.nodes.bit_length() - 1, self.local - 1
        if algorithm == "Ring" and self.collective in ("broadcast", "reduce"):
            if self.nodes == 1 or self.local == 1:  # all channels share a single chain
                return call_us + (near_us if self.nodes == 1 else HOP_US["Ring"]["between"][which])
            hops = HOP_US["Tree" if protocol == "Simple" else "Ring"]
            return call_us + self.steps * hops["between"][which]
        if algorithm == "Ring":
            rounds = 2 if self.collective == "all_reduce" else 1
            return ring_latency_us(self.ranks, self.nodes, protocol, rounds, self.machine.post_us)
        if algorithm == "Tree":
            return tree_latency_us(self.ranks, self.nodes, protocol)
        if algorithm == "CollNetDirect":
            return 2 * (min(1, others) * near_us + others * 0.4) + far_us
        if algorithm == "CollNetChain":
            return 2 * others * near_us + far_us
        if algorithm == "NVLS":
            return near_us + (far_us if self.nodes > 1 else 0.0)
        if algorithm == "NVLSTree":
            return near_us + 2 * levels * far_us
        return call_us + levels * far_us / 3.5 + self.ranks * 2.8


def _allowed(text: str, name: str, names: tuple[str, ...], function: str) -> set[str] | None:
    """What a list like "ring,tree;broadcast:^ring" allows for `function`; None for anything."""
    allowed = None
    spelled = {each.casefold(): each for each in names}
    functions = {each.casefold() for each in FUNCTIONS.values()}
    for number, entry in enumerate(part for part in text.split(";") if part):
        prefix, colon, listed = entry.rpartition(":")
        if not colon and number:
            raise ValueError(f"{name}={text}: all entries but the first need a name: AllReduce:...")
        if colon and prefix.casefold() not in functions:
            choices = name_choices(FUNCTIONS.values(), prefix)
            raise ValueError(f"{name}={text}: NCCL has no function {prefix!r}: {choices}")
        given = set()
        for each in filter(None, listed.removeprefix("^").split(",")):
            if each.casefold() not in spelled:
                choices = name_choices(names, each)
                raise ValueError(f"{name}={text}: {each!r} is not one of {choices}")
            given.add(spelled[each.casefold()])
        if not colon or prefix.casefold() == function.casefold():
            allowed = set(names) - given if listed.startswith("^") else given
    return allowed
