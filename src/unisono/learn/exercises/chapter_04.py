"""Chapter 4: what does it cost?

A message of b bytes takes `latency + b / bandwidth` seconds, and a rank sends one and receives one
at a time. Adding costs nothing.
"""


def ring_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of an all_reduce of `size` bytes by a ring."""
    raise NotImplementedError


def tree_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of the same by a binomial tree: reduce to rank 0, then broadcast. The
    number of ranks is a power of two."""
    raise NotImplementedError


def crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Return the size from which on the ring is the faster one."""
    raise NotImplementedError
