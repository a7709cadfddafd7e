"""Small calls over several hosts, as unisono runs them (docs/hosts.md).

Every rank sends what it has to its mate on each other host, the one of the same number; then the
ranks of a host share what they have and what they got. So everybody has everything after one hop
between hosts and one inside, with few messages on the network: a dissemination in two dimensions.
With h hosts of g ranks, each more than 1:

| steps | messages of a rank | a rank sends                                  |
|-------|--------------------|-----------------------------------------------|
| 2     | h - 1 + g - 1      | so many tensors; all_gather (h-1)/n + (g-1)/g |

reduce_scatter and all_to_all move what a rank does not need, too: it is small. unisono combines
what has come in the order of ranks. A schedule cannot say so, for it has no buffers to keep parts
in: run by theirs, all_reduce and reduce_scatter would add in another order on each rank.
"""

from __future__ import annotations

from unisono.plan.algorithms.over_hosts import (
    Hosts,
    Move,
    in_blocks,
    make_step,
    mate_on,
    origins_of,
)
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule

SOURCE = "unisono"
_ALL = "h - 1 + g - 1"
_ORDER = "by its schedule each rank would add in an order of its own; lanes may be run"


@algorithm(
    "all_reduce",
    "mates",
    steps="2",
    sends=_ALL,
    source=SOURCE,
    most_ranks=1024,
    only_planned=_ORDER,
)
def all_reduce(ranks: int, node_size: int = 1) -> Schedule:
    """Every rank ends with the sum of all."""
    return combine_over("all_reduce", in_blocks(ranks, node_size))


@algorithm(
    "reduce_scatter",
    "mates",
    steps="2",
    sends=_ALL,
    source=SOURCE,
    most_ranks=1024,
    only_planned=_ORDER,
)
def reduce_scatter(ranks: int, node_size: int = 1) -> Schedule:
    """Every rank ends with the sum of all, its own part among it."""
    return combine_over("reduce_scatter", in_blocks(ranks, node_size))


@algorithm("barrier", "mates", steps="2", sends="0", source=SOURCE, most_ranks=1024)
def barrier(ranks: int, node_size: int = 1) -> Schedule:
    """Every rank ends knowing that all have come."""
    return combine_over("barrier", in_blocks(ranks, node_size))


@algorithm(
    "all_gather", "mates", steps="2", sends="(h-1)/n + (g-1)/g", source=SOURCE, most_ranks=1024
)
def all_gather(ranks: int, node_size: int = 1) -> Schedule:
    """Every rank ends with everybody's part."""
    return collect_over("all_gather", in_blocks(ranks, node_size))


@algorithm("all_to_all", "mates", steps="2", sends="h - 1 + (g-1) h", source=SOURCE, most_ranks=512)
def all_to_all(ranks: int, node_size: int = 1) -> Schedule:
    """Every rank ends with what each had for each."""
    return collect_over("all_to_all", in_blocks(ranks, node_size))


@algorithm("broadcast", "mates", steps="2", sends=_ALL, source=SOURCE, most_ranks=1024)
def broadcast(ranks: int, root: int = 0, node_size: int = 1) -> Schedule:
    """Every rank ends with the root's tensor."""
    return broadcast_over(in_blocks(ranks, node_size), root)


def combine_over(collective: str, hosts: Hosts) -> Schedule:
    """A collective that adds, for any placement of ranks."""
    ranks = sum(map(len, hosts))
    chunks = ranks if collective == "reduce_scatter" else 1
    between = [(source, to, 0, chunks) for source, to in _to_mates(hosts)]
    inside = [(source, to, 0, chunks) for source, to in _inside(hosts)]
    steps = [make_step(between, "reduce"), make_step(inside, "reduce")]
    return Schedule.from_steps(collective, "mates", ranks, chunks, steps)


def collect_over(collective: str, hosts: Hosts) -> Schedule:
    """all_gather or all_to_all for any placement of ranks: everybody's row goes everywhere."""
    ranks = sum(map(len, hosts))
    row = ranks if collective == "all_to_all" else 1
    between = [(source, to, source * row, row) for source, to in _to_mates(hosts)]
    inside: list[Move] = [
        (source, to, origin * row, row)
        for number, host in enumerate(hosts)
        for index, source in enumerate(host)
        for origin in origins_of(hosts, number, index)
        for to in host
        if to != source
    ]
    steps = [make_step(between, "copy"), make_step(inside, "copy")]
    return Schedule.from_steps(collective, "mates", ranks, ranks * row, steps)


def broadcast_over(hosts: Hosts, root: int) -> Schedule:
    """broadcast for any placement of ranks."""
    ranks = sum(map(len, hosts))
    between = [(source, to, 0, 1) for source, to in _to_mates(hosts) if source == root]
    have = {root, *(to for _, to, _, _ in between)}
    inside = [(source, to, 0, 1) for source, to in _inside(hosts) if source in have]
    steps = [make_step(between, "copy"), make_step(inside, "copy")]
    return Schedule.from_steps("broadcast", "mates", ranks, 1, steps, root)


def _to_mates(hosts: Hosts) -> list[tuple[int, int]]:
    return [
        (source, mate_on(there, index))
        for host in hosts
        for index, source in enumerate(host)
        for there in hosts
        if there is not host
    ]


def _inside(hosts: Hosts) -> list[tuple[int, int]]:
    return [(source, to) for host in hosts for source in host for to in host if to != source]
