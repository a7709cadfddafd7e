"""Which algorithm is fastest for a collective, ranks, size and topology; and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unisono.errors import name_number
from unisono.plan.catalog import Algorithm, catalog, find
from unisono.plan.in_network import InNetwork, reduce_in_network
from unisono.plan.schedule import Schedule
from unisono.plan.simulate import Timeline, simulate, simulate_speeds
from unisono.plan.sizes import format_seconds, format_size
from unisono.plan.topology import Topology

# Into how many pieces the pipelined algorithms are cut, to find out how many are best.
PIECES = (1, 8, 64)


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
    """An all_reduce by switches that add, where the topology has them and there are nodes."""

    @property
    def best(self) -> Choice:
        """The fastest algorithm."""
        return self.choices[0]


def schedules(
    collective: str,
    ranks: int,
    node_size: int,
    names: Sequence[str] = (),
    pieces_to_try: Sequence[int] = PIECES,
) -> tuple[list[tuple[Algorithm, Schedule, int | None]], tuple[tuple[str, str], ...]]:
    """Every algorithm's schedule for `ranks` ranks, or that of those named, and which were left
    out, each with a reason."""
    found: list[tuple[Algorithm, Schedule, int | None]] = []
    left_out = []
    wanted = [find(collective, name) for name in names] or catalog(collective)
    for entry in wanted:
        try:
            for pieces in pieces_to_try if "pieces" in entry.options else (None,):
                options = {"node_size": min(node_size, ranks)}
                options |= {} if pieces is None else {"pieces": pieces}
                found.append((entry, entry.schedule(ranks, **options), pieces))
        except ValueError as error:
            left_out.append((entry.name, str(error)))
    return found, tuple(left_out)


def left_out(ranks: int, collective: str | None, node_size: int) -> Iterator[tuple[str, str]]:
    """The algorithms that `costs` leaves out, each with the reason."""
    for entry in catalog(collective):
        if ranks > (entry.most_ranks or ranks) or "node_size" in entry.options:
            try:
                entry.schedule(ranks, node_size=node_size)
            except ValueError as error:
                yield f"{entry.name} of {entry.collective}", str(error)


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
    found, left_out = schedules(collective, ranks, topology.node_size, names, pieces_to_try)
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
        rankings.append(Ranking(collective, ranks, size, topology, choices, left_out, by_switches))
    return rankings


def explain(ranking: Ranking) -> str:
    """Why the fastest algorithm of a `ranking` is: what its time consists of, and what the next one
    does worse.

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
    times_s = simulate_speeds(best.schedule, list(causes.values()), ranking.total_bytes)
    shares = {
        cause: 1 - time_s / best.time_s for cause, time_s in zip(causes, times_s, strict=True)
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
    if len(ranking.choices) > 1:
        why += f". {_against(ranking, cause)}"
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


def _against(ranking: Ranking, cause: str) -> str:
    """What the second does more of than the first, where they differ most in what counts."""
    best, second = (_effort(ranking, choice, cause) for choice in ranking.choices[:2])
    runner_up = ranking.choices[1]
    says = f"{runner_up.algorithm.name}, next with {format_seconds(runner_up.time_s)},"
    ratios = {what: second[what] / best[what] for what in best if best[what]}
    what = max(ratios, key=lambda key: ratios[key], default=None)
    if what is None or ratios[what] < 1.01:
        return f"{says} does no more of anything, but in another order"
    return f"{says} has {second[what]:,.4g} {what} against {best[what]:,.4g}"


def _effort(ranking: Ranking, choice: Choice, cause: str) -> dict[str, float]:
    """What costs time in a schedule where `cause` is what limits the fastest one."""
    schedule, topology, timeline = choice.schedule, ranking.topology, choice.timeline
    if cause == "latency":
        size = topology.node_size
        far = sum(hop.source // size != hop.destination // size for hop in timeline.critical_path)
        return {
            "steps": schedule.rounds,
            "messages at its busiest rank": schedule.most_messages(),
            "hops between nodes, one after the other,": far,
        }
    kind: Literal["card", "port"] = "card" if "cards" in cause else "port"
    return {
        f"MB through its busiest {kind}": timeline.most_bytes(kind) / 1e6,
        "steps": schedule.rounds,
    }
