"""Which algorithm is fastest for a collective on some ranks of a topology, and why."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import name_number
from unisono.plan.catalog import Algorithm, catalog, find
from unisono.plan.schedule import Schedule
from unisono.plan.simulate import Timeline, simulate
from unisono.plan.sizes import format_size
from unisono.plan.topology import Topology

PIECES = (1, 8, 64)
"""The numbers of pieces to try for a pipeline; the best one counts."""
_PORTS, _CARDS = "bandwidth of the ranks' ports", "bandwidth of the network cards"
_BOTH = "bandwidth of the ranks' ports and the network cards"
MOST_CHANNELS = 1 << 15
"""A ranking tries several channels only if all ranks together then have at most this many."""


@dataclass(frozen=True)
class Choice:
    """An `algorithm` with the `schedule` to run and its simulated `timeline`. `pieces` is the
    number of pieces that it cuts the tensor into, `channels` the number of rings or trees that run
    at once; None if the algorithm has no such option.

    >>> from unisono import plan
    >>> h100 = plan.find_topology("h100")
    >>> best = plan.rank_algorithms("all_reduce", 16, 1 << 20, h100).best
    >>> best.label.startswith(best.algorithm.name), best.time_s > 0
    (True, True)
    """

    algorithm: Algorithm
    schedule: Schedule = field(repr=False)
    timeline: Timeline = field(repr=False)
    pieces: int | None = None
    channels: int | None = None

    @property
    def time_s(self) -> float:
        """The simulated time."""
        return self.timeline.time_s

    @property
    def busiest_rank_sends_bytes(self) -> float:
        """The bytes that the busiest rank sends."""
        chunk_bytes = self.schedule.chunk_bytes(self.timeline.total_bytes)
        return float(self.schedule.chunks_sent().max()) * chunk_bytes

    @property
    def label(self) -> str:
        """The algorithm's name, and its pieces and channels if it has several."""
        cut = {"pieces": self.pieces or 1, "channels": self.channels or 1}
        several = ", ".join(f"{count} {what}" for what, count in cut.items() if count > 1)
        return self.algorithm.name + (f" ({several})" if several else "")


