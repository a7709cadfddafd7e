"""How long a collective takes on a group of a mesh, by simulation.

A group along an axis of the mesh has every stride-th rank. On a node it has `node_size / stride`
ranks, and shares the cards with the other groups of the node that call at the same time. A time is
linear in the bytes but for the algorithm's choice: each algorithm is simulated without bytes and
with 1 GiB, and the fastest for a size counts.
"""

import dataclasses
from math import gcd, prod

from unisono.plan.catalog import find
from unisono.plan.layouts.memory import Layout
from unisono.plan.schedule import Schedule, Step
from unisono.plan.simulate import simulate
from unisono.plan.topology import Topology

_LARGE = 1 << 30
_ORDER = ("tp", "ep", "cp", "pp", "dp")
_MOST_CHANNELS = 1 << 13
Lines = list[tuple[float, float]]
"""For each algorithm, the seconds of a call and of a byte."""


class Calls:
    """Times of collectives on the groups of layouts on one `cluster`; each kind of group is
    simulated once."""

    def __init__(self, cluster: Topology) -> None:
        self.cluster = cluster
        self._lines: dict[tuple[str, int, int], Lines] = {}

    def time_s(self, call: str, layout: Layout, axes: str, total_bytes: float) -> float:
        """A `call` along `axes` ("dp", or "dp cp" for both together): an "all_reduce" of so many
        bytes, of which a reduce_scatter or an all_gather takes half, an "all_to_all" in which each
        rank has so many, or a "send" to the next rank."""
        size = prod(getattr(layout, axis) for axis in axes.split())
        if size == 1 or not total_bytes:
            return 0.0
        first = next(axis for axis in _ORDER if axis in axes.split() and getattr(layout, axis) > 1)
        stride = prod(getattr(layout, axis) for axis in _ORDER[: _ORDER.index(first)])
        together = gcd(size, max(1, self.cluster.node_size // stride))
        if call == "send":  # the worst of all neighbours
            size, together = 2, 2 if size <= together else 1
        key = call, size, together
        if key not in self._lines:
            self._lines[key] = self._simulate(*key)
        return min(call_s + total_bytes * byte_s for call_s, byte_s in self._lines[key])

    def _simulate(self, call: str, size: int, together: int) -> Lines:
        cluster = self.cluster
        # The cards that are left for this group while its neighbours on the node call, too.
        cards = max(1, cluster.cards * together // cluster.node_size)
        card_bytes_per_s = cluster.cards * cluster.card_bytes_per_s * together / cluster.node_size
        topology = dataclasses.replace(
            cluster, node_size=together, cards=cards, card_bytes_per_s=card_bytes_per_s / cards
        )
        lines = []
        for schedule in self._schedules(call, size, topology):
            call_s = simulate(schedule, topology, 0).time_s
            lines.append((call_s, (simulate(schedule, topology, _LARGE).time_s - call_s) / _LARGE))
        return lines

    def _schedules(self, call: str, size: int, topology: Topology) -> list[Schedule]:
        if call == "send":
            return [Schedule.from_steps("broadcast", "send", 2, 1, [Step.of(0, 1, 0, "copy")])]
        if call == "all_to_all":
            return [find("all_to_all", "pairwise").schedule(size)]
        rails = topology.rails(size)
        channels = rails if size * rails <= _MOST_CHANNELS else 1
        node_size = topology.node_size
        found = [find("all_reduce", "ring").schedule(size, node_size=node_size, channels=channels)]
        if 1 < node_size < size:
            found.append(find("all_reduce", "hierarchical").schedule(size, node_size=node_size))
        else:
            found.append(find("all_reduce", "halving_doubling").schedule(size))
        return found
