"""Small calls over several hosts, as unisono runs them (docs/hosts.md).

Every rank sends what it has to its mate on each other host, the rank with the same number there;
then the ranks of a host share what they have and what they got. So every rank has everything after
one hop between hosts and one inside, with few messages on the network: dissemination in two
dimensions. With h hosts of g ranks, each more than 1:

| steps | messages of a rank | a rank sends                                  |
|-------|--------------------|-----------------------------------------------|
| 2     | h - 1 + g - 1      | as many tensors; all_gather (h-1)/n + (g-1)/g |

reduce_scatter and all_to_all also move data that a rank does not need, but it is small. unisono
combines what has arrived in the order of ranks. A schedule cannot express this, because it has no
buffers to keep parts in: with it, all_reduce and reduce_scatter would add in a different order on
each rank.
"""

from collections.abc import Sequence

from unisono.plan.algorithms.lanes import Hosts, hosts_of, make_step
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Schedule

_ORDER = "its schedule would add in a different order on each rank; run lanes instead"


@algorithm("all_reduce", "mates", most_ranks=1024, only_planned=_ORDER)
def all_reduce(ranks: int, node_size: int | Hosts = 1) -> Schedule:
    return _combine("all_reduce", ranks, node_size, 1)


@algorithm("reduce_scatter", "mates", most_ranks=1024, only_planned=_ORDER)
def reduce_scatter(ranks: int, node_size: int | Hosts = 1) -> Schedule:
    return _combine("reduce_scatter", ranks, node_size, ranks)


@algorithm("barrier", "mates", most_ranks=1024)
def barrier(ranks: int, node_size: int | Hosts = 1) -> Schedule:
    return _combine("barrier", ranks, node_size, 1)


@algorithm("all_gather", "mates", most_ranks=1024)
def all_gather(ranks: int, node_size: int | Hosts = 1) -> Schedule:
    return _collect("all_gather", ranks, node_size, 1)


@algorithm("all_to_all", "mates", most_ranks=512)
def all_to_all(ranks: int, node_size: int | Hosts = 1) -> Schedule:
    return _collect("all_to_all", ranks, node_size, ranks)


@algorithm("broadcast", "mates", most_ranks=1024)
def broadcast(ranks: int, root: int = 0, node_size: int | Hosts = 1) -> Schedule:
    hosts = hosts_of(ranks, node_size)
    between = [(source, to, 0, 1) for source, to in _to_mates(hosts) if source == root]
    have = {root, *(to for _, to, _, _ in between)}
    inside = [(source, to, 0, 1) for source, to in _inside(hosts) if source in have]
    steps = [make_step(between, "copy"), make_step(inside, "copy")]
    return Schedule.from_steps("broadcast", "mates", ranks, 1, steps, root)


def _combine(collective: str, ranks: int, node_size: int | Hosts, chunks: int) -> Schedule:
    hosts = hosts_of(ranks, node_size)
    steps = [
        make_step([(source, to, 0, chunks) for source, to in pairs], "reduce")
        for pairs in (_to_mates(hosts), _inside(hosts))
    ]
    return Schedule.from_steps(collective, "mates", ranks, chunks, steps)


def _collect(collective: str, ranks: int, node_size: int | Hosts, row: int) -> Schedule:
    """Send each rank's `row` chunks to every rank."""
    hosts = hosts_of(ranks, node_size)
    between = [(source, to, source * row, row) for source, to in _to_mates(hosts)]
    inside = [
        (source, to, origin * row, row)
        for number, host in enumerate(hosts)
        for index, source in enumerate(host)
        for origin in origins_of(hosts, number, index)
        for to in host
    ]
    steps = [make_step(between, "copy"), make_step(inside, "copy")]
    return Schedule.from_steps(collective, "mates", ranks, ranks * row, steps)


def _to_mates(hosts: Hosts) -> list[tuple[int, int]]:
    return [
        (source, mate_on(there, index))
        for host in hosts
        for index, source in enumerate(host)
        for there in hosts
        if there is not host
    ]


def _inside(hosts: Hosts) -> list[tuple[int, int]]:
    return [(source, to) for host in hosts for source in host for to in host]


def mate_on(host: Sequence[int], index: int) -> int:
    """The rank of another host to which this host's index-th rank sends all that is for it."""
    return host[index % len(host)]


def origins_of(hosts: Hosts, number: int, index: int) -> list[int]:
    """Whose data a rank forwards inside its host: its own, then that of the ranks whose mate it
    is."""
    here = hosts[number]
    found = [here[index]]
    for other, ranks in enumerate(hosts):
        if other != number:
            found += [rank for at, rank in enumerate(ranks) if at % len(here) == index]
    return found
