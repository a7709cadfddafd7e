"""Steps, bytes and alpha-beta-gamma time of every algorithm, computed from its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.plan.catalog import Algorithm, catalog
from unisono.plan.simulate import simulate
from unisono.plan.topology import Topology


@dataclass(frozen=True)
class Cost:
    """What an algorithm costs on n ranks that are all connected alike.

    Bytes are in units of the tensor. The time is `alpha` times what a message costs however small
    it is, `beta` times what one tensor takes on a port, `gamma` times what adding one takes; each
    is the longest chain of its kind, found by simulating with the other two at zero. A rank sends
    one message at a time, and receives one at a time.

    `algorithm` takes `steps` steps on `ranks` ranks; the busiest rank sends `most_sent`, all
    together `total_sent`.

    >>> from unisono import plan
    >>> [cost.time for cost in plan.costs(8, "all_reduce") if cost.algorithm.name == "ring"]
    ['14 a + 1.75 b + 0.875 g']
    """

    algorithm: Algorithm
    ranks: int
    steps: int
    most_sent: float
    total_sent: float
    alpha: float
    beta: float
    gamma: float

    def time_s(self, message_s: float, tensor_s: float, adding_s: float = 0.0) -> float:
        """alpha x a message + beta x (bytes / bandwidth) + gamma x (bytes / speed of adding)."""
        return self.alpha * message_s + self.beta * tensor_s + self.gamma * adding_s

    @property
    def time(self) -> str:
        """The same as text: `14 a + 1.75 b + 0.875 g`."""
        parts = ((self.alpha, "a"), (self.beta, "b"), (self.gamma, "g"))
        return " + ".join(f"{round(value, 3):g} {name}" for value, name in parts if value) or "0"


def cost(algorithm: Algorithm, ranks: int, **options: int) -> Cost:
    """The costs of `algorithm` on `ranks` ranks. Raises ValueError where it does not work."""
    schedule = algorithm.schedule(ranks, **options)
    sent = schedule.chunks_sent() * schedule.chunk_bytes(1.0)
    alpha, beta, gamma = (
        simulate(schedule, model, 1.0).time_s
        for model in (
            Topology.flat(0.0, math.inf, overhead_s=1.0),
            Topology.flat(0.0, 1.0),
            Topology.flat(0.0, math.inf, reduce_bytes_per_s=1.0),
        )
    )
    most, total = float(sent.max()), float(sent.sum())
    return Cost(algorithm, ranks, schedule.rounds, most, total, alpha, beta, gamma)


def costs(ranks: int, collective: str | None = None, **options: int) -> list[Cost]:
    """What every algorithm costs on `ranks` ranks, or those of one `collective`. `options`, like
    `pieces`, go to those that know them.

    Raises ValueError for no ranks, or where there is no such collective.

    >>> from unisono import plan
    >>> {cost.algorithm.name: cost.steps for cost in plan.costs(8, "all_reduce")}["ring"]
    14
    """
    found = []
    for entry in catalog(collective):
        if ranks <= (entry.most_ranks or ranks):
            try:
                found.append(cost(entry, ranks, **options))
            except ValueError:
                if entry.name != "hierarchical":
                    raise
    return found
