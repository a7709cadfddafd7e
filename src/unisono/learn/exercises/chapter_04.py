"""4. What it costs

A message of b bytes takes `latency + b / bandwidth` seconds. A rank can send one message and
receive another at the same time. Adding costs nothing.
"""


def ring_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Return how many seconds a ring takes for an all_reduce of `size` bytes."""
    raise NotImplementedError


def tree_time(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """The same for a binomial tree: reduce to rank 0, then broadcast. `ranks` is a power of 2."""
    raise NotImplementedError


def crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Return the size at which both take the same time."""
    raise NotImplementedError