@dataclass(frozen=True)
class Ranking:
    """The algorithms of a `collective` on `ranks` ranks of a `topology`, for `total_bytes`.

    `choices` lists them, the fastest first, and after them those that cannot be run but only
    planned; `left_out` lists those that were not simulated, each with the reason. See also
    `rank_algorithms`.

    >>> from unisono import plan
    >>> ranking = plan.rank_algorithms("broadcast", 8, 1 << 20, plan.find_topology("h100"))
    >>> ranking.best is ranking.choices[0]
    True
    """

    collective: str
    ranks: int
    total_bytes: int
    topology: Topology
    choices: tuple[Choice, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Choice:
        """The fastest algorithm that can be run, or the fastest if none can."""
        return self.choices[0]

    @property
    def only_planned(self) -> dict[str, str]:
        """The algorithms that cannot be run, each with the reason."""
        entries = [choice.algorithm for choice in self.choices]
        return {entry.name: entry.only_planned for entry in entries if entry.only_planned}

    @property
    def times_s(self) -> dict[str, float]:
        """The time of each algorithm that can be run, or of all if none can."""
        planned = self.only_planned if not self.best.algorithm.only_planned else {}
        return {
            choice.algorithm.name: choice.time_s
            for choice in self.choices
            if choice.algorithm.name not in planned
        }


def rank_algorithms(collective: str, ranks: int, total_bytes: int, topology: Topology) -> Ranking:
    """The algorithms of `collective`, ranked by their simulated time for `total_bytes` on `ranks`
    ranks of `topology`.

    An algorithm with pieces or channels appears once, with the best number of them: one channel and
    one per rail of the topology are tried. Raises ValueError for an unknown collective or no ranks.
    See also `explain`.

    >>> from unisono import plan
    >>> small = plan.rank_algorithms("all_reduce", 64, 8, plan.find_topology("h100"))
    >>> small.best.time_s < max(choice.time_s for choice in small.choices)
    True
    """
    return rank_sizes(collective, ranks, (total_bytes,), topology)[0]


def rank_sizes(
    collective: str,
    ranks: int,
    sizes: tuple[int, ...],
    topology: Topology,
    say: Callable[[str], None] = lambda text: None,
    names: Sequence[str] = (),
    pieces_to_try: Sequence[int] = PIECES,
    channels_to_try: Sequence[int] = (),
) -> list[Ranking]:
    """`rank_algorithms` for several sizes, with each schedule built once. Calls `say` with what it
    does next. `names` are the algorithms to rank, by default all. For pieces and channels, the best
    of `pieces_to_try` and `channels_to_try` counts. Raises ValueError if no algorithm works."""
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    found: list[tuple[Algorithm, Schedule, dict[str, int]]] = []
    left_out: list[tuple[str, str]] = []
    rails = topology.rails(ranks)
    # many ranks have only one channel, or a ranking would take minutes
    by_default = (1, rails) if rails > 1 and ranks * rails <= MOST_CHANNELS else (1,)
    tried = {"pieces": pieces_to_try, "channels": channels_to_try or by_default}
    for entry in [find(collective, name) for name in names] or catalog(collective):
        known = {option: values for option, values in tried.items() if option in entry.options}
        made, reason = 0, ""
        for values in itertools.product(*known.values()):
            cut = dict(zip(known, values, strict=True))
            try:
                schedule = entry.schedule(ranks, node_size=min(topology.node_size, ranks), **cut)
            except ValueError as error:
                reason = reason or str(error)
            else:
                found.append((entry, schedule, cut))
                made += 1
        if not made:
            left_out.append((entry.name, reason))
    if not found:
        raise ValueError(", ".join(f"{name}: {reason}" for name, reason in left_out))
    rankings = []
    for size in sizes:
        best: dict[str, Choice] = {}
        for number, (entry, schedule, cut) in enumerate(found, 1):
            of_size = f"{format_size(size)}, " if len(sizes) > 1 else ""
            say(f"{of_size}{entry.name} ({number} of {len(found)})")
            timeline = simulate(schedule, topology, size)
            if entry.name not in best or timeline.time_s < best[entry.name].time_s:
                best[entry.name] = Choice(entry, schedule, timeline, **cut)
        choices = tuple(
            sorted(best.values(), key=lambda each: (each.algorithm.only_planned != "", each.time_s))
        )
        rankings.append(Ranking(collective, ranks, size, topology, choices, tuple(left_out)))
    return rankings


def explain(ranking: Ranking) -> str:
    """Why the fastest algorithm of a `ranking` is the fastest: what its time consists of.

    Each cause is measured by taking it away: how much faster would the algorithm be without
    latency, with ports or cards of unlimited bandwidth, with free addition? Raises nothing. See
    also `rank_algorithms`.

    >>> from unisono import plan
    >>> tiny = plan.rank_algorithms("all_reduce", 64, 8, plan.find_topology("h100"))
    >>> "latency-bound" in plan.explain(tiny)
    True
    """
    best, topology = ranking.best, ranking.topology
    if not best.schedule.rounds:
        return "One rank has nothing to move."
    causes = _without(topology, best.timeline) if best.time_s else {}
    shares = {
        cause: 1 - simulate(best.schedule, without, ranking.total_bytes).time_s / best.time_s
        for cause, without in causes.items()
    }
    both = shares.pop(_BOTH, 0.0)
    cause, share = max(shares.items(), key=lambda item: item[1], default=("latency", 0.0))
    if both > 2 * share:  # each hides the other
        cause, share = _BOTH, both
    name = best.algorithm.name
    if cause == "latency":
        why = (
            f"{name} is latency-bound: without the latency and overhead of its "
            f"{name_number(best.schedule.rounds, 'step')} it would take {share:.0%} less time"
        )
    else:
        kind = "bandwidth" if "bandwidth" in cause else "computing"
        why = (
            f"{name} is {kind}-bound: with unlimited {cause} it would take {share:.0%} less time, "
            f"without latency and overhead {shares['latency']:.0%} less"
        )
    return why + "."


def _without(topology: Topology, timeline: Timeline) -> dict[str, Topology]:
    """The topology with each cause of time taken away in turn. A bandwidth or speed counts only if
    it keeps something busy at least half as long as the slowest does."""
    free = dataclasses.replace(
        topology, inside_latency_s=0.0, between_latency_s=0.0, overhead_s=0.0, call_s=0.0
    )
    limits = {
        _PORTS: (timeline.most_bytes("port") / topology.inside_bytes_per_s, "inside_bytes_per_s"),
        "speed of reduction": (float(timeline.reducing_s.max()), "reduce_bytes_per_s"),
        _CARDS: (timeline.most_bytes("card") / topology.card_bytes_per_s, "card_bytes_per_s"),
    }
    most_s = max(busy_s for busy_s, _ in limits.values())
    busy: dict[str, dict[str, Any]] = {
        cause: {limit: math.inf}
        for cause, (busy_s, limit) in limits.items()
        if 0 < most_s <= 2 * busy_s
    }
    if _PORTS in busy and _CARDS in busy:
        busy[_BOTH] = busy[_PORTS] | busy[_CARDS]
    unlimited = {cause: dataclasses.replace(topology, **fields) for cause, fields in busy.items()}
    return {"latency": free} | unlimited
