"""How long a collective should take: a model fitted to a few measured points, for all other sizes.

t(S) = latency + S x cost(S), the model of Thakur, Rabenseifner and Gropp (2005) with a beta for
each cache that may hold the bytes. Between two measured sizes, the cost of a byte is modelled as a
power of the size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy

WIDEST_GAP = 24.0
"""The largest factor between two calibration points: a wider gap could hide a regime."""


@dataclass(frozen=True)
class CostModel:
    """A fitted collective: its latency, and the cost of a byte at each measured size."""

    latency_s: float
    sizes_bytes: tuple[int, ...] = ()
    costs_s_per_byte: tuple[float, ...] = ()

    def cost_s_per_byte(self, size_bytes: float) -> float:
        """The cost of a byte in a message of this size."""
        if not self.sizes_bytes or size_bytes <= 0:
            return 0.0
        logarithms = [math.log(size) for size in self.sizes_bytes]
        costs = numpy.asarray(self.costs_s_per_byte)
        if costs.min() <= 0:
            return float(numpy.interp(math.log(size_bytes), logarithms, costs))
        return float(numpy.exp(numpy.interp(math.log(size_bytes), logarithms, numpy.log(costs))))

    def predict_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes * self.cost_s_per_byte(size_bytes)


def fit(times_s: Mapping[int, float]) -> CostModel:
    """The model through these measured times, by size in bytes."""
    if not times_s:
        raise ValueError("a fit needs at least one measured time")
    if min(times_s.values()) <= 0:
        raise ValueError("a measured time must be above zero")
    sizes = sorted(size for size in times_s if size > 0)
    if not sizes:
        return CostModel(times_s[0])
    latency_s = times_s[0] if 0 in times_s else _latency_s(sizes, times_s)
    costs = [max(0.0, times_s[size] - latency_s) / size for size in sizes]
    if len(sizes) > 1 and costs[0] == 0.0:
        # The smallest size's time is all latency, so it says nothing about the cost of a byte.
        costs[0] = costs[1]
    return CostModel(latency_s, tuple(sizes), tuple(costs))


def _latency_s(sizes: Sequence[int], times_s: Mapping[int, float]) -> float:
    """The time of a message without bytes, by the line through the two smallest points."""
    first, first_s = sizes[0], times_s[sizes[0]]
    if len(sizes) == 1:
        return first_s
    second, second_s = sizes[1], times_s[sizes[1]]
    slope = max(0.0, (second_s - first_s) / (second - first))
    # If a later point is faster than the first, the first was not all latency.
    return max(0.0, min(first_s - slope * first, *times_s.values()))


def calibration_sizes(sizes: Iterable[int], caches_bytes: Sequence[int] = ()) -> tuple[int, ...]:
    """Which sizes to measure first, so that the others can be predicted: the smallest, the largest,
    those near cache sizes, and more wherever a gap is wider than `WIDEST_GAP`."""
    ordered = sorted(set(sizes))
    if len(ordered) <= 2:
        return tuple(ordered)
    chosen = {ordered[0], ordered[-1]}
    for cache in caches_bytes:
        if ordered[0] < cache < ordered[-1]:
            chosen.add(min(ordered, key=lambda size: abs(math.log(max(size, 1) / cache))))
    # After the last cache comes memory, and the drop in speed is steepest there.
    chosen.update([size for size in ordered if size >= 2 * max(caches_bytes, default=0)][:1])
    while True:
        known = sorted(chosen)
        gaps = [
            (high / max(low, 1), low, high)
            for low, high in pairwise(known)
            if high / max(low, 1) > WIDEST_GAP and any(low < size < high for size in ordered)
        ]
        if not gaps:
            return tuple(known)
        _, low, high = max(gaps)
        middle = math.sqrt(max(low, 1) * high)
        between = [size for size in ordered if low < size < high]
        chosen.add(min(between, key=lambda size: abs(math.log(size / middle))))


def mean_absolute_error(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of |expected - measured| / measured over pairs of (expected, measured)."""
    return sum(abs(expected - measured) / measured for expected, measured in pairs) / len(pairs)
