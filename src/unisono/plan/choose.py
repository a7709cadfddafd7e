"""Which algorithm is fastest for a collective, ranks, size and topology; and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.errors import name_number
from unisono.plan.catalog import Algorithm, catalog, find
from unisono.plan.in_network import NAME, PIECES, InNetwork, reduce_in_network
from unisono.plan.schedule import Schedule
from unisono.plan.simulate import Timeline, simulate
from unisono.plan.sizes import format_size
from unisono.plan.topology import Topology


@dataclass(frozen=True)
class Choice:
    """An `algorithm`, as it would be run, by its `schedule`, and how long the simulation says that
    takes, its `timeline`. `pieces` is into how many it cuts the tensor, None where it does not.

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

    @property
    def time_s(self) -> float:
        """How long it takes."""
        return self.timeline.time_s

    @property
    def busiest_rank_sends_bytes(self) -> float:
        """What the rank sends that sends most."""
        chunk_bytes = self.schedule.chunk_bytes(self.timeline.total_bytes)
        return float(self.schedule.chunks_sent().max()) * chunk_bytes

    @property
    def label(self) -> str:
        """The algorithm's name, and its pieces if it has any."""
        return self.algorithm.name + (
            f" ({self.pieces} pieces)" if self.pieces and self.pieces > 1 else ""
        )


@dataclass(frozen=True)
class Ranking:
    """The algorithms of a `collective` on `ranks` ranks of a `topology`, for `total_bytes`.

    `choices` has them, the fastest first; `left_out` which were not looked at, each with a reason;
    `in_network` an all_reduce by switches that add, where there are any.

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
    in_network: InNetwork | None = None

    @property
    def best(self) -> Choice:
        """The fastest algorithm."""
        return self.choices[0]

    @property
    def times_s(self) -> dict[str, float]:
        """How long each algorithm takes, and the switches, where they add, as "sharp"."""
        times = {choice.algorithm.name: choice.time_s for choice in self.choices}
        return times if self.in_network is None else times | {NAME: self.in_network.time_s}


def rank_algorithms(collective: str, ranks: int, total_bytes: int, topology: Topology) -> Ranking:
    """The algorithms of `collective`, ranked by the time that `total_bytes` on `ranks` ranks of
    `topology` take in a simulation.

    Of a pipelined algorithm only the best number of pieces is shown. Raises ValueError for an
    unknown collective or no ranks.

    >>> from unisono import plan
    >>> small = plan.rank_algorithms("all_reduce", 64, 8, plan.find_topology("h100"))
    >>> small.best.time_s < small.choices[-1].time_s
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
) -> list[Ranking]:
    """`rank_algorithms` for several sizes; schedules are made once. `say` hears what is next;
    `names` are the algorithms to rank, if not all; those that cut a tensor into pieces do so into
    as many as `pieces_to_try` has, and the best counts. Raises ValueError where none works."""
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    found: list[tuple[Algorithm, Schedule, int | None]] = []
    left_out: list[tuple[str, str]] = []
    for entry in [find(collective, name) for name in names] or catalog(collective):
        cuts = [{"pieces": n} for n in pieces_to_try] if "pieces" in entry.options else [{}]
        try:
            for cut in cuts:
                made = entry.schedule(ranks, node_size=min(topology.node_size, ranks), **cut)
                found.append((entry, made, cut.get("pieces")))
        except ValueError as error:
            left_out.append((entry.name, str(error)))
    if not found:
        raise ValueError(", ".join(f"{name}: {reason}" for name, reason in left_out))
    rankings = []
    for size in sizes:
        best: dict[str, Choice] = {}
        for number, (entry, schedule, pieces) in enumerate(found, 1):
            of_size = f"{format_size(size)}, " if len(sizes) > 1 else ""
            say(f"{of_size}{entry.name} ({number} of {len(found)})")
            timeline = simulate(schedule, topology, size)
            if entry.name not in best or timeline.time_s < best[entry.name].time_s:
                best[entry.name] = Choice(entry, schedule, timeline, pieces)
        choices = tuple(sorted(best.values(), key=lambda choice: choice.time_s))
        by_switches = None
        if collective == "all_reduce" and topology.switch_ports and topology.nodes(ranks) > 1:
            by_switches = reduce_in_network(ranks, topology, size)
        rankings.append(
            Ranking(collective, ranks, size, topology, choices, tuple(left_out), by_switches)
        )
    return rankings


def explain(ranking: Ranking) -> str:
    """Why the fastest algorithm of a `ranking` is: what its time consists of.

    Each cause is measured by taking it away: how much faster would it be without latency, with
    ports or cards of unlimited bandwidth, with free addition? Raises nothing.

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
    cause, share = max(shares.items(), key=lambda item: item[1], default=("latency", 0.0))
    name = best.algorithm.name
    if cause == "latency":
        why = (
            f"{name} is latency-bound: {share:.0%} of its time goes away without latency and "
            f"overhead, which {name_number(best.schedule.rounds, 'step')} cost"
        )
    else:
        kind = "bandwidth" if "bandwidth" in cause else "computing"
        why = (
            f"{name} is {kind}-bound: {share:.0%} of its time goes away with an unlimited {cause}, "
            f"{shares['latency']:.0%} without latency and overhead"
        )
    return why + "."


def _without(topology: Topology, timeline: Timeline) -> dict[str, Topology]:
    """The topology with one cause of time taken away; of bandwidths and speed only those that keep
    something busy for at least half as long as the one that does so for longest."""
    free = dataclasses.replace(
        topology, inside_latency_s=0.0, between_latency_s=0.0, overhead_s=0.0, call_s=0.0
    )
    limits = {
        "bandwidth of the ranks' ports": (
            timeline.most_bytes("port") / topology.inside_bytes_per_s,
            dataclasses.replace(topology, inside_bytes_per_s=math.inf),
        ),
        "speed of reduction": (
            float(timeline.reducing_s.max()),
            dataclasses.replace(topology, reduce_bytes_per_s=math.inf),
        ),
        "bandwidth of the network cards": (
            timeline.most_bytes("card") / topology.card_bytes_per_s,
            dataclasses.replace(topology, card_bytes_per_s=math.inf),
        ),
    }
    most_s = max(busy_s for busy_s, _ in limits.values())
    causes = {"latency": free}
    for cause, (busy_s, without) in limits.items():
        if 0 < most_s <= 2 * busy_s:
            causes[cause] = without
    return causes
