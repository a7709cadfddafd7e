"""Steps, bytes and alpha-beta-gamma time of every algorithm, computed from its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.plan.catalog import Algorithm, catalog
from unisono.plan.simulate import simulate
from unisono.plan.topology import Topology


@dataclass(frozen=True)
class Cost:
    """The cost of an algorithm on ranks that are all connected alike.

    Bytes are in units of the tensor. The time is `alpha` times the fixed cost of a message, plus
    `beta` times the time of one tensor on a port, plus `gamma` times the time to add one tensor.
    Each is the longest chain of its kind, found by a simulation in which the other two cost
    nothing. A rank sends one message at a time and receives one at a time.

    `algorithm` takes `steps` steps on `ranks` ranks; the busiest rank sends `most_sent`, all ranks
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

    @property
    def time(self) -> str:
        """The time as text: `14 a + 1.75 b + 0.875 g`."""
        parts = ((self.alpha, "a"), (self.beta, "b"), (self.gamma, "g"))
        return " + ".join(f"{round(value, 3):g} {name}" for value, name in parts if value) or "0"


def costs(ranks: int, collective: str | None = None, **options: int) -> list[Cost]:
    """The cost of every algorithm on `ranks` ranks, or of those of one `collective`. `options`,
    such as `pieces`, go to the algorithms that have them. Algorithms that do not work with these
    ranks and options are left out.

    Raises ValueError for no ranks or an unknown collective. See also `simulate`.

    >>> from unisono import plan
    >>> {cost.algorithm.name: cost.steps for cost in plan.costs(8, "all_reduce")}["ring"]
    14
    """
    return costs_and_left_out(ranks, collective, **options)[0]


def costs_and_left_out(
    ranks: int, collective: str | None = None, **options: int
) -> tuple[list[Cost], list[tuple[str, str]]]:
    """Like `costs`; also returns the algorithms that are left out, each with the reason."""
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    models = (
        Topology.flat(0.0, math.inf, overhead_s=1.0),
        Topology.flat(0.0, 1.0),
        Topology.flat(0.0, math.inf, reduce_bytes_per_s=1.0),
    )
    found, left_out = [], []
    for entry in catalog(collective):
        try:
            schedule = entry.schedule(ranks, **options)
        except ValueError as error:
            left_out.append((f"{entry.name} of {entry.collective}", str(error)))
            continue
        sent = schedule.chunks_sent() * schedule.chunk_bytes(1.0)
        most, total = float(sent.max()), float(sent.sum())
        alpha, beta, gamma = (simulate(schedule, model, 1.0).time_s for model in models)
        found.append(Cost(entry, ranks, schedule.rounds, most, total, alpha, beta, gamma))
    return found, left_out
