"""A solution of chapter 4's exercises."""

import math


def ring_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def tree_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    return 2 * math.log2(ranks) * (latency + size / bandwidth)


def crossover(ranks: int, latency: float, bandwidth: float) -> float:
    steps = math.log2(ranks)
    more_steps = ranks - 1 - steps
    fewer_bytes = steps - (ranks - 1) / ranks
    return latency * bandwidth * more_steps / fewer_bytes
